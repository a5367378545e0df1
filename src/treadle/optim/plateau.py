"""Smaller rates when a validation value stops improving: on the host, through `lr_scale`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, SupportsFloat

from treadle.base.errors import ArgumentError, LoadError
from treadle.base.numbers import (
    COUNT,
    INNER_UNIT,
    NOT_NEGATIVE,
    PART,
    check_choice,
    check_number,
    check_whole,
)


class Scaled(Protocol):
    """Something with a factor on its learning rates: a training step."""

    lr_scale: float


class ReduceOnPlateau:
    """Multiply `step.lr_scale` by `factor` when a value has not improved for `patience` checks.

    The rules are those of torch's ReduceLROnPlateau; `min_scale` and `eps` are about the scale.
    """

    def __init__(
        self,
        step: Scaled,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_scale: float = 0.0,
        eps: float = 1e-8,
    ):
        name = "ReduceOnPlateau"
        check_choice(name, "mode", mode, ("min", "max"))
        check_choice(name, "threshold_mode", threshold_mode, ("rel", "abs"))
        self._step, self._mode, self._relative = step, mode, threshold_mode == "rel"
        self._factor = check_number(name, "factor", factor, INNER_UNIT)
        self._patience = check_whole(name, "patience", patience, 0)
        self._threshold = check_number(name, "threshold", threshold, NOT_NEGATIVE)
        self._cooldown = check_whole(name, "cooldown", cooldown, 0)
        self._min_scale = check_number(name, "min_scale", min_scale, PART)
        self._eps = check_number(name, "eps", eps, COUNT)
        self.best = math.inf if mode == "min" else -math.inf
        self._bad, self._waiting = 0, 0

    def update(self, value: SupportsFloat) -> bool:
        """Look at a new value; whether the rate was reduced. NaN is no improvement."""
        current = float(value)
        if self._improves(current):
            self.best, self._bad = current, 0
        else:
            self._bad += 1
        if self._waiting > 0:
            self._waiting, self._bad = self._waiting - 1, 0
        if self._bad <= self._patience:
            return False
        self._waiting, self._bad = self._cooldown, 0
        scale = self._step.lr_scale
        smaller = max(scale * self._factor, self._min_scale)
        if scale - smaller <= self._eps:
            return False
        self._step.lr_scale = smaller
        return True

    def _improves(self, value: float) -> bool:
        sign = 1.0 if self._mode == "min" else -1.0
        if self._relative:
            return sign * value < sign * self.best * (1 - sign * self._threshold)
        return sign * value < sign * self.best - self._threshold

    def state_dict(self) -> dict[str, float]:
        """What the next decision depends on; the scale itself is the step's."""
        return {"best": self.best, "bad": self._bad, "waiting": self._waiting}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue where `state_dict` was taken."""
        if set(state) != {"best", "bad", "waiting"}:
            raise LoadError(
                "ReduceOnPlateau", f"the state has {sorted(state)}", "Use what state_dict gave."
            )
        counts = [check_whole("ReduceOnPlateau", k, state[k], 0) for k in ("bad", "waiting")]
        if isinstance(state["best"], bool) or not isinstance(state["best"], (int, float)):
            raise ArgumentError("ReduceOnPlateau", f"best = {state['best']!r}", "It is a number.")
        self.best, (self._bad, self._waiting) = float(state["best"]), counts
