"""Proximal policy optimisation: an actor, a critic, and an agent that learns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treadle.base.dtypes import float32, int32
from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_seed, check_whole
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.activations import log_softmax
from treadle.frontend.functions.arithmetic import clamp, exp, maximum
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.reductions import mean
from treadle.frontend.functions.reductions import sum as sum_
from treadle.frontend.functions.shaping import unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.types import TensorType
from treadle.models.config import Config
from treadle.models.environments import Environment
from treadle.models.model import Model
from treadle.nn import init
from treadle.nn.activations import Tanh
from treadle.nn.containers import Sequential
from treadle.nn.layers import Linear
from treadle.nn.module import Module
from treadle.optim.standard import adam
from treadle.step.compile import compile_step
from treadle.step.forward import compile_forward


@dataclass(frozen=True)
class PPOConfig(Config):
    """The networks' sizes, and how they learn; the defaults are CleanRL's."""

    model_type: str = "ppo"
    hidden_sizes: tuple[int, ...] = (64, 64)
    lr: float = 2.5e-4
    num_steps: int = 128  # of each copy between updates
    num_minibatches: int = 4
    update_epochs: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    norm_adv: bool = True
    clip_vloss: bool = True

    def check(self) -> None:
        self.need(bool(self.hidden_sizes) and min(self.hidden_sizes) >= 1, "hidden_sizes", "≥ 1.")
        for name in ("num_steps", "num_minibatches", "update_epochs"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        for name in ("gamma", "gae_lambda"):
            self.need(0 <= getattr(self, name) <= 1, name, "It is from 0 to 1.")
        for name in ("lr", "clip_coef", "max_grad_norm"):
            self.need(getattr(self, name) > 0, name, "It is positive.")


def _layers(sizes: tuple[int, ...], last: float) -> Sequential:
    """Linear layers with tanh between them, orthogonal at first."""
    parts: list[Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layer = Linear(a, b)
        is_last = i == len(sizes) - 2
        layer.weight.init = init.orthogonal(last if is_last else math.sqrt(2))
        assert layer.bias is not None
        layer.bias.init = init.zeros
        parts += [layer, Tanh()]
    return Sequential(*parts[:-1])


class ActorCritic(Model):
    """Observations (B, size) → logits of actions (B, actions) and values (B,); CleanRL's names."""

    def __init__(self, size: int, actions: int, config: PPOConfig):
        self.config: PPOConfig = config
        self.critic = _layers((size, *config.hidden_sizes, 1), 1.0)
        self.actor = _layers((size, *config.hidden_sizes, actions), 0.01)

    def forward(self, observations: Operand) -> tuple[Tensor, Tensor]:
        given = as_tensor(observations)
        return self.actor(given), self.critic(given)[:, 0]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The clipped objective, the values' error and the entropy, as they are weighted."""
        config = self.config
        logits, values = self.forward(batch["observations"])
        logs = log_softmax(logits, -1)
        chosen = take_along_axis(logs, unsqueeze(batch["actions"], 1), 1)[:, 0]
        ratio = exp(chosen - batch["logs"])
        gains = batch["advantages"]
        if config.norm_adv:
            gains = gains - mean(gains)
            count = gains.shape[0]
            gains = gains / ((sum_(gains * gains) / max(1, count - 1)) ** 0.5 + 1e-8)
        near = clamp(ratio, 1 - config.clip_coef, 1 + config.clip_coef)
        policy = mean(maximum(-gains * ratio, -gains * near))
        error = (values - batch["returns"]) ** 2
        if config.clip_vloss:
            moved = clamp(values - batch["values"], -config.clip_coef, config.clip_coef)
            error = maximum(error, (batch["values"] + moved - batch["returns"]) ** 2)
        entropy = -mean(sum_(exp(logs) * logs, -1))
        return policy - entropy * config.ent_coef + mean(error) * (0.5 * config.vf_coef)


def advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    ended: np.ndarray,
    gamma: float,
    decay: float,
) -> np.ndarray:
    """Generalised advantages (T, N).

    `following` are the values of what each step led to, 0 where it terminated; `ended` is where
    what comes next is another episode.
    """
    found = np.zeros_like(rewards)
    carried = np.zeros(rewards.shape[1], rewards.dtype)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following[t] - values[t]
        carried = delta + gamma * decay * ~ended[t] * carried
        found[t] = carried
    return found


class PPO:
    """An agent that learns a policy in an environment.

    Acting is one compiled program, an update another. `model` has what was learned.
    """

    def __init__(
        self,
        environment: Environment,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
    ):
        self.environment, self.config = environment, config or PPOConfig()
        config, size, count = self.config, environment.size, environment.count
        self._source = np.random.default_rng(check_seed("PPO", seed))
        rows, left = divmod(config.num_steps * count, config.num_minibatches)
        if left or rows < 1:
            cause = f"{config.num_steps} steps of {count} copies in {config.num_minibatches} parts"
            raise ArgumentError("PPO", cause, "Choose num_minibatches that divides them.")
        self.model = ActorCritic(size, environment.actions, config)
        names = ("logs", "advantages", "returns", "values")
        batch = {name: TensorType((rows,), float32) for name in names}
        batch["actions"] = TensorType((rows,), int32)
        batch["observations"] = TensorType((rows, size), float32)
        self.step = compile_step(
            self.model,
            lambda model, given: model.loss(given),
            adam(config.lr, eps=1e-5),
            batch,
            clip_norm=config.max_grad_norm,
            seed=seed,
            device=device,
        )
        self._policy = compile_forward(
            self.model,
            lambda model, given: model.forward(given),
            TensorType((count, size), float32),
            share=self.step,
            device=device,
        )
        self._now = environment.reset()
        self._totals = np.zeros(count)

    def act(self, observations: np.ndarray) -> np.ndarray:
        """The likeliest action for each copy's observation, (N,)."""
        logits, _ = self._policy(np.asarray(observations, np.float32))
        return np.asarray(logits).argmax(1)

    def learn(self, steps: int) -> list[float]:
        """Act and learn for at least so many steps of all copies together; episodes' returns."""
        check_whole("learn", "steps", steps)
        config, found = self.config, list[float]()
        for _ in range(-(-steps // (config.num_steps * self.environment.count))):
            rows, returns = self._rollout()
            found += returns
            count = len(rows["actions"])
            for _ in range(config.update_epochs):
                order = self._source.permutation(count)
                for part in np.split(order, config.num_minibatches):
                    self.step({name: values[part] for name, values in rows.items()})
        self.model.start_from(self.step.params)
        return found

    def _rollout(self) -> tuple[dict[str, np.ndarray], list[float]]:
        """Transitions of `num_steps` steps, flat, and the returns of episodes that ended."""
        config, environment, found = self.config, self.environment, list[float]()
        every: dict[str, list[Any]] = {}
        for _ in range(config.num_steps):
            logits, values = map(np.asarray, self._policy(self._now))
            logs = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
            draws = self._source.random((len(logs), 1))
            chosen = (np.exp(logs).cumsum(-1)[:, :-1] < draws).sum(-1)
            moved = environment.step(chosen)
            ended = moved.terminated | moved.truncated
            reached = self._value_of(moved.last, moved.truncated, moved.terminated)
            row = {
                "observations": self._now,
                "actions": chosen.astype(np.int32),
                "logs": np.take_along_axis(logs, chosen[:, None], 1)[:, 0],
                "values": values,
                "rewards": moved.rewards,
                "ended": ended,
                "reached": reached,
            }
            for name, value in row.items():
                every.setdefault(name, []).append(value)
            self._totals += moved.rewards
            found += self._totals[ended].tolist()
            self._totals[ended] = 0
            self._now = moved.observations
        return self._flat({name: np.stack(rows) for name, rows in every.items()}), found

    def _value_of(
        self, last: np.ndarray, truncated: np.ndarray, terminated: np.ndarray
    ) -> np.ndarray:
        """Values of what a step led to, where an episode was cut; NaN stands for the next row's."""
        found = np.full(len(last), np.nan, np.float32)
        if truncated.any():
            found[truncated] = np.asarray(self._policy(last)[1])[truncated]
        found[terminated] = 0
        return found

    def _flat(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """With advantages and returns, steps and copies in one axis."""
        config, values = self.config, rows["values"]
        after = np.asarray(self._policy(self._now)[1])
        following = np.concatenate([values[1:], after[None]])
        reached = rows.pop("reached")
        following = np.where(np.isnan(reached), following, reached)
        gains = advantages(
            rows.pop("rewards"),
            values,
            following,
            rows.pop("ended"),
            config.gamma,
            config.gae_lambda,
        )
        rows |= {"advantages": gains, "returns": gains + values}
        return {n: v.reshape(-1, *v.shape[2:]) for n, v in rows.items()}
