"""Agents that learn, and what they act in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from treadle import models
from treadle.models.dqn import Memory, _Pair
from treadle.models.environments import moved
from treadle.models.ppo import ActorCritic, advantages

START = np.array([0.01, -0.02, 0.03, 0.04])
PUSHES = [1, 1, 0, 1, 0, 0, 0, 1, 1, 0]


def test_the_pole_falls_as_gymnasiums() -> None:
    """The state after ten pushes, of Gymnasium 1.4's CartPole-v1 from the same one."""
    state = START[None]
    for push in PUSHES:
        state = moved(state, np.array([10.0 if push else -10.0]))
    wanted = [0.03307523, -0.02172271, 0.00234596, 0.07798192]
    assert np.abs(state[0] - wanted).max() < 1e-7


@pytest.mark.slow
def test_gymnasium_gives_these_figures() -> None:
    gym = pytest.importorskip("gymnasium")
    environment = gym.make("CartPole-v1").unwrapped
    environment.reset()
    state = environment.state = START
    other = START[None]
    for push in PUSHES * 20:
        environment.state = state
        _, _, terminated, _, _ = environment.step(push)
        state = environment.state
        other = moved(other, np.array([10.0 if push else -10.0]))
        assert np.abs(other[0] - state).max() < 1e-12
        if terminated:
            break


def test_copies_begin_again_where_they_end() -> None:
    environment = models.CartPole(3, seed=1)
    first = environment.reset()
    assert np.abs(first).max() <= 0.05
    for _ in range(60):
        before = environment._state.copy()
        found = environment.step(np.ones(3, int))
        if found.terminated.any():
            break
    row = int(found.terminated.argmax())
    assert abs(found.last[row, 2]) > 0.2
    assert np.abs(found.observations[row]).max() <= 0.05
    assert np.allclose(found.last[row], moved(before, np.full(3, 10.0))[row], atol=1e-6)
    environment._steps[:] = 499  # the time limit
    found = environment.step(np.zeros(3, int))
    assert found.truncated.all() or found.terminated.any()
    with pytest.raises(td.ArgumentError, match="each 0 or 1"):
        environment.step(np.array([0, 1, 2]))


def test_the_last_transitions_are_remembered() -> None:
    memory = Memory(5, 1)
    for i in range(4):
        row = np.array([2 * i, 2 * i + 1])
        memory.add(
            observations=row[:, None], next=row[:, None], actions=row, rewards=row, goes_on=row
        )
    assert memory.count == 5
    assert sorted(memory.rows["actions"].tolist()) == [3, 4, 5, 6, 7]
    drawn = memory.drawn(100, np.random.default_rng(0))
    assert set(drawn["actions"].tolist()) == {3, 4, 5, 6, 7}
    assert np.array_equal(drawn["observations"][:, 0], drawn["actions"])


def test_advantages_are_those_of_the_definition() -> None:
    """Sums of (γλ)ᵏ δ up to the end of an episode."""
    rng = np.random.default_rng(0)
    rewards, values, following = rng.normal(size=(3, 6, 2))
    ended = np.zeros((6, 2), bool)
    ended[2, 0] = ended[4, 1] = True
    found = advantages(rewards, values, following, ended, 0.9, 0.8)
    deltas = rewards + 0.9 * following - values
    for n in range(2):
        for t in range(6):
            wanted = 0.0
            for k in range(t, 6):
                wanted += 0.72 ** (k - t) * deltas[k, n]
                if ended[k, n]:
                    break
            assert np.isclose(found[t, n], wanted)


def test_losses_are_pytorchs() -> None:
    """Those of CleanRL's programs, for the same values and batch."""
    rng = np.random.default_rng(0)
    model = ActorCritic(4, 3, models.PPOConfig(hidden_sizes=(8,)))
    values = model.init(0)
    names = ("logs", "advantages", "returns", "values")
    batch: dict[str, Any] = {n: rng.normal(size=16).astype(np.float32) for n in names}
    batch |= {"actions": rng.integers(0, 3, 16).astype(np.int32)}
    batch |= {"observations": rng.normal(size=(16, 4)).astype(np.float32)}

    def loss(module: Any, given: dict[str, td.Tensor]) -> td.Tensor:
        return module.loss(given)

    found = float(td.compile_forward(model, loss, batch, device="oracle")(batch))
    t = {n: torch.tensor(v) for n, v in {**values, **batch}.items()}

    def layers(name: str) -> torch.Tensor:
        hidden = torch.tanh(t["observations"] @ t[f"{name}.0.weight"].T + t[f"{name}.0.bias"])
        return hidden @ t[f"{name}.2.weight"].T + t[f"{name}.2.bias"]

    policy = torch.distributions.Categorical(logits=layers("actor"))
    ratio = (policy.log_prob(t["actions"]) - t["logs"]).exp()
    gains = (t["advantages"] - t["advantages"].mean()) / (t["advantages"].std() + 1e-8)
    first = torch.max(-gains * ratio, -gains * torch.clamp(ratio, 0.8, 1.2)).mean()
    value = layers("critic")[:, 0]
    clipped = t["values"] + torch.clamp(value - t["values"], -0.2, 0.2)
    second = torch.max((value - t["returns"]) ** 2, (clipped - t["returns"]) ** 2).mean() * 0.5
    wanted = first - 0.01 * policy.entropy().mean() + 0.5 * second
    assert abs(found - float(wanted)) < 1e-5

    pair = _Pair(4, 3, models.DQNConfig(hidden_sizes=(8,)))
    values = pair.init(0)
    batch = {"observations": batch["observations"], "next": batch["observations"][::-1].copy()}
    batch |= {"actions": rng.integers(0, 3, 16).astype(np.int32)}
    batch |= {"rewards": rng.normal(size=16).astype(np.float32) * 3}
    batch |= {"goes_on": (rng.random(16) < 0.7).astype(np.float32)}
    found = float(td.compile_forward(pair, loss, batch, device="oracle")(batch))
    v = {n: torch.tensor(a) for n, a in {**values, **batch}.items()}

    def network(name: str, x: torch.Tensor) -> torch.Tensor:
        path = f"{name}.network"
        hidden = torch.relu(x @ v[f"{path}.0.weight"].T + v[f"{path}.0.bias"])
        return hidden @ v[f"{path}.2.weight"].T + v[f"{path}.2.bias"]

    best = network("online", v["next"]).argmax(1, keepdim=True)
    goal = v["rewards"] + 0.99 * v["goes_on"] * network("target", v["next"]).gather(1, best)[:, 0]
    said = network("online", v["observations"]).gather(1, v["actions"].long()[:, None])[:, 0]
    assert abs(found - float(torch.nn.functional.huber_loss(said, goal))) < 1e-5


def survived(agent: Any, environment: models.CartPole) -> float:
    """The mean steps until a copy ends, of at most 200, by the agent's best actions."""
    now, lengths = environment.reset(), np.full(environment.count, 200)
    for t in range(200):
        found = environment.step(agent.act(now))
        ended = found.terminated & (lengths == 200)
        lengths[ended] = t
        now = found.observations
    return float(lengths.mean())


@pytest.mark.slow  # docs/models.md has a shorter one
def test_ppo_learns() -> None:
    config = models.PPOConfig(num_steps=64, lr=2.5e-3, hidden_sizes=(32, 32))
    agent = models.PPO(models.CartPole(8, seed=0), config, seed=1, device="cpu")
    before = survived(agent, models.CartPole(8, seed=7))
    returns = agent.learn(7000)
    assert before < 60
    assert survived(agent, models.CartPole(8, seed=7)) > 150
    assert np.mean(returns[-15:]) > 3 * np.mean(returns[:15])
    x = np.zeros((8, 4), np.float32)
    agent.model.device = "oracle"
    assert np.allclose(agent.model(x)[0], agent._policy(x)[0], atol=1e-5)


@pytest.mark.slow
def test_dqn_learns() -> None:
    config = models.DQNConfig(
        lr=2e-3, learning_starts=400, target_frequency=50, hidden_sizes=(48, 48), batch_size=64
    )
    agent = models.DQN(models.CartPole(8, seed=0), config, seed=1, device="cpu")
    before = survived(agent, models.CartPole(8, seed=7))
    returns = agent.learn(6000)
    assert before < 30
    assert survived(agent, models.CartPole(8, seed=7)) > 60
    assert np.mean(returns[-15:]) > 3 * np.mean(returns[:15])
    assert set(agent.model.values()) == {
        f"network.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")
    }


def test_wrong_settings() -> None:
    environment = models.CartPole(3)
    for call, message in (
        (lambda: models.PPO(environment, models.PPOConfig(num_steps=5)), "divides them"),
        (lambda: models.PPOConfig(gamma=1.5), "gamma"),
        (lambda: models.DQNConfig(memory_size=10), "batch_size"),
        (lambda: models.DQN(environment, models.DQNConfig(memory_size=2, batch_size=1)), "copies"),
        (lambda: models.CartPole(0), "count"),
    ):
        with pytest.raises(td.TreadleError, match=message):
            call()
