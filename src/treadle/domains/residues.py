"""What each primitive does to residues. Whatever only moves elements is the oracle's own entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treadle.domains.field import RESIDUE, Lane, literal
from treadle.domains.float64 import MEANING, Array
from treadle.domains.meaning import contract_with, pad_places
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves, linear, reductions, shaping

residue = RESIDUE


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


def _orders(op: Op) -> None:
    """The oracle on residues around zero, whose order is the lane's."""

    def entry(lane: Lane, attributes: object, x: Array) -> Any:
        found = MEANING[op](attributes, lane.symmetric(x))
        if isinstance(found, tuple):
            return lane.reduce(found[0]), found[1]
        return found if op in (reductions.ARGMAX, reductions.ARGMIN) else lane.reduce(found)

    residue(op)(entry)


def _is_uninterpreted(op: Op) -> None:
    def entry(lane: Lane, *operands: Array) -> Array:
        return lane.uninterpreted(op.name, *operands)

    residue(op)(entry)


for _op in (
    e.STOP_GRADIENT,
    e.WHERE,
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
for _op in (
    reductions.REDUCE_MAX,
    reductions.REDUCE_MIN,
    reductions.ARGMAX,
    reductions.ARGMIN,
    reductions.SORT,
    reductions.TOP_K,
):
    _orders(_op)
# exp and log are homomorphisms across the lanes; these entries fill the lane that has none.
for _op in (e.EXP, e.LOG, e.SQRT, e.SIN, e.COS, e.TANH, e.ERF, e.FLOOR, e.POW, e.FLOORDIV):
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


@residue(e.ABS)
def _abs(lane: Lane, x: Array) -> Array:
    return np.abs(lane.symmetric(x))


@residue(e.SIGN)
def _sign(lane: Lane, x: Array) -> Array:
    return lane.reduce(np.sign(lane.symmetric(x)))


def _compare(op: Op, function: Callable[[Array, Array], Array]) -> None:
    def entry(lane: Lane, x: Array, y: Array) -> Array:
        return function(lane.symmetric(x), lane.symmetric(y))

    residue(op)(entry)


_compare(e.EQ, np.equal)
_compare(e.LT, np.less)
_compare(e.LE, np.less_equal)


@residue(e.MAX)
def _max(lane: Lane, x: Array, y: Array) -> Array:
    return np.where(lane.symmetric(x) < lane.symmetric(y), y, x)


@residue(e.MIN)
def _min(lane: Lane, x: Array, y: Array) -> Array:
    return np.where(lane.symmetric(x) < lane.symmetric(y), x, y)


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
