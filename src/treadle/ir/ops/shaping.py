"""Ops that only move elements."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.errors import ArgumentError, AxisError, DTypeError, ShapeError
from treadle.base.shapes import Shape, size_of
from treadle.ir.contract import Contract, Determinism, Exact
from treadle.ir.literal import Number, number_key
from treadle.ir.op import Attributes, Op, Precision, TypeRule, Types, declare
from treadle.ir.types import TensorType

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape(Attributes):
    shape: Shape


@dataclass(frozen=True, slots=True)
class Permute(Attributes):
    """Axis i of the result is axis `axes[i]` of the operand."""

    axes: Ints


@dataclass(frozen=True, slots=True)
class Broadcast(Attributes):
    """Axis i of the operand becomes axis `axes[i]` (ascending) of `shape`; the others repeat it."""

    shape: Shape
    axes: Ints


@dataclass(frozen=True, slots=True)
class Slice(Attributes):
    """starts:stops:strides per axis, strides ≥ 1."""

    starts: Ints
    stops: Ints
    strides: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pad(Attributes):
    """`low` before, `high` after, `interior` between neighbours, per axis, filled with `value`."""

    low: Ints
    high: Ints
    interior: Ints
    value: Number = 0

    def _key(self) -> tuple[object, ...]:
        return self.low, self.high, self.interior, number_key(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pad) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Concat(Attributes):
    axis: int


@dataclass(frozen=True, slots=True)
class Flip(Attributes):
    axes: Ints


@dataclass(frozen=True, slots=True)
class DynamicSlice(Attributes):
    """`sizes` per axis, from start indices that are data: an integer vector, one per axis."""

    sizes: Ints


@dataclass(frozen=True, slots=True)
class DynamicUpdate(Attributes):
    """Writes the update at start indices that are data."""


def _reshape_type(attributes: Reshape, x: TensorType) -> Types:
    if size_of(attributes.shape) != x.size:
        cause = f"{x} has {x.size} elements, {attributes.shape} has {size_of(attributes.shape)}"
        raise ShapeError("reshape", cause)
    return (x.with_shape(attributes.shape),)


def _permute_type(attributes: Permute, x: TensorType) -> Types:
    if sorted(attributes.axes) != list(range(x.rank)):
        raise AxisError(
            "permute", f"{attributes.axes} is not a permutation of the {x.rank} axes of {x}"
        )
    return (x.with_shape(tuple(x.shape[a] for a in attributes.axes)),)


def _broadcast_type(attributes: Broadcast, x: TensorType) -> Types:
    shape, axes = attributes.shape, attributes.axes
    if (
        len(axes) != x.rank
        or list(axes) != sorted(set(axes))
        or any(not 0 <= a < len(shape) for a in axes)
    ):
        raise AxisError("broadcast", f"axes {axes} do not place {x} into {shape}")
    if any(shape[a] != n for a, n in zip(axes, x.shape, strict=True)):
        raise ShapeError("broadcast", f"{x} does not fit axes {axes} of {shape}")
    return (x.with_shape(shape),)


def _slice_type(attributes: Slice, x: TensorType) -> Types:
    starts, stops, strides = attributes.starts, attributes.stops, attributes.strides
    if not len(starts) == len(stops) == len(strides) == x.rank:
        raise ShapeError("slice", f"{len(starts)} bounds for the {x.rank} axes of {x}")
    for start, stop, stride, n in zip(starts, stops, strides, x.shape, strict=True):
        if not (0 <= start <= stop <= n and stride >= 1):
            raise ArgumentError("slice", f"{start}:{stop}:{stride} of an axis of {n} elements")
    counts = zip(starts, stops, strides, strict=True)
    return (x.with_shape(tuple(-(-(stop - start) // stride) for start, stop, stride in counts)),)


def _pad_type(attributes: Pad, x: TensorType) -> Types:
    low, high, interior = attributes.low, attributes.high, attributes.interior
    if not len(low) == len(high) == len(interior) == x.rank:
        raise ShapeError("pad", f"{len(low)} amounts for the {x.rank} axes of {x}")
    if min((*low, *high, *interior), default=0) < 0:
        raise ArgumentError("pad", f"negative amounts: {low}, {high}, {interior}", "Slice instead.")
    grown = zip(x.shape, low, high, interior, strict=True)
    return (x.with_shape(tuple(lo + n + max(n - 1, 0) * i + hi for n, lo, hi, i in grown)),)


def _concat_type(attributes: Concat, *operands: TensorType) -> Types:
    if not operands:
        raise ArgumentError("concat", "there is nothing to join")
    first, axis = operands[0], attributes.axis
    if not 0 <= axis < first.rank:
        raise AxisError("concat", f"axis {axis} of {first}")
    for other in operands[1:]:
        same = other.rank == first.rank and all(
            n == m
            for i, (n, m) in enumerate(zip(first.shape, other.shape, strict=True))
            if i != axis
        )
        if not same:
            raise ShapeError("concat", f"{first} and {other} differ beside axis {axis}")
        if other.dtype is not first.dtype:
            raise DTypeError("concat", f"dtypes differ: {first} and {other}", "Cast one of them.")
    total = sum(o.shape[axis] for o in operands)
    return (first.with_shape(tuple(total if i == axis else n for i, n in enumerate(first.shape))),)


def _flip_type(attributes: Flip, x: TensorType) -> Types:
    if any(not 0 <= a < x.rank for a in attributes.axes):
        raise AxisError("flip", f"axes {attributes.axes} of {x}")
    return (x,)


def _check_starts(name: str, starts: TensorType, x: TensorType) -> None:
    if starts.shape != (x.rank,) or not starts.dtype.is_integer:
        raise ShapeError(
            name, f"start indices are {starts}; {x} needs an integer vector of {x.rank}"
        )


def _dynamic_slice_type(attributes: DynamicSlice, x: TensorType, starts: TensorType) -> Types:
    _check_starts("dynamic_slice", starts, x)
    sizes = attributes.sizes
    if len(sizes) != x.rank or any(not 0 <= s <= n for s, n in zip(sizes, x.shape, strict=False)):
        raise ShapeError("dynamic_slice", f"sizes {sizes} do not fit {x}")
    return (x.with_shape(sizes),)


def _dynamic_update_type(
    attributes: DynamicUpdate, x: TensorType, update: TensorType, starts: TensorType
) -> Types:
    _check_starts("dynamic_update_slice", starts, x)
    if update.dtype is not x.dtype:
        raise DTypeError(
            "dynamic_update_slice", f"dtypes differ: {x} and {update}", "Cast the update."
        )
    if update.rank != x.rank or any(u > n for u, n in zip(update.shape, x.shape, strict=True)):
        raise ShapeError("dynamic_update_slice", f"the update {update} does not fit into {x}")
    return (x,)


_MOVE = Contract(Exact(), "all values", "linear", Determinism.EVERYWHERE)
_CLAMPED = Contract(
    Exact(),
    "start indices are clamped so that the slice lies inside",
    "linear",
    Determinism.EVERYWHERE,
)


def _row(name: str, attributes: type[Attributes], rule: TypeRule, contract: Contract = _MOVE) -> Op:
    return declare(Op(name, attributes, rule, Precision.FOLLOW, contract))


RESHAPE = _row("reshape", Reshape, _reshape_type)
PERMUTE = _row("permute", Permute, _permute_type)
BROADCAST = _row("broadcast", Broadcast, _broadcast_type)
SLICE = _row("slice", Slice, _slice_type)
PAD = _row("pad", Pad, _pad_type)
CONCAT = _row("concat", Concat, _concat_type)
FLIP = _row("flip", Flip, _flip_type)
DYNAMIC_SLICE = _row("dynamic_slice", DynamicSlice, _dynamic_slice_type, _CLAMPED)
DYNAMIC_UPDATE = _row("dynamic_update_slice", DynamicUpdate, _dynamic_update_type, _CLAMPED)
