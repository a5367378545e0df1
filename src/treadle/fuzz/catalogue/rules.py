"""Rules that many forms share."""

from __future__ import annotations

from treadle.fuzz.chooser import Chooser, Proposal
from treadle.fuzz.program import NORMAL, Literal, Values

POSITIVE = Values("uniform", 0.1, 4.0)
HALF = Values("normal", 0.0, 0.5)


def proposal(*operands: str, **attributes: Literal) -> Proposal:
    return Proposal(operands, attributes)


def one(choose: Chooser) -> Proposal:
    """Any value."""
    return proposal(choose.value())


def positive(choose: Chooser) -> Proposal:
    """A value without zeros or negative elements."""
    return proposal(choose.value(fits=lambda array: bool((array > 0.05).all()), values=POSITIVE))


def pair(choose: Chooser) -> Proposal:
    """Two values that broadcast, in either order."""
    x = choose.value(low=1)
    shape = choose.shape(x)
    dropped = choose.whole(0, len(shape) - 1) if choose.flag(0.4) else 0
    other = tuple(1 if choose.flag(0.3) else n for n in shape)[dropped:]
    y = choose.like(shape if choose.flag(0.4) else other)
    return proposal(x, y) if choose.flag() else proposal(y, x)


def along(choose: Chooser) -> Proposal:
    """A value and one of its axes."""
    x = choose.value(low=1)
    return proposal(x, axis=choose.axis(x))


def over(choose: Chooser) -> Proposal:
    """A value and some of its axes."""
    x = choose.value(low=1)
    return proposal(x, axis=choose.axes(x), keepdims=choose.flag())


def matrix(choose: Chooser) -> Proposal:
    return proposal(choose.value(low=2, high=2))


def matrix_along(choose: Chooser) -> Proposal:
    x = choose.value(low=2, high=2)
    return proposal(x, axis=choose.axis(x))


def weighted(choose: Chooser) -> Proposal:
    """A value, and two vectors as long as its last axis."""
    x = choose.value(low=1)
    width = choose.shape(x)[-1:]
    return proposal(x, choose.like(width), choose.like(width))


def scaled(choose: Chooser, shape: tuple[int, ...], fan: int) -> str:
    """A weight that keeps the size of what it is multiplied with."""
    values = Values("normal", 0.0, round(fan**-0.5, 3)) if fan > 4 else NORMAL
    return choose.like(shape, values)
