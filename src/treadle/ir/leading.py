"""Ops over one leading axis more: the attributes that do to every element what an op does to one.

The entry of an op gets its attributes and the size of the new axis, which all operands and results
have in front. `contraction_along` is the entry of contractions, of which an operand may lack it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from string import ascii_letters
from typing import Any

from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import linear, reductions, shaping

Shift = Callable[[Any, int], Any]


def _same(attributes: Any, size: int) -> Any:
    return attributes


def _after(axes: Sequence[int]) -> tuple[int, ...]:
    """The same axes, one place further."""
    return tuple(a + 1 for a in axes)


def shift_axes(attributes: Any, size: int) -> Any:
    return replace(attributes, axes=_after(attributes.axes))


def shift_axis(attributes: Any, size: int) -> Any:
    return replace(attributes, axis=attributes.axis + 1)


def _reshape(attributes: shaping.Reshape, size: int) -> shaping.Reshape:
    return shaping.Reshape((size, *attributes.shape))


def _permute(attributes: shaping.Permute, size: int) -> shaping.Permute:
    return shaping.Permute((0, *_after(attributes.axes)))


def _broadcast(attributes: shaping.Broadcast, size: int) -> shaping.Broadcast:
    return shaping.Broadcast((size, *attributes.shape), (0, *_after(attributes.axes)))


def _slice(attributes: shaping.Slice, size: int) -> shaping.Slice:
    a = attributes
    return shaping.Slice((0, *a.starts), (size, *a.stops), (1, *a.strides))


def _pad(attributes: shaping.Pad, size: int) -> shaping.Pad:
    a = attributes
    return shaping.Pad((0, *a.low), (0, *a.high), (0, *a.interior), a.value)


def _unwindow(attributes: linear.Unwindow, size: int) -> linear.Unwindow:
    return linear.Unwindow(shift_axes(attributes.window, size), (size, *attributes.shape))


ANY_RANK = (
    *(e.NEG, e.ABS, e.SIGN, e.FLOOR, e.EXP, e.LOG, e.SQRT, e.RSQRT, e.SIN, e.COS, e.TANH, e.ERF),
    reductions.SHARD_SUM,
    *(e.NOT, e.STOP_GRADIENT, e.CAST, e.ADD, e.SUB, e.MUL, e.DIV, e.FLOORDIV, e.MOD, e.MAX, e.MIN),
    *(e.POW, e.ATAN2, e.EQ, e.LT, e.LE, e.AND, e.OR, e.XOR, e.WHERE),
)
_WITH_AXES = (
    *(reductions.REDUCE_SUM, reductions.REDUCE_MAX, reductions.REDUCE_MIN, reductions.REDUCE_PROD),
    *(shaping.FLIP, linear.WINDOW),
)
_WITH_AXIS = (
    *(reductions.ARGMAX, reductions.ARGMIN, reductions.CUMSUM, reductions.SORT, reductions.TOP_K),
    shaping.CONCAT,
)
LEADING: dict[Op, Shift] = {
    **dict.fromkeys(ANY_RANK, _same),
    **dict.fromkeys(_WITH_AXES, shift_axes),
    **dict.fromkeys(_WITH_AXIS, shift_axis),
    shaping.RESHAPE: _reshape,
    shaping.PERMUTE: _permute,
    shaping.BROADCAST: _broadcast,
    shaping.SLICE: _slice,
    shaping.PAD: _pad,
    linear.UNWINDOW: _unwindow,
}


def contraction_along(
    attributes: linear.Contraction, has_axis: Sequence[bool]
) -> linear.Contraction:
    """One label more, in the operands that have the axis and in the result."""
    x, y, result = attributes.labels
    fresh = next(c for c in ascii_letters if c not in x + y)
    in_x, in_y = (fresh if is_there else "" for is_there in has_axis)
    spec = linear.canonical_spec(in_x + x, in_y + y, fresh + result)
    return linear.Contraction(spec, attributes.dtype)
