"""What agents act in: several copies of an environment at once, in NumPy."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_seed, check_whole


class Moved(NamedTuple):
    """What a step of N copies gives. Copies that end begin again at once.

    `observations` are those to act on next, `last` those that the step led to: they differ for a
    copy that began again. An end is `terminated` by the rules, or `truncated` by the time limit.
    """

    observations: np.ndarray  # (N, size)
    rewards: np.ndarray  # (N,)
    terminated: np.ndarray  # (N,) bool
    truncated: np.ndarray  # (N,) bool
    last: np.ndarray  # (N, size)


class Environment(Protocol):
    """N copies of something that is observed as numbers, with a few actions."""

    count: int
    size: int  # of an observation
    actions: int

    def reset(self) -> np.ndarray:
        """Begin all copies: observations (N, size), float32."""
        ...

    def step(self, actions: np.ndarray) -> Moved:
        """Act in each copy, (N,) whole numbers."""
        ...


GRAVITY, CART, POLE, HALF = 9.8, 1.0, 0.1, 0.5  # m/s², kg, kg, half the pole's length in m
FORCE, SECONDS = 10.0, 0.02  # N, and of a step
FAR, TILT = 2.4, 12 * 2 * math.pi / 360  # m and radians at which it is over
LONGEST = 500  # steps


class CartPole:
    """A pole on a cart, to be kept upright by pushing left or right: Gymnasium's CartPole-v1.

    An observation is the cart's place and speed, and the pole's angle and its speed. Each step
    is a reward of 1.
    """

    size, actions = 4, 2

    def __init__(self, count: int = 1, seed: int = 0):
        self.count = check_whole("CartPole", "count", count)
        self._source = np.random.default_rng(check_seed("CartPole", seed))
        self._state = np.zeros((count, 4))
        self._steps = np.zeros(count, int)

    def reset(self) -> np.ndarray:
        self._state = self._begun(self.count)
        self._steps = np.zeros(self.count, int)
        return self._state.astype(np.float32)

    def _begun(self, count: int) -> np.ndarray:
        return self._source.uniform(-0.05, 0.05, (count, 4))

    def step(self, actions: np.ndarray) -> Moved:
        given = np.asarray(actions)
        if given.shape != (self.count,) or not np.isin(given, (0, 1)).all():
            cause = f"actions {given.shape} from {given.min(initial=0)} to {given.max(initial=0)}"
            raise ArgumentError("CartPole", cause, f"They are ({self.count},), each 0 or 1.")
        self._state = moved(self._state, np.where(given == 1, FORCE, -FORCE))
        self._steps += 1
        terminated = (np.abs(self._state[:, 0]) > FAR) | (np.abs(self._state[:, 2]) > TILT)
        truncated = ~terminated & (self._steps >= LONGEST)
        last = self._state.astype(np.float32)
        ended = terminated | truncated
        self._state[ended] = self._begun(int(ended.sum()))
        self._steps[ended] = 0
        rewards = np.ones(self.count, np.float32)
        return Moved(self._state.astype(np.float32), rewards, terminated, truncated, last)


def moved(state: np.ndarray, force: np.ndarray) -> np.ndarray:
    """States (N, 4) after a step with forces (N,), by Euler's method."""
    _, speed, angle, turning = state.T
    total = CART + POLE
    c, s = np.cos(angle), np.sin(angle)
    pushed = (force + POLE * HALF * turning**2 * s) / total
    swing = (GRAVITY * s - c * pushed) / (HALF * (4 / 3 - POLE * c**2 / total))
    gain = pushed - POLE * HALF * swing * c / total
    change = np.stack([speed, gain, turning, swing], 1)
    found: np.ndarray = state + SECONDS * change
    return found
