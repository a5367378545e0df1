"""What each primitive does to residues. Whatever only moves elements is the oracle's own entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.domains.field import ORDER, RESIDUE, FiniteField, Lane, Residues, literal
from treadle.domains.float64 import MEANING, Array
from treadle.domains.meaning import contract_with, pad_places
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves, linear, reductions, shaping

residue = RESIDUE
order = ORDER


def _moves(op: Op) -> None:
    """Residues move as any other elements do."""

    def entry(lane: Lane, *arguments: Any) -> Any:
        return MEANING[op](*arguments)

    residue(op)(entry)


def _adds(op: Op) -> None:
    """The oracle's sum of integers, reduced at the end: fewer than 2³² terms cannot overflow."""

    def entry(lane: Lane, *arguments: Any) -> Any:
        return lane.reduce(MEANING[op](*arguments))

    residue(op)(entry)


def _is_uninterpreted(op: Op) -> None:
    def entry(lane: Lane, *operands: Array) -> Array:
        return lane.uninterpreted(op.name, *operands)

    residue(op)(entry)


for _op in (
    e.STOP_GRADIENT,
    reductions.SHARD_SUM,
    shaping.RESHAPE,
    shaping.PERMUTE,
    shaping.BROADCAST,
    shaping.SLICE,
    shaping.CONCAT,
    shaping.FLIP,
    shaping.DYNAMIC_SLICE,
    shaping.DYNAMIC_UPDATE,
    linear.WINDOW,
    indexing.GATHER,
):
    _moves(_op)
for _op in (
    e.ADD,
    e.SUB,
    e.NEG,
    reductions.REDUCE_SUM,
    reductions.CUMSUM,
    linear.UNWINDOW,
    indexing.SCATTER_ADD,
):
    _adds(_op)
# exp and log are homomorphisms across the lanes; these entries fill the lane that has none.
for _op in (
    e.EXP,
    e.LOG,
    e.SQRT,
    e.SIN,
    e.COS,
    e.TANH,
    e.ERF,
    e.FLOOR,
    e.POW,
    e.ATAN2,
    e.FLOORDIV,
):
    _is_uninterpreted(_op)


@residue(leaves.CONSTANT)
def _constant(lane: Lane, attributes: leaves.Constant) -> Array:
    return literal(lane, attributes.value, attributes.type.shape)


@residue(leaves.IOTA)
def _iota(lane: Lane, attributes: leaves.Iota) -> Array:
    return lane.reduce(MEANING[leaves.IOTA](attributes).astype(np.int64))


@residue(e.MUL)
def _mul(lane: Lane, x: Array, y: Array) -> Array:
    return x * y % lane.modulus


@residue(e.DIV)
def _div(lane: Lane, x: Array, y: Array) -> Array:
    return x * lane.inverse(y) % lane.modulus


@residue(e.RSQRT)
def _rsqrt(lane: Lane, x: Array) -> Array:
    return lane.inverse(lane.uninterpreted(e.SQRT.name, x))


@residue(e.MOD)
def _mod(lane: Lane, x: Array, y: Array) -> Array:
    quotient = lane.uninterpreted(e.FLOORDIV.name, x, y)
    return lane.reduce(x - quotient * y % lane.modulus)


@residue(reductions.REDUCE_PROD)
def _reduce_prod(lane: Lane, attributes: reductions.Reduce, x: Array) -> Array:
    for axis in reversed(attributes.axes):
        product = np.ones_like(np.take(x, [], axis=axis).sum(axis=axis))
        for row in np.moveaxis(x, axis, 0):
            product = product * row % lane.modulus
        x = product
    return x


@residue(shaping.PAD)
def _pad(lane: Lane, attributes: shaping.Pad, x: Array) -> Array:
    places, shape = pad_places(attributes, x.shape)
    result = np.full(shape, lane.number(attributes.value), np.int64)
    result[places] = x
    return result


@residue(linear.CONTRACT)
def _contract(lane: Lane, attributes: linear.Contraction, x: Array, y: Array) -> Array:
    return contract_with(lane.matmul, attributes, x, y)


def _extreme(op: Op, arg: Callable[..., Array]) -> None:
    def entry(
        field: FiniteField, attributes: reductions.Reduce, x: Residues
    ) -> tuple[Residues, ...]:
        axes = attributes.axes
        kept = [i for i in range(x.p.ndim) if i not in axes]
        shape = [x.p.shape[i] for i in kept]
        count = math.prod(x.p.shape[i] for i in axes)

        def rows(part: Array) -> Array:
            return part.transpose([*kept, *axes]).reshape(*shape, count)

        place = arg(rows(field.order(x)), axis=-1)[..., None]
        parts = (np.take_along_axis(rows(part), place, -1)[..., 0] for part in (x.q, x.p))
        return (Residues(*parts),)

    order(op)(entry)


_extreme(reductions.REDUCE_MAX, np.argmax)
_extreme(reductions.REDUCE_MIN, np.argmin)


@order(reductions.ARGMAX)
def _argmax(
    field: FiniteField, attributes: reductions.ArgReduce, x: Residues
) -> tuple[Residues, ...]:
    place = np.argmax(field.order(x), attributes.axis).astype(np.int32)
    return (Residues(place, place),)


@order(reductions.ARGMIN)
def _argmin(
    field: FiniteField, attributes: reductions.ArgReduce, x: Residues
) -> tuple[Residues, ...]:
    place = np.argmin(field.order(x), attributes.axis).astype(np.int32)
    return (Residues(place, place),)


def _orders(op: Op) -> None:
    """The order of the p-lane, taken in both lanes."""

    def entry(
        field: FiniteField, attributes: reductions.Sort | reductions.TopK, x: Residues
    ) -> tuple[Residues, ...]:
        _, places = MEANING[op](attributes, field.order(x))
        parts = (np.take_along_axis(part, places, attributes.axis) for part in (x.q, x.p))
        indices = places.astype(np.int32)
        return Residues(*parts), Residues(indices, indices)

    order(op)(entry)


_orders(reductions.SORT)
_orders(reductions.TOP_K)


@order(e.CAST)
def _cast_to_integer(field: FiniteField, attributes: e.Cast, x: Residues) -> tuple[Residues, ...]:
    """A keyed whole number: truncation has no counterpart in a field. Known flags stay."""
    is_flag = bool(np.isin(x.p, (0, 1)).all())
    plain = x.p if is_flag else field.lane_p.uninterpreted(e.CAST.name, x.p)
    return (Residues(*(plain.astype(attributes.dtype.numpy),) * 2),)


@residue(e.CAST)
def _cast(lane: Lane, attributes: e.Cast, x: Array) -> Array:
    """Floats and flags stay as they are, integers are exact; to bool is a keyed flag, 0 for 0."""
    if attributes.dtype is dtypes.bool_:
        is_flag = np.isin(x, (0, 1))
        return np.where(is_flag, x, lane.uninterpreted("to bool", x))
    return lane.reduce(x.astype(np.int64))


# Flags are elements of the field like any other, 0 and 1 where they are known. So both branches
# of a choice are seen, and what differs in one of them is found out as surely as anywhere.


@residue(e.EQ)
def _eq(lane: Lane, x: Array, y: Array) -> Array:
    return (x == y).astype(np.int64)


@residue(e.LT)
def _lt(lane: Lane, x: Array, y: Array) -> Array:
    """A keyed element of x − y: s for d and 1 − s for −d, so x < y excludes y < x, and no x < x."""
    difference, opposite = lane.reduce(x - y), lane.reduce(y - x)
    keyed = lane.uninterpreted(e.LT.name, np.minimum(difference, opposite))
    either = np.where(difference < opposite, keyed, lane.reduce(1 - keyed))
    return np.where(difference == 0, 0, either)


@residue(e.LE)
def _le(lane: Lane, x: Array, y: Array) -> Array:
    return lane.reduce(1 - _lt(lane, y, x))


@residue(e.WHERE)
def _where(lane: Lane, condition: Array, x: Array, y: Array) -> Array:
    return lane.reduce(y + condition * lane.reduce(x - y))


@residue(e.SIGN)
def _sign(lane: Lane, x: Array) -> Array:
    return np.where(x == 0, 0, lane.reduce(1 - 2 * _lt(lane, x, np.zeros_like(x))))


@residue(e.ABS)
def _abs(lane: Lane, x: Array) -> Array:
    return x * _sign(lane, x) % lane.modulus


@residue(e.MAX)
def _max(lane: Lane, x: Array, y: Array) -> Array:
    return _where(lane, _lt(lane, x, y), y, x)


@residue(e.MIN)
def _min(lane: Lane, x: Array, y: Array) -> Array:
    return _where(lane, _lt(lane, x, y), x, y)


@residue(e.NOT)
def _not(lane: Lane, x: Array) -> Array:
    return lane.reduce(1 - x)


@residue(e.AND)
def _and(lane: Lane, x: Array, y: Array) -> Array:
    return x * y % lane.modulus


@residue(e.OR)
def _or(lane: Lane, x: Array, y: Array) -> Array:
    return lane.reduce(x + y - x * y % lane.modulus)


@residue(e.XOR)
def _xor(lane: Lane, x: Array, y: Array) -> Array:
    return lane.reduce(x + y - 2 * (x * y % lane.modulus))
