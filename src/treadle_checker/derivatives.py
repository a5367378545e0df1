"""Forward mode: the derivatives of elementwise ops along a direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

SHARDS = 1_000_003  # the factor that stands for a sum over shards: linear, and not the identity


class Formula:
    """Elements of one dtype with Python's operators; numbers are constants."""

    def __init__(self, field: Any, element: Any, dtype: str):
        self.field, self.element, self.dtype = field, element, dtype

    def of(self, op: str, *others: Any) -> Formula:
        made = [x.element if isinstance(x, Formula) else self._number(x) for x in others]
        dtype = "bool" if op in ("lt", "eq") else self.dtype
        given = [self.element, *made]
        found = self.field.apply(op, given, [self.dtype] * len(given), dtype)
        return Formula(self.field, found, self.dtype)

    def _number(self, value: float) -> Any:
        return self.field.number(value, self.dtype)

    def __add__(self, other: Any) -> Formula:
        return self.of("add", other)

    def __mul__(self, other: Any) -> Formula:
        return self.of("mul", other)

    def __neg__(self) -> Formula:
        return self.of("neg")

    def __sub__(self, other: Formula) -> Formula:
        return self.of("sub", other)

    def __rsub__(self, number: float) -> Formula:
        return -self + number

    def __truediv__(self, other: Formula) -> Formula:
        return self.of("div", other)

    def __rtruediv__(self, number: float) -> Formula:
        return Formula(self.field, self._number(number), self.dtype) / self


def slope_of(
    field: Any, op: str, out: Any, xs: Sequence[Any], slopes: Sequence[Any], dtype: str
) -> Any:
    """Σ slope · ∂out/∂x, where None is zero."""
    numbers = [Formula(field, x, dtype) for x in (out, *xs)]
    total: Formula | None = None
    for slope, partial in zip(slopes, PARTIALS[op], strict=True):
        if slope is not None:
            factor, term = partial(*numbers), Formula(field, slope, dtype)
            term = term if factor is None else term * factor
            total = term if total is None else total + term
    return None if total is None else total.element


def _larger(x: Formula, y: Formula) -> Formula:
    """How much of a maximum follows x: half of it where they are equal."""
    return (1 - x.of("lt", y)) * (1 - x.of("eq", y) * 0.5)


def _base(o: Formula, x: Formula, y: Formula) -> Formula:
    return (1 - y.of("eq", 0)) * (y * x.of("pow", y + -1))


def _exponent(o: Formula, x: Formula, y: Formula) -> Formula:
    is_flat = x.of("eq", 0) * (1 - y.of("lt", 0))
    return (1 - is_flat) * (o * x.of("log"))


def _length(y: Formula, x: Formula) -> Formula:
    """Of a vector, squared; 1 at the origin."""
    square = x * x + y * y
    return square + square.of("eq", 0) * (1 - square)


def _same(*_: Formula) -> None:
    """A factor of 1."""


Partial = Callable[..., Any]
# ∂out/∂x of each operand, of the result and the operands. Ops that are not here have no derivative:
# comparisons, signs, whole numbers, stop_gradient.
PARTIALS: dict[str, tuple[Partial, ...]] = {
    "cast": (_same,),
    "neg": (lambda o, x: -1,),
    "shard_sum": (lambda o, x: SHARDS,),
    "add": (_same, _same),
    "sub": (_same, lambda o, x, y: -1),
    "mul": (lambda o, x, y: y, lambda o, x, y: x),
    "div": (lambda o, x, y: 1 / y, lambda o, x, y: -o / y),
    "mod": (_same, lambda o, x, y: -x.of("floordiv", y)),
    "where": (_same, lambda o, c, x, y: c, lambda o, c, x, y: 1 - c),
    "max": (lambda o, x, y: _larger(x, y), lambda o, x, y: _larger(y, x)),
    "min": (lambda o, x, y: _larger(y, x), lambda o, x, y: _larger(x, y)),
    "pow": (_base, _exponent),
    "atan2": (lambda o, y, x: x / _length(y, x), lambda o, y, x: -y / _length(y, x)),
    "abs": (lambda o, x: x.of("sign"),),
    "exp": (lambda o, x: o,),
    "log": (lambda o, x: 1 / x,),
    "sqrt": (lambda o, x: 0.5 / o,),
    "rsqrt": (lambda o, x: o * o * o * -0.5,),
    "sin": (lambda o, x: x.of("cos"),),
    "cos": (lambda o, x: -x.of("sin"),),
    "tanh": (lambda o, x: 1 - o * o,),
    "erf": (lambda o, x: (-(x * x)).of("exp") * (2 / math.sqrt(math.pi)),),
}
