"""Learning-rate schedules: traced functions of the number of updates done.

Their numbers are scalar state of the step, so changing one never compiles again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.frontend.functions.arithmetic import clamp, cos, where
from treadle.frontend.tensor import Tensor

Hyper = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A rate as a function of the count and of named numbers."""

    name: str
    hyper: Mapping[str, float]
    value: Callable[[Tensor, Hyper], Tensor]

    @property
    def is_constant(self) -> bool:
        return self.name == "constant"


def as_schedule(rate: float | Schedule) -> Schedule:
    return rate if isinstance(rate, Schedule) else constant(rate)


def check_rate(operation: str, **rates: float) -> None:
    for name, rate in rates.items():
        if not (math.isfinite(rate) and rate >= 0):
            raise ArgumentError(
                operation, f"{name} = {rate}", "It is a number that is not negative."
            )


def check_steps(operation: str, **steps: float) -> None:
    for name, count in steps.items():
        if not (math.isfinite(count) and count >= 1):
            raise ArgumentError(operation, f"{name} = {count}", "It is a number of at least 1.")


def constant(rate: float) -> Schedule:
    """The same rate always."""
    check_rate("constant", lr=rate)
    return Schedule("constant", {"lr": rate}, lambda count, hyper: hyper["lr"])


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` in `steps` updates, then `end`."""
    check_rate("linear", start=start, end=end)
    check_steps("linear", steps=steps)

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        part = clamp(count / hyper["steps"], 0, 1)
        return hyper["start"] + (hyper["end"] - hyper["start"]) * part

    return Schedule("linear", {"start": start, "end": end, "steps": steps}, value)


def cosine(peak: float, steps: int, final: float = 0.0) -> Schedule:
    """From `peak` down to `final` along half a cosine in `steps` updates, then `final`."""
    check_rate("cosine", peak=peak, final=final)
    check_steps("cosine", steps=steps)

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        return _half_cosine(count / hyper["steps"], hyper)

    return Schedule("cosine", {"peak": peak, "steps": steps, "final": final}, value)


def warmup_cosine(peak: float, warmup: int, steps: int, final: float = 0.0) -> Schedule:
    """Up to `peak` in `warmup` updates (the first has peak / warmup), then a cosine to `final`.

    `steps` counts the warm-up.
    """
    check_rate("warmup_cosine", peak=peak, final=final)
    check_steps("warmup_cosine", warmup=warmup, steps=steps)
    if warmup >= steps:
        raise ArgumentError(
            "warmup_cosine", f"warmup = {warmup} of {steps} steps", "It is shorter."
        )

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        warmup = hyper["warmup"]
        rising = hyper["peak"] * (count + 1) / warmup
        falling = _half_cosine((count - warmup) / (hyper["steps"] - warmup), hyper)
        return where(count < warmup, rising, falling)

    numbers = {"peak": peak, "warmup": warmup, "steps": steps, "final": final}
    return Schedule("warmup_cosine", numbers, value)


def _half_cosine(part: Tensor, hyper: Hyper) -> Tensor:
    fall = (1 + cos(clamp(part, 0, 1) * math.pi)) * 0.5
    return hyper["final"] + (hyper["peak"] - hyper["final"]) * fall
