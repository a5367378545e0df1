"""Numbers that users give: what they may be, as given and after rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a number may lie; infinities and NaN are in no domain.

    `is_working` says that it meets the optimizer's state, which may be held in a narrow dtype: it
    must mean the same after rounding to that. Counts and rates are float32 throughout. A flag is
    an end of its domain, and may be given as True or False.
    """

    text: str
    low: float = 0.0
    high: float = math.inf
    excludes_low: bool = False
    excludes_high: bool = False
    is_working: bool = True
    is_flag: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.excludes_low else value >= self.low
        below = value < self.high if self.excludes_high else value <= self.high
        is_end = value in (self.low, self.high) or not self.is_flag
        return above and below and is_end and math.isfinite(value)


FINITE = Domain("a finite number", low=-math.inf)
NOT_NEGATIVE = Domain("a finite number, not negative")
NOT_POSITIVE = Domain("a finite number, not positive", low=-math.inf, high=0.0)
POSITIVE = Domain("a positive number", excludes_low=True)
UNIT = Domain("a number in [0, 1)", high=1.0, excludes_high=True)
INNER_UNIT = Domain("a number in (0, 1)", high=1.0, excludes_low=True, excludes_high=True)
FRACTION = Domain("a number from 0 to 1", high=1.0)
AT_LEAST_ONE = Domain("a number of at least 1", low=1.0)
ABOVE_ONE = Domain("a number above 1", low=1.0, excludes_low=True)
PROBABILITY = Domain("a probability: a number between 0 and 1", high=1.0)
RATE = Domain("a number that is not negative", is_working=False)
FACTOR = Domain("a positive number", excludes_low=True, is_working=False)
PART = Domain("a number from 0 to 1", high=1.0, is_working=False)
STEPS = Domain("a number of at least 1", low=1.0, is_working=False)
COUNT = Domain("a count, not negative", is_working=False)
FLAG = Domain("0 or 1, False or True", high=1.0, is_working=False, is_flag=True)

Given = tuple[object, Domain]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Named numbers that were checked, and where each may lie."""

    hyper: dict[str, float] = field(default_factory=dict)
    domains: dict[str, Domain] = field(default_factory=dict)


def numbers(operation: str, **given: Given) -> Numbers:
    """Check named numbers: each comes with its domain."""
    hyper = {k: check_number(operation, k, value, domain) for k, (value, domain) in given.items()}
    return Numbers(hyper, {k: domain for k, (_, domain) in given.items()})


def check_number(operation: str, name: str, value: object, domain: Domain) -> float:
    """The number as a float; a string, a bool or an array is not one, but a bool for a flag."""
    if domain.is_flag and isinstance(value, (bool, np.bool_)):
        return float(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise ArgumentError(
            operation,
            f"{name} = {value!r} is a {type(value).__name__}, not a number",
            f"It is {domain.text}.",
        )
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not domain.holds(number):
        raise ArgumentError(operation, f"{name} = {value}", f"It is {domain.text}.")
    return number


def check_pair(operation: str, name: str, value: object) -> tuple[object, object]:
    """Two things in a tuple or list; what they are is checked as numbers."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentError(operation, f"{name} = {value!r}", "Give two numbers: (0.9, 0.999).")
    return value[0], value[1]


def check_betas(
    operation: str, betas: object, first: Domain = UNIT, second: Domain = UNIT
) -> dict[str, Given]:
    """Both betas by name, to be checked with the other numbers."""
    beta1, beta2 = check_pair(operation, "betas", betas)
    return {"beta1": (beta1, first), "beta2": (beta2, second)}


def check_flag(operation: str, **flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(operation, f"{name} = {value!r}", "It is True or False.")


def check_whole(operation: str, name: str, value: object, least: int = 1) -> int:
    """A whole number that decides what is compiled."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ArgumentError(
            operation, f"{name} = {value!r}", f"It is a whole number of at least {least}."
        )
    return int(value)


def check_integer(operation: str, name: str, value: object) -> int:
    """A whole number of either sign: an axis, a shift."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(operation, f"{name} = {value!r}", "It is a whole number.")
    return int(value)


def check_sizes(
    operation: str, name: str, value: object, count: int | None = None, least: int = 1
) -> Shape:
    """Whole numbers: `count` of them, for which one may stand; or as many as there are."""
    if count is not None and not isinstance(value, (tuple, list)):
        return (check_whole(operation, name, value, least),) * count
    given = value if isinstance(value, (tuple, list)) else (value,)
    sizes = tuple(check_whole(operation, name, n, least) for n in given)
    if not sizes or count not in (None, len(sizes)):
        wanted = "Give at least one." if count is None else f"Give one, or {count}."
        raise ArgumentError(operation, f"{name} = {value!r}", wanted)
    return sizes


def check_seed(operation: str, seed: object) -> int:
    """A seed is any whole number; it counts modulo 2⁶⁴."""
    return check_integer(operation, "seed", seed) % 2**64


def check_choice(operation: str, name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        shown = ", ".join(f'"{c}"' for c in choices)
        raise ArgumentError(operation, f"{name} = {value!r}", f"It is one of {shown}.")


def rounded(value: float, dtype: DType) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(value).astype(dtype.numpy))


def check_rounding(operation: str, name: str, value: float, domain: Domain, dtype: DType) -> None:
    """What a number becomes in a dtype must still be allowed, finite, and zero only if it was.

    An eps that becomes zero guards nothing; a beta that becomes 1 forgets nothing.
    """
    chosen = dtype if domain.is_working else dtypes.float32
    after = rounded(value, chosen)
    if domain.holds(after) and (after != 0 or value == 0):
        return
    remedy = f"{name} must stay {domain.text} there, and not become zero."
    if chosen.is_narrow:
        remedy += (
            " The optimizer's state has the dtype of the parameters: declare them float32, which "
            f'precision="{chosen}" computes with as well.'
        )
    raise ArgumentError(operation, f"{name} = {value} becomes {after:g} in {chosen}", remedy)
