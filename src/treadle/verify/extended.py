"""The finite field with infinities: what kernels and graphs compute when they are compared.

A mask of −∞ has a meaning here that the plain field does not give it: exp(−∞) is 0, a maximum
passes over it, and sums with it stay infinite. All other ops are those of `domains/field.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.domains.domain import Typed
from treadle.domains.field import FiniteField, Lane, Residues
from treadle.domains.float64 import Array
from treadle.ir.literal import ArrayLiteral, Number
from treadle.ir.op import NONE, Attributes, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.types import TensorType

FAR = 2**62  # beyond every residue


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """Residues of both lanes, and where they stand for −∞ or ∞ instead: −1, 1, else 0."""

    q: Array
    p: Array
    sign: Array | None = None
    infinite: Array | None = None
    is_piecewise: bool = field(default=False, kw_only=True)

    def map(self, change: Callable[[Array], Array]) -> Extended:
        """The same elements, moved."""
        parts = (None if a is None else change(a) for a in (self.sign, self.infinite))
        p = change(self.p)
        q = p if self.q is self.p else change(self.q)
        return Extended(q, p, *parts, is_piecewise=self.is_piecewise)

    @property
    def residues(self) -> Residues:
        return Residues(self.q, self.p, self.sign, is_piecewise=self.is_piecewise)


def of(found: Residues, infinite: Array | None = None) -> Extended:
    if infinite is not None and not infinite.any():
        infinite = None
    pieces = found.is_piecewise
    return Extended(found.q, found.p, found.sign, infinite, is_piecewise=pieces)


def is_residue(dtype: DType) -> bool:
    return dtype.is_float or dtype is dtypes.bool_


def chosen(condition: Array, x: Extended, y: Extended) -> Extended:
    """x where the condition holds, else y."""

    def part(a: Array | None, b: Array | None) -> Array | None:
        return None if a is None and b is None else np.where(condition, *map(_filled, (a, b)))

    p = np.where(condition, x.p, y.p)
    q = p if x.q is x.p and y.q is y.p else np.where(condition, x.q, y.q)
    pieces, infinite = x.is_piecewise or y.is_piecewise, part(x.infinite, y.infinite)
    infinite = None if infinite is None or not infinite.any() else infinite
    return Extended(q, p, part(x.sign, y.sign), infinite, is_piecewise=pieces)


def _filled(a: Array | None) -> Array:
    return np.zeros((), np.int64) if a is None else a


def _taker(axis: int, i: int) -> Callable[[Array], Array]:
    return lambda a: np.take(a, i, axis=axis)


class ExtendedField:
    """Scalars of kernels and elements of graphs, many at a time. `trial` chooses the primes.

    Comparisons of floats give generic elements, so that both branches of a choice are seen. Where
    positions are chosen by comparing, as by argmax and sorts, they are `ordered` instead: true or
    false by the order of the residues. Logarithms satisfy no laws unless `has_logs`: discrete ones
    are dear, and equal without laws is equal.
    """

    def __init__(self, trial: int = 0, ordered: bool = False, has_logs: bool = False):
        self.field, self.ordered, self.has_logs = FiniteField(trial), ordered, has_logs

    def literal(self, value: Number | ArrayLiteral, dtype: DType) -> Extended:
        shape = value.array.shape if isinstance(value, ArrayLiteral) else ()
        type_ = TensorType(shape, dtype)
        (found,) = self.field.apply(CONSTANT, Constant(value, type_), [], (type_,))
        if isinstance(value, float) and math.isinf(value):
            return of(replace(found, is_special=False), np.array(1 if value > 0 else -1))
        if isinstance(value, ArrayLiteral) and dtype.is_float:
            return of(found, np.where(np.isinf(value.array), np.sign(value.array), 0).astype(int))
        return of(found)

    def zero(self, dtype: DType) -> Extended:
        return self.literal(0 if dtype is not dtypes.bool_ else False, dtype)

    def integers(self, array: Array, dtype: DType) -> Extended:
        """Whole numbers as elements of any dtype."""
        if dtype.is_float:
            q, p = (lane.reduce(array.astype(np.int64)) for lane in self.field.lanes)
            return Extended(q, p)
        plain = array.astype(np.int64 if dtype is dtypes.bool_ else dtype.numpy)
        return Extended(plain, plain)

    def cast(self, x: Extended, source: DType, target: DType) -> Extended:
        if source is target or (source.is_float and target.is_float):
            return x
        return self.apply(e.CAST, e.Cast(target), [x], [source], target)

    def apply(
        self,
        op: Op,
        attributes: Attributes,
        operands: Sequence[Extended],
        given: Sequence[DType],
        dtype: DType,
    ) -> Extended:
        """An elementwise op on arrays that broadcast."""
        if self.ordered and op in _ORDERED and given[0].is_float:
            return _ORDERED[op](self, operands, given[0])
        if op is e.LOG and not self.has_logs:
            lanes = zip(self.field.lanes, (operands[0].q, operands[0].p), strict=True)
            return Extended(*(lane.uninterpreted(op.name, a) for lane, a in lanes))
        flags = [x.infinite for x in operands]
        if any(f is not None for f in flags) and op in _INFINITE:
            found = _INFINITE[op](self, operands, [_filled(f) for f in flags], dtype)
            is_finite = found.infinite is not None and not found.infinite.any()
            return replace(found, infinite=None) if is_finite else found
        return self.plain(op, attributes, operands, given, dtype)

    def plain(
        self,
        op: Op,
        attributes: Attributes,
        operands: Sequence[Extended],
        given: Sequence[DType],
        dtype: DType,
    ) -> Extended:
        """As the field has it: infinities are generic elements."""
        typed = [
            Typed(TensorType(np.shape(x.p), d), x.residues)
            for x, d in zip(operands, given, strict=True)
        ]
        shape = np.broadcast_shapes(*(t.type.shape for t in typed))
        (found,) = self.field.apply(op, attributes, typed, (TensorType(shape, dtype),))
        return of(found)

    def order(self, x: Extended, dtype: DType) -> Array:
        """The integers by which maxima over axes choose."""
        order = self.field.lane_p.symmetric(x.p) if is_residue(dtype) else x.p.astype(np.int64)
        return order if x.infinite is None else np.where(x.infinite == 0, order, x.infinite * FAR)

    def reduced(self, op: str, x: Extended, axes: tuple[int, ...], dtype: DType) -> Extended:
        """A reduction along axes that the arrays have."""
        if op == "add":
            return self._sum(x, axes, dtype)
        if op == "mul":
            return self._product(x, axes, dtype)
        kept = [i for i in range(x.p.ndim) if i not in axes]
        shape = x.p.shape
        rows = (*(shape[i] for i in kept), -1)

        def flat(a: Array) -> Array:
            return np.broadcast_to(a, shape).transpose([*kept, *axes]).reshape(rows)

        order = flat(self.order(x, dtype))
        at = (order.argmax(-1) if op == "max" else order.argmin(-1))[..., None]
        return x.map(lambda a: np.take_along_axis(flat(a), at, -1)[..., 0])

    def _sum(self, x: Extended, axes: tuple[int, ...], dtype: DType) -> Extended:
        if not is_residue(dtype):
            total = np.sum(x.p, axis=axes, dtype=x.p.dtype)
            return Extended(total, total)
        q, p = (lane.reduce(np.sum(a, axis=axes)) for lane, a in self._lanes(x))
        sign, infinite = x.sign, x.infinite
        if sign is not None:
            sign = np.sum(np.broadcast_to(sign, x.p.shape), axis=axes) & 1
        if infinite is not None:
            infinite = np.sign(np.sum(np.broadcast_to(infinite, x.p.shape), axis=axes))
        return Extended(q, p, sign, infinite, is_piecewise=x.is_piecewise)

    def _product(self, x: Extended, axes: tuple[int, ...], dtype: DType) -> Extended:
        for axis in sorted(axes, reverse=True):
            found = self.literal(1, dtype)
            for i in range(x.p.shape[axis]):
                row = x.map(_taker(axis, i))
                found = self.apply(e.MUL, NONE, [found, row], [dtype, dtype], dtype)
            x = found
        return x

    def _lanes(self, x: Extended) -> Sequence[tuple[Lane, Array]]:
        return [(self.field.lane_q, x.q), (self.field.lane_p, x.p)]

    def combined(self, op: str, x: Extended, y: Extended, dtype: DType) -> Extended:
        """Two accumulators as one; maxima choose by the order, as those over axes do."""
        if op in ("add", "mul"):
            return self.apply(e.ADD if op == "add" else e.MUL, NONE, [x, y], [dtype, dtype], dtype)
        first, second = self.order(x, dtype), self.order(y, dtype)
        return chosen(first >= second if op == "max" else first <= second, x, y)

    def matmul(self, x: Extended, y: Extended) -> Extended:
        lanes = zip(self.field.lanes, (x.q, x.p), (y.q, y.p), strict=True)
        return Extended(*(lane.matmul(a, b) for lane, a, b in lanes))


def _decided(holds: Callable[[Array, Array], Array]) -> Ordered:
    def entry(field: ExtendedField, xs: Sequence[Extended], dtype: DType) -> Extended:
        found = holds(*(field.order(x, dtype) for x in xs)).astype(np.int64)
        return Extended(found, found)

    return entry


def _taken(op: str) -> Ordered:
    def entry(field: ExtendedField, xs: Sequence[Extended], dtype: DType) -> Extended:
        return field.combined(op, xs[0], xs[1], dtype)

    return entry


Ordered = Callable[[ExtendedField, Sequence[Extended], DType], Extended]
_ORDERED: dict[Op, Ordered] = {
    e.LT: _decided(np.less),
    e.LE: _decided(np.less_equal),
    e.EQ: _decided(np.equal),
    e.MAX: _taken("max"),
    e.MIN: _taken("min"),
}

Rule = Callable[[ExtendedField, Sequence[Extended], list[Array], DType], Extended]
_INFINITE: dict[Op, Rule] = {}


def _rule(*ops: Op) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        for op in ops:
            _INFINITE[op] = rule
        return rule

    return enter


def _plain(field: ExtendedField, op: Op, xs: Sequence[Extended], dtype: DType) -> Extended:
    """Of finite elements; where one is infinite the caller says what is there."""
    given = [dtypes.bool_ if op is e.WHERE and i == 0 else dtype for i in range(len(xs))]
    return replace(field.plain(op, NONE, xs, given, dtype), infinite=None)


def _sums(op: Op, second: int) -> None:
    @_rule(op)
    def entry(
        field: ExtendedField, xs: Sequence[Extended], flags: list[Array], dtype: DType
    ) -> Extended:
        total = flags[0] if len(flags) == 1 else flags[0] + second * flags[1]
        total = -total if op is e.NEG else total
        return replace(_plain(field, op, xs, dtype), infinite=np.sign(total))


_sums(e.ADD, 1)
_sums(e.SUB, -1)
_sums(e.NEG, 1)


def _scales(op: Op) -> None:
    @_rule(op)
    def entry(
        field: ExtendedField, xs: Sequence[Extended], flags: list[Array], dtype: DType
    ) -> Extended:
        """Factors of infinities are scales: positive."""
        return replace(_plain(field, op, xs, dtype), infinite=np.sign(flags[0] + flags[1]))


_scales(e.MUL)
_scales(e.DIV)


@_rule(e.EXP)
def _exp(
    field: ExtendedField, xs: Sequence[Extended], flags: list[Array], dtype: DType
) -> Extended:
    found = _plain(field, e.EXP, xs, dtype)
    nothing = Extended(np.zeros((), np.int64), np.zeros((), np.int64))
    finite = chosen(flags[0] < 0, nothing, found)
    return replace(finite, infinite=np.maximum(flags[0], 0))


def _extremes(op: Op, wins: int) -> None:
    @_rule(op)
    def entry(
        field: ExtendedField, xs: Sequence[Extended], flags: list[Array], dtype: DType
    ) -> Extended:
        x, y = xs
        a, b = flags[0] * wins, flags[1] * wins
        found = chosen(a > b, x, chosen(b > a, y, _plain(field, op, xs, dtype)))
        return replace(found, infinite=np.maximum(a, b) * wins)


_extremes(e.MAX, 1)
_extremes(e.MIN, -1)


@_rule(e.WHERE)
def _where(
    field: ExtendedField, xs: Sequence[Extended], flags: list[Array], dtype: DType
) -> Extended:
    """A known condition chooses; a generic one makes a generic element of an infinity."""
    condition = xs[0].p
    taken = np.where(condition == 1, flags[1], np.where(condition == 0, flags[2], 0))
    return replace(_plain(field, e.WHERE, xs, dtype), infinite=taken)


def _compares(op: Op, holds: Callable[[Array, Array], Array]) -> None:
    @_rule(op)
    def entry(
        field: ExtendedField, xs: Sequence[Extended], flags: list[Array], dtype: DType
    ) -> Extended:
        given = [dtypes.float32, dtypes.float32]
        found = field.plain(op, NONE, xs, given, dtype)
        known = holds(flags[0], flags[1]).astype(np.int64)
        decided = chosen((flags[0] != 0) | (flags[1] != 0), Extended(known, known), found)
        return replace(decided, infinite=None)


_compares(e.EQ, np.equal)
_compares(e.LT, np.less)
_compares(e.LE, np.less_equal)


@_rule(e.CAST, e.STOP_GRADIENT)
def _same(
    field: ExtendedField, xs: Sequence[Extended], flags: list[Array], dtype: DType
) -> Extended:
    return xs[0]
