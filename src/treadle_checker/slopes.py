"""Forward mode: derivatives along a direction, beside the elements themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treadle_checker.field import Element, Field, is_float


def zero(x: Element) -> Element:
    nothing = np.zeros(x.p.shape, np.int64)
    return Element(nothing, nothing)


def apply(
    field: Field, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str
) -> Element:
    """An elementwise op, and its derivative where an operand has one."""
    plain = [x.plain() for x in xs]
    found = field.apply(op, plain, given, dtype)
    if not is_float(dtype) or op not in _SLOPES or all(x.slope is None for x in xs):
        return found
    along = [x.slope if is_float(d) else None for x, d in zip(xs, given, strict=True)]
    if all(t is None for t in along):
        return found
    return replace(found, slope=_SLOPES[op](Calculus(field, dtype), found, plain, along))


def combined(field: Field, op: str, x: Element, y: Element, dtype: str) -> Element:
    if op in ("add", "mul"):
        return apply(field, op, [x, y], [dtype, dtype], dtype)
    return field.combined(op, x, y, dtype)


def matmul(field: Field, x: Element, y: Element) -> Element:
    """x · yᵀ, rows by columns."""
    transposed = y.map(lambda a: a.T)
    found = field.matmul(x, transposed)
    parts = [
        field.matmul(a, b)
        for a, b in ((x.slope, transposed), (x, transposed.slope))
        if a is not None and b is not None
    ]
    slope = parts[0] if len(parts) == 1 else None
    if len(parts) == 2:
        slope = field.apply("add", parts, ["float32"] * 2, "float32")
    return replace(found, slope=slope)


class Calculus:
    """Formulas on elements of one dtype, where None is zero."""

    def __init__(self, field: Field, dtype: str):
        self.field, self.dtype = field, dtype

    def of(self, op: str, *xs: Element, dtype: str = "") -> Element:
        return self.field.apply(op, xs, [self.dtype] * len(xs), dtype or self.dtype)

    def number(self, value: float) -> Element:
        return self.field.number(value, self.dtype)

    def mul(self, x: Element | None, y: Element | None) -> Element | None:
        return None if x is None or y is None else self.of("mul", x, y)

    def div(self, x: Element | None, y: Element) -> Element | None:
        return None if x is None else self.of("div", x, y)

    def add(self, x: Element | None, y: Element | None) -> Element | None:
        return (y if x is None else x) if x is None or y is None else self.of("add", x, y)

    def sub(self, x: Element | None, y: Element | None) -> Element | None:
        return self.add(x, None if y is None else self.of("neg", y))

    def where(self, c: Element, x: Element | None, y: Element | None) -> Element:
        like = x or y
        assert like is not None
        parts = [t or zero(like) for t in (x, y)]
        return self.field.apply("where", [c, *parts], ["bool", self.dtype, self.dtype], self.dtype)


Slope = Callable[[Calculus, Element, Sequence[Element], Sequence[Any]], Element | None]


def _times(slope: Callable[[Calculus, Element, Element], Element]) -> Slope:
    """Of a function of one operand."""
    return lambda c, out, xs, ts: c.mul(ts[0], slope(c, out, xs[0]))


def _extreme(
    c: Calculus, out: Element, xs: Sequence[Element], ts: Sequence[Any], larger: bool = True
) -> Element | None:
    """That of the larger side, and half of each where they are equal."""
    x, y = xs
    below, above = c.of("lt", x, y, dtype="bool"), c.of("lt", y, x, dtype="bool")
    if not larger:
        below, above = above, below
    share = c.where(c.of("eq", x, y, dtype="bool"), _like(c, 0.5, x), _like(c, 1, x))
    a, b = (c.mul(t, share) for t in ts)
    first = None if a is None else c.where(below, zero(a), a)
    return c.add(first, None if b is None else c.where(above, zero(b), b))


def _like(c: Calculus, value: float, x: Element) -> Element:
    return c.number(value).map(lambda a: np.broadcast_to(a, x.p.shape))


def _pow(c: Calculus, out: Element, xs: Sequence[Element], ts: Sequence[Any]) -> Element | None:
    (x, y), (a, b) = xs, ts
    base = exponent = None
    if a is not None:
        slope = c.of("mul", y, c.of("pow", x, c.of("sub", y, c.number(1))))
        none = c.of("eq", y, _like(c, 0, y), dtype="bool")
        base = c.mul(a, c.where(none, zero(slope), slope))
    if b is not None:
        flat = c.of("eq", x, _like(c, 0, x), dtype="bool")
        positive = c.of("lt", y, _like(c, 0, y), dtype="bool")
        both = c.field.apply(
            "and", [flat, c.field.apply("not", [positive], ["bool"], "bool")], ["bool"] * 2, "bool"
        )
        slope = c.of("mul", out, c.of("log", x))
        exponent = c.mul(b, c.where(both, zero(slope), slope))
    return c.add(base, exponent)


def _atan2(c: Calculus, out: Element, xs: Sequence[Element], ts: Sequence[Any]) -> Element | None:
    (y, x), (a, b) = xs, ts
    square = c.of("add", c.of("mul", x, x), c.of("mul", y, y))
    origin = c.of("eq", square, _like(c, 0, square), dtype="bool")
    length = c.where(origin, _like(c, 1, square), square)
    return c.div(c.sub(c.mul(a, x), c.mul(b, y)), length)


def _erf(c: Calculus, out: Element, x: Element) -> Element:
    return c.of(
        "mul", c.of("exp", c.of("neg", c.of("mul", x, x))), c.number(2 / math.sqrt(math.pi))
    )


def _square(c: Calculus, x: Element) -> Element:
    return c.of("mul", x, x)


# Ops that are not here have no derivative: comparisons, signs, whole numbers, stop_gradient.
_SLOPES: dict[str, Slope] = {
    "cast": lambda c, out, xs, ts: ts[0],
    "neg": lambda c, out, xs, ts: c.of("neg", ts[0]),
    "shard_sum": lambda c, out, xs, ts: c.of("shard_sum", ts[0]),
    "add": lambda c, out, xs, ts: c.add(*ts),
    "sub": lambda c, out, xs, ts: c.sub(*ts),
    "mul": lambda c, out, xs, ts: c.add(c.mul(ts[0], xs[1]), c.mul(xs[0], ts[1])),
    "div": lambda c, out, xs, ts: c.sub(c.div(ts[0], xs[1]), c.div(c.mul(ts[1], out), xs[1])),
    "mod": lambda c, out, xs, ts: c.sub(ts[0], c.mul(ts[1], c.of("floordiv", *xs))),
    "where": lambda c, out, xs, ts: c.where(xs[0], ts[1], ts[2]),
    "max": _extreme,
    "min": lambda c, out, xs, ts: _extreme(c, out, xs, ts, larger=False),
    "pow": _pow,
    "atan2": _atan2,
    "abs": _times(lambda c, out, x: c.of("sign", x)),
    "exp": _times(lambda c, out, x: out),
    "log": _times(lambda c, out, x: c.of("div", c.number(1), x)),
    "sqrt": _times(lambda c, out, x: c.of("div", c.number(0.5), out)),
    "rsqrt": _times(
        lambda c, out, x: c.of("mul", c.of("mul", _square(c, out), out), c.number(-0.5))
    ),
    "sin": _times(lambda c, out, x: c.of("cos", x)),
    "cos": _times(lambda c, out, x: c.of("neg", c.of("sin", x))),
    "tanh": _times(lambda c, out, x: c.of("sub", c.number(1), _square(c, out))),
    "erf": _times(_erf),
}
