"""Deep Q-learning: a network of values, a memory of transitions, and an agent that learns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treadle.base.dtypes import float32, int32
from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_seed, check_whole
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import stop_gradient
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.reductions import argmax
from treadle.frontend.functions.shaping import unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.types import TensorType
from treadle.losses.regression import huber
from treadle.models.config import Config
from treadle.models.environments import Environment
from treadle.models.model import Model
from treadle.nn.activations import ReLU
from treadle.nn.containers import Sequential
from treadle.nn.layers import Linear
from treadle.nn.module import Module
from treadle.optim.standard import adam
from treadle.step.compile import compile_step
from treadle.step.forward import compile_forward


@dataclass(frozen=True)
class DQNConfig(Config):
    """The network's sizes, and how it learns; defaults are those of CleanRL for several copies."""

    model_type: str = "dqn"
    hidden_sizes: tuple[int, ...] = (120, 84)
    lr: float = 2.5e-4
    gamma: float = 0.99
    batch_size: int = 128
    memory_size: int = 10_000
    learning_starts: int = 1000  # transitions before the first update
    train_frequency: int = 1  # steps of all copies between two updates
    target_frequency: int = 500  # updates between two copies into the target network
    start_epsilon: float = 1.0
    end_epsilon: float = 0.05
    exploration: float = 0.5  # the share of all steps in which epsilon falls
    is_double: bool = True  # the online network chooses the action whose value is the target's

    def check(self) -> None:
        self.need(bool(self.hidden_sizes) and min(self.hidden_sizes) >= 1, "hidden_sizes", "≥ 1.")
        for name in ("batch_size", "train_frequency", "target_frequency"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        fits = self.memory_size >= self.batch_size
        self.need(fits, "memory_size", "It is at least batch_size.")
        for name in ("gamma", "start_epsilon", "end_epsilon", "exploration"):
            self.need(0 <= getattr(self, name) <= 1, name, "It is from 0 to 1.")
        self.need(self.lr > 0, "lr", "It is positive.")


class QNetwork(Model):
    """Values of actions: observations (B, size) → (B, actions), with CleanRL's names."""

    def __init__(self, size: int, actions: int, config: DQNConfig):
        self.config: DQNConfig = config
        sizes = (size, *config.hidden_sizes, actions)
        parts: list[Module] = []
        for a, b in pairwise(sizes):
            parts += [Linear(a, b), ReLU()]
        self.network = Sequential(*parts[:-1])

    def forward(self, observations: Operand) -> Tensor:
        result: Tensor = self.network(as_tensor(observations))
        return result


class _Pair(Module):
    """The network that learns, and the one that it is compared with."""

    def __init__(self, size: int, actions: int, config: DQNConfig):
        self.online, self.target = (QNetwork(size, actions, config) for _ in range(2))
        self.target.requires_grad_(False)
        self.config = config

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Huber's loss of the values of the actions that were taken."""
        said = take_along_axis(
            self.online(batch["observations"]), unsqueeze(batch["actions"], 1), 1
        )
        values = self.target(batch["next"])
        judge = self.online(batch["next"]) if self.config.is_double else values
        best = take_along_axis(values, unsqueeze(argmax(judge, 1), 1), 1)[:, 0]
        goal = batch["rewards"] + best * batch["goes_on"] * self.config.gamma
        result: Any = huber(said[:, 0], stop_gradient(goal))
        loss: Tensor = result
        return loss


class Memory:
    """The last transitions, in rings of a fixed length."""

    def __init__(self, length: int, size: int):
        self.rows = {
            "observations": np.zeros((length, size), np.float32),
            "next": np.zeros((length, size), np.float32),
            "actions": np.zeros(length, np.int32),
            "rewards": np.zeros(length, np.float32),
            "goes_on": np.zeros(length, np.float32),
        }
        self.length, self.count, self._at = length, 0, 0

    def add(self, **rows: np.ndarray) -> None:
        added = len(rows["actions"])
        at = (self._at + np.arange(added)) % self.length
        for name, values in rows.items():
            self.rows[name][at] = values
        self._at = int(at[-1] + 1) % self.length
        self.count = min(self.length, self.count + added)

    def drawn(self, count: int, source: np.random.Generator) -> dict[str, np.ndarray]:
        at = source.integers(0, self.count, count)
        return {name: values[at] for name, values in self.rows.items()}


class DQN:
    """An agent that learns values of actions in an environment.

    One compiled step computes both networks, the loss, its gradient and the update. `model` is the
    network with what was learned.
    """

    def __init__(
        self,
        environment: Environment,
        config: DQNConfig | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
    ):
        self.environment, self.config = environment, config or DQNConfig()
        config = self.config
        self._source = np.random.default_rng(check_seed("DQN", seed))
        size, actions = environment.size, environment.actions
        if config.memory_size < environment.count:
            cause = f"memory_size {config.memory_size} for {environment.count} copies"
            raise ArgumentError("DQN", cause, "It holds at least one step of each.")
        self.model = QNetwork(size, actions, config)
        rows = config.batch_size
        batch = {name: TensorType((rows, size), float32) for name in ("observations", "next")}
        batch |= {name: TensorType((rows,), float32) for name in ("rewards", "goes_on")}
        batch["actions"] = TensorType((rows,), int32)
        self.step = compile_step(
            _Pair(size, actions, config),
            lambda pair, given: pair.loss(given),
            adam(config.lr),
            batch,
            seed=seed,
            device=device,
        )
        self._values = compile_forward(
            self.step.model,
            lambda pair, given: pair.online(given),
            TensorType((environment.count, size), float32),
            share=self.step,
            device=device,
        )
        self.memory = Memory(config.memory_size, size)
        self.updates = 0
        self._copy()

    def _copy(self) -> None:
        """The target network becomes the online one."""
        values = self.step.params
        online = {n: v for n, v in values.items() if n.startswith("online.")}
        copied = {n.replace("online.", "target.", 1): v for n, v in online.items()}
        self.step.load_params({**online, **copied})

    def act(self, observations: np.ndarray) -> np.ndarray:
        """The best action for each copy's observation, (N,)."""
        values = np.asarray(self._values(np.asarray(observations, np.float32)))
        return values.argmax(1)

    def learn(self, steps: int) -> list[float]:
        """Act and learn for so many steps of all copies together; the returns of episodes."""
        check_whole("learn", "steps", steps)
        config, environment = self.config, self.environment
        found: list[float] = []
        totals = np.zeros(environment.count)
        now = environment.reset()
        for turn in range(-(-steps // environment.count)):
            chosen = self._explored(now, turn * environment.count / steps)
            moved = environment.step(chosen)
            goes_on = (~moved.terminated).astype(np.float32)
            self.memory.add(
                observations=now,
                next=moved.last,
                actions=chosen,
                rewards=moved.rewards,
                goes_on=goes_on,
            )
            totals += moved.rewards
            ended = moved.terminated | moved.truncated
            found += totals[ended].tolist()
            totals[ended] = 0
            now = moved.observations
            is_time = turn % config.train_frequency == 0
            if is_time and self.memory.count >= max(config.learning_starts, 1):
                self._update()
        self._publish()
        return found

    def _explored(self, observations: np.ndarray, share: float) -> np.ndarray:
        """The best actions, but some at random."""
        config = self.config
        left = 1 - min(1.0, share / config.exploration) if config.exploration else 0.0
        epsilon = config.end_epsilon + (config.start_epsilon - config.end_epsilon) * left
        count = self.environment.count
        is_random = self._source.random(count) < epsilon
        anything = self._source.integers(0, self.environment.actions, count)
        return np.where(is_random, anything, 0 if is_random.all() else self.act(observations))

    def _update(self) -> None:
        self.step(self.memory.drawn(self.config.batch_size, self._source))
        self.updates += 1
        if self.updates % self.config.target_frequency == 0:
            self._copy()

    def _publish(self) -> None:
        prefix = "online."
        values = self.step.params
        own = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
        self.model.start_from(own)
