"""Learning-rate schedules: traced functions of the number of updates done.

Their numbers are scalar state of the step, so changing one never compiles again. What was passed to
the function that made a schedule is kept, so that it can be written to a plain dict and back.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

import numpy as np

from treadle.base.errors import ArgumentError, NameTakenError
from treadle.base.numbers import (
    COUNT,
    FACTOR,
    NOT_NEGATIVE,
    RATE,
    STEPS,
    Domain,
    check_number,
    numbers,
)
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import (
    clamp,
    cos,
    floor,
    ge,
    maximum,
    minimum,
    pow,
    rsqrt,
    where,
)
from treadle.frontend.tensor import Tensor

Hyper = Mapping[str, Tensor]
Curve = Callable[[Tensor, Hyper], Tensor]
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A rate as a function of the count and of named numbers."""

    name: str
    hyper: Mapping[str, float]
    value: Curve
    domains: Mapping[str, Domain] = field(default_factory=dict)
    arguments: Mapping[str, object] | None = None  # of the registered function that made it

    def __post_init__(self) -> None:
        for key, number in self.hyper.items():
            check_number(self.name, key, number, self.domains.get(key, NOT_NEGATIVE))

    @property
    def is_constant(self) -> bool:
        return self.name == "constant"

    def to_dict(self) -> dict[str, object]:
        """Plain values: the name of the function that made it, and its arguments."""
        if self.arguments is None:
            raise ArgumentError(
                "to_dict",
                f"the schedule {self.name!r} was not made by a registered function",
                "Decorate the function that makes it with optim.schedule.",
            )
        return {"schedule": self.name} | {k: _plain(v) for k, v in self.arguments.items()}

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> Schedule:
        """The schedule that `to_dict` described."""
        return _from_dict(values)


_FUNCTIONS: dict[str, Callable[..., Schedule]] = {}
_OUR_MODULES = "treadle.optim."


def schedule(function: Callable[P, Schedule]) -> Callable[P, Schedule]:
    """Register a function that makes schedules, so that they can be written to a dict and back."""
    name = function.__name__
    known = _FUNCTIONS.get(name)
    if known is not None and known.__module__.startswith(_OUR_MODULES):
        raise NameTakenError("schedule", f"there is a schedule {name!r}", "Name it otherwise.")
    signature = inspect.signature(function)

    @functools.wraps(function)
    def make(*positional: P.args, **named: P.kwargs) -> Schedule:
        made = function(*positional, **named)
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        return dataclasses.replace(made, name=name, arguments=dict(bound.arguments))

    _FUNCTIONS[name] = make
    return make


def _plain(value: object) -> object:
    if isinstance(value, Schedule):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_dict(values: Mapping[str, object]) -> Schedule:
    name = values.get("schedule") if isinstance(values, Mapping) else None
    if not isinstance(name, str) or name not in _FUNCTIONS:
        raise ArgumentError(
            "from_dict",
            f"{values!r} names no schedule",
            f"There are: {', '.join(_FUNCTIONS)}; a function of your own must be registered first.",
        )
    arguments = {k: _parsed(v) for k, v in values.items() if k != "schedule"}
    function = _FUNCTIONS[name]
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ArgumentError(
            "from_dict", f"{name}: {error}", "Use what Schedule.to_dict gave."
        ) from error
    return function(**arguments)


def _parsed(value: object) -> object:
    if isinstance(value, Mapping):
        return _from_dict(value)
    return [_parsed(v) for v in value] if isinstance(value, list) else value


def as_schedule(operation: str, rate: float | Schedule) -> Schedule:
    """A schedule; a number is a constant one. Anything else is refused in the caller's name."""
    if isinstance(rate, Schedule):
        return rate
    check_number(operation, "lr", rate, RATE)
    return constant(rate)


def made(
    name: str, value: Curve, given: Mapping[str, float], domains: Mapping[str, Domain]
) -> Schedule:
    """A schedule whose numbers lie in the given domains."""
    checked = numbers(name, **{k: (v, domains[k]) for k, v in given.items()})
    return Schedule(name, checked.hyper, value, checked.domains)


@schedule
def constant(rate: float) -> Schedule:
    """The same rate always."""
    return made("constant", lambda count, hyper: hyper["lr"], {"lr": rate}, {"lr": RATE})


@schedule
def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` in `steps` updates, then `end`."""

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        part = clamp(count / hyper["steps"], 0, 1)
        return hyper["start"] + (hyper["end"] - hyper["start"]) * part

    given = {"start": start, "end": end, "steps": steps}
    return made("linear", value, given, {"start": RATE, "end": RATE, "steps": STEPS})


@schedule
def cosine(peak: float, steps: int, final: float = 0.0) -> Schedule:
    """From `peak` down to `final` along half a cosine in `steps` updates, then `final`."""

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        return half_cosine(count / hyper["steps"], hyper["peak"], hyper["final"])

    given = {"peak": peak, "steps": steps, "final": final}
    return made("cosine", value, given, {"peak": RATE, "steps": STEPS, "final": RATE})


@schedule
def warmup_cosine(peak: float, warmup: int, steps: int, final: float = 0.0) -> Schedule:
    """Up to `peak` in `warmup` updates (the first has peak / warmup), then a cosine to `final`.

    `steps` counts the warm-up.
    """

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        warmup = hyper["warmup"]
        rising = hyper["peak"] * (count + 1) / warmup
        # At least 1, also for numbers that are changed later.
        rest = maximum(hyper["steps"] - warmup, 1)
        falling = half_cosine((count - warmup) / rest, hyper["peak"], hyper["final"])
        return where(count < warmup, rising, falling)

    given = {"peak": peak, "warmup": warmup, "steps": steps, "final": final}
    domains = {"peak": RATE, "warmup": STEPS, "steps": STEPS, "final": RATE}
    found = made("warmup_cosine", value, given, domains)
    if warmup >= steps:
        raise ArgumentError(
            "warmup_cosine", f"warmup = {warmup} of {steps} steps", "It is shorter."
        )
    return found


def half_cosine(part: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """From `start` to `end` while the part goes from 0 to 1."""
    return end + (start - end) * ((1 + cos(clamp(part, 0, 1) * math.pi)) * 0.5)


@schedule
def exponential(lr: float, gamma: float) -> Schedule:
    """lr · gammaⁿ after n updates."""

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        return hyper["lr"] * pow(hyper["gamma"], count)

    return made("exponential", value, {"lr": lr, "gamma": gamma}, {"lr": RATE, "gamma": FACTOR})


@schedule
def step_decay(lr: float, steps: int, gamma: float = 0.1) -> Schedule:
    """Multiplied by `gamma` after every `steps` updates."""

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        return hyper["lr"] * pow(hyper["gamma"], floor(count / hyper["steps"]))

    given = {"lr": lr, "steps": steps, "gamma": gamma}
    return made("step_decay", value, given, {"lr": RATE, "steps": STEPS, "gamma": FACTOR})


@schedule
def multi_step(lr: float, milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Multiplied by `gamma` at each of the milestones, counts of updates."""
    if not isinstance(milestones, (tuple, list)) or not milestones:
        raise ArgumentError(
            "multi_step", f"milestones = {milestones!r}", "Give counts of updates: [30, 80]."
        )
    names = [f"milestone{i}" for i in range(len(milestones))]

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        rate = hyper["lr"]
        for name in names:
            rate = where(ge(count, hyper[name]), rate * hyper["gamma"], rate)
        return rate

    given = {"lr": lr, "gamma": gamma} | dict(zip(names, milestones, strict=True))
    domains = {"lr": RATE, "gamma": FACTOR} | dict.fromkeys(names, COUNT)
    return made("multi_step", value, given, domains)


@schedule
def polynomial(lr: float, steps: int, power: float = 1.0, final: float = 0.0) -> Schedule:
    """From `lr` to `final` as (1 − part of `steps`) to a power, then `final`."""

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        left = 1 - clamp(count / hyper["steps"], 0, 1)
        return hyper["final"] + (hyper["lr"] - hyper["final"]) * pow(left, hyper["power"])

    given = {"lr": lr, "steps": steps, "power": power, "final": final}
    domains = {"lr": RATE, "steps": STEPS, "power": FACTOR, "final": RATE}
    return made("polynomial", value, given, domains)


@schedule
def noam(d_model: int, warmup: int, factor: float = 1.0) -> Schedule:
    """factor · d^−½ · min(t^−½, t · warmup^−³ᐟ²) at the t-th update: up, then as 1 / √t."""

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        t, warmup = count + 1, hyper["warmup"]
        # t / (w √w) in this order stays in range for large counts.
        rising, falling = t / warmup * rsqrt(warmup), rsqrt(t)
        return hyper["factor"] * rsqrt(hyper["d_model"]) * minimum(falling, rising)

    given = {"d_model": d_model, "warmup": warmup, "factor": factor}
    return made("noam", value, given, {"d_model": STEPS, "warmup": STEPS, "factor": RATE})


@schedule
def join(schedules: Sequence[Schedule], milestones: Sequence[int]) -> Schedule:
    """One schedule after the other: the next begins, at its own 0, at each milestone."""
    is_fitting = isinstance(schedules, (tuple, list)) and isinstance(milestones, (tuple, list))
    if not is_fitting or len(schedules) != len(milestones) + 1 or len(schedules) < 2:
        raise ArgumentError(
            "join",
            f"schedules = {schedules!r} with milestones = {milestones!r}",
            "Give two schedules or more, and a milestone between each.",
        )
    parts = [as_schedule("join", s) for s in schedules]
    for before, after in itertools.pairwise(milestones):
        if not before < after:
            raise ArgumentError("join", f"milestones = {milestones}", "They grow.")
    prefixes = [f"part{i}_" for i in range(len(parts))]

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        def part(i: int, at: Tensor) -> Tensor:
            prefix = prefixes[i]
            own = {k[len(prefix) :]: v for k, v in hyper.items() if k.startswith(prefix)}
            return parts[i].value(at, own)

        rate = part(0, count)
        for i in range(1, len(parts)):
            start = hyper[f"milestone{i - 1}"]
            rate = where(ge(count, start), part(i, maximum(count - start, 0)), rate)
        return as_tensor(rate)

    named = list(zip(prefixes, parts, strict=True))
    starts = {f"milestone{i}": m for i, m in enumerate(milestones)}
    given = {f"{p}{k}": v for p, s in named for k, v in s.hyper.items()} | starts
    domains = {f"{p}{k}": s.domains.get(k, NOT_NEGATIVE) for p, s in named for k in s.hyper}
    return made("join", value, given, domains | dict.fromkeys(starts, COUNT))
