"""Functions that move elements, and those that make tensors from nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, AxisError, DTypeError, ShapeError
from treadle.base.numbers import FINITE, check_number
from treadle.base.shapes import Shape, broadcast_shapes, normal_axis, size_of, without
from treadle.frontend.coerce import as_tensor, broadcast_to, common_dtype, constant
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import where
from treadle.frontend.scopes import bind1
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Axes, Operand, Tensor
from treadle.ir.literal import Number
from treadle.ir.ops import shaping as s
from treadle.ir.ops.leaves import IOTA, Iota
from treadle.ir.types import TensorType, as_dtype


def axis_of(name: str, axis: int, x: Tensor, extra: int = 0) -> int:
    """`axis` of `x` counted from the front; `extra` axes more may be named."""
    rank = x.ndim + extra
    is_whole = isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)
    found = normal_axis(axis, rank) if is_whole else None
    if found is None:
        allowed = f"{-rank} to {rank - 1}" if rank else "none: it has no axes"
        raise AxisError(name, f"axis {axis!r} of {x.type} does not exist", f"Axes are {allowed}.")
    return int(found)


def axes_of(name: str, axes: Axes, x: Tensor) -> tuple[int, ...]:
    """Ascending axes; all of them for None."""
    if axes is None:
        return tuple(range(x.ndim))
    given = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
    if not x.ndim and len(given) == 1 and given[0] in (0, -1):
        return ()  # PyTorch's one axis of a scalar
    found = sorted(axis_of(name, a, x) for a in given)
    if len(set(found)) != len(found):
        raise AxisError(
            name, f"axes {tuple(given)} of {x.type} name one axis twice", "Name each axis once."
        )
    return tuple(found)


def integer_of(name: str, label: str, value: object) -> int:
    """An argument that is part of the program, not data."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, Tensor)):
        raise ArgumentError(name, f"{label} is {value!r}", "It must be an integer.")
    return index(value)


def number_of(name: str, label: str, value: object) -> float:
    """A finite number that is part of the program; a tensor if it is eager."""
    return check_number(name, label, value.item() if isinstance(value, Tensor) else value, FINITE)


def _listed(name: str, tensors: object) -> list[Operand]:
    """Tensors in a sequence, or the rows of one."""
    if not isinstance(tensors, (Iterable, Tensor)) or isinstance(tensors, (str, bytes)):
        raise ArgumentError(name, f"tensors = {tensors!r}", "Pass a list of tensors.")
    return list(tensors)


def integers_of(name: str, label: str, given: tuple[Any, ...]) -> list[int]:
    """Given one by one, or as one sequence."""
    values = given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given
    return [integer_of(name, label, n) for n in values]


def reshape(x: Operand, *shape: Any) -> Tensor:
    """Other sizes for the same elements in the same order, one may be −1: (2, 6) → (4, 3)."""
    x = as_tensor(x)
    sizes = integers_of("reshape", "a size", shape)
    if sizes.count(-1) == 1:
        known = size_of([n for n in sizes if n != -1])
        if known == 0 or x.size % known:
            raise ShapeError(
                "reshape",
                f"{x.type} has {x.size} elements, which {tuple(sizes)} cannot hold",
                "−1 must come out whole.",
            )
        sizes[sizes.index(-1)] = x.size // known
    if any(n < 0 for n in sizes):
        raise ShapeError(
            "reshape",
            f"{x.type} to {tuple(sizes)}: a size is negative",
            "One size may be −1, to have it computed.",
        )
    if size_of(sizes) != x.size:
        raise ShapeError(
            "reshape",
            f"{x.type} has {x.size} elements, {tuple(sizes)} has {size_of(sizes)}",
            "Use −1 for one size to have it computed.",
        )
    return x if x.shape == tuple(sizes) else bind1(s.RESHAPE, s.Reshape(tuple(sizes)), x)


def permute(x: Operand, *axes: Any) -> Tensor:
    """The axes in another order, axis i being axis axes[i] of x: (A, B, C) → (C, A, B)."""
    x = as_tensor(x)
    given = integers_of("permute", "an axis", axes)
    order = tuple(axis_of("permute", a, x) for a in given)
    if sorted(order) != list(range(x.ndim)):
        raise AxisError(
            "permute",
            f"{tuple(given)} is not an order of the {x.ndim} axes of {x.type}",
            "Name each axis once.",
        )
    return x if order == tuple(range(x.ndim)) else bind1(s.PERMUTE, s.Permute(order), x)


@takes_dim
def transpose(x: Operand, first: int, second: int) -> Tensor:
    """Two axes exchanged: (A, B, C) → (C, B, A)."""
    x = as_tensor(x)
    a, b = axis_of("transpose", first, x), axis_of("transpose", second, x)
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return permute(x, order)


def moveaxis(x: Operand, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Axes moved to other places, the others staying in order: (A, B, C) → (B, C, A)."""
    x = as_tensor(x)
    ends = [
        [axis_of("moveaxis", a, x) for a in (given if isinstance(given, Sequence) else (given,))]
        for given in (source, destination)
    ]
    if len(ends[0]) != len(ends[1]) or any(len(set(end)) != len(end) for end in ends):
        raise AxisError(
            "moveaxis",
            f"axes {source} of {x.type} to {destination}",
            "Name as many places as axes, each once.",
        )
    order = [i for i in range(x.ndim) if i not in ends[0]]
    for place, axis in sorted(zip(ends[1], ends[0], strict=True)):
        order.insert(place, axis)
    return permute(x, order)


@takes_dim
def flatten(x: Operand, start: int = 0, stop: int = -1) -> Tensor:
    """The axes from `start` to `stop`, included, as one: (A, B, C) → (A, B · C)."""
    x = as_tensor(x)
    if x.ndim == 0:
        return reshape(x, 1)
    a, b = axis_of("flatten", start, x), axis_of("flatten", stop, x)
    if a > b:
        raise AxisError(
            "flatten", f"axis {start} of {x.type} comes after axis {stop}", "Exchange them."
        )
    return reshape(x, (*x.shape[:a], size_of(x.shape[a : b + 1]), *x.shape[b + 1 :]))


@takes_dim
def squeeze(x: Operand, axis: Axes = None) -> Tensor:
    """Without axes of one element, all such or those named: (1, A, 1) → (A,)."""
    x = as_tensor(x)
    if axis is None:
        return reshape(x, tuple(n for n in x.shape if n != 1))
    axes = axes_of("squeeze", axis, x)
    wrong = [a for a in axes if x.shape[a] != 1]
    if wrong:
        raise ShapeError(
            "squeeze",
            f"axis {wrong[0]} of {x.type} has {x.shape[wrong[0]]} elements, not 1",
            "Index or reduce it instead.",
        )
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


@takes_dim
def unsqueeze(x: Operand, axis: int) -> Tensor:
    """With a new axis of one element at the place `axis`: (A, B) → (A, 1, B)."""
    x = as_tensor(x)
    at = axis_of("unsqueeze", axis, x, extra=1)
    return reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


def expand(x: Operand, *shape: Any) -> Tensor:
    """Repeated to a shape, as NumPy's broadcast_to: (A, 1) → (B, A, C); −1 is the size it has."""
    x = as_tensor(x)
    given = tuple(integers_of("expand", "a size", shape))
    new = len(given) - x.ndim  # axes in front that x does not have
    sizes = tuple(x.shape[i - new] if n == -1 and i >= new else n for i, n in enumerate(given))
    if min(sizes, default=0) < 0 or broadcast_shapes(x.shape, sizes) != sizes:
        raise ShapeError(
            "expand",
            f"{x.type} does not broadcast to {given}",
            "Sizes must be equal or 1 in x, counted from the last axis.",
        )
    return broadcast_to(x, sizes)


def slice_along(x: Tensor, axis: int, start: int, stop: int, stride: int = 1) -> Tensor:
    """start:stop:stride of one axis, all of the others. Bounds are in range."""
    if (start, stop, stride) == (0, x.shape[axis], 1):
        return x
    starts = tuple(start if i == axis else 0 for i in range(x.ndim))
    stops = tuple(stop if i == axis else n for i, n in enumerate(x.shape))
    strides = tuple(stride if i == axis else 1 for i in range(x.ndim))
    return bind1(s.SLICE, s.Slice(starts, stops, strides), x)


@takes_dim
def concat(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
    """Joined along an axis, dtypes being promoted: (A, C), (B, C) → (A + B, C)."""
    given = _listed("concat", tensors)
    if not given:
        raise ArgumentError("concat", "there is nothing to join", "Pass at least one tensor.")
    dtype = common_dtype(given)
    parts = [cast_to(as_tensor(t), dtype) for t in given]
    at = axis_of("concat", axis, parts[0])
    for other in parts[1:]:
        if without(other.shape, (at,)) != without(parts[0].shape, (at,)):
            raise ShapeError(
                "concat",
                f"{parts[0].type} and {other.type} differ beside axis {axis}",
                "All other axes must have equal sizes.",
            )
    return parts[0] if len(parts) == 1 else bind1(s.CONCAT, s.Concat(at), *parts)


@takes_dim
def stack(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
    """Joined along a new axis: n tensors (A, B) → (n, A, B)."""
    parts = [as_tensor(t) for t in _listed("stack", tensors)]
    if not parts:
        raise ArgumentError("stack", "there is nothing to stack", "Pass at least one tensor.")
    for other in parts[1:]:
        if other.shape != parts[0].shape:
            raise ShapeError(
                "stack",
                f"shapes differ: {parts[0].type} and {other.type}",
                "Expand them to one shape, or use td.concat.",
            )
    at = axis_of("stack", axis, parts[0], extra=1)
    return concat([unsqueeze(p, at) for p in parts], at)


@takes_dim
def split(x: Operand, size: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Pieces of `size` along an axis, the last may be smaller, or of listed sizes: (5,) → (3,),
    (2,).
    """
    x = as_tensor(x)
    at = axis_of("split", axis, x)
    n = x.shape[at]
    if isinstance(size, Sequence):
        sizes = [integer_of("split", "a size", s) for s in size]
    else:
        sizes = _equal_sizes(n, integer_of("split", "the size", size))
    if sum(sizes) != n or min(sizes, default=0) < 0:
        raise ShapeError(
            "split",
            f"sizes {tuple(sizes)} do not add up to {n}, axis {axis} of {x.type}",
            "Give the sizes of all pieces.",
        )
    ends = accumulate(sizes, initial=0)
    return tuple(slice_along(x, at, a, b) for a, b in pairwise(ends))


def _equal_sizes(n: int, size: int) -> list[int]:
    """n elements in pieces of `size`; an empty axis is one piece, as in PyTorch."""
    if size < 1:
        raise ArgumentError("split", f"pieces of {size} elements", "Give a size of at least 1.")
    return [min(size, n - i) for i in range(0, max(n, 1), size)]


@takes_dim
def chunk(x: Operand, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` equal pieces along an axis, the last may be smaller: (5,) → (3,), (2,)."""
    x = as_tensor(x)
    count = integer_of("chunk", "the number of chunks", chunks)
    if count < 1:
        raise ArgumentError("chunk", f"{count} chunks", "Give at least 1.")
    n = x.shape[axis_of("chunk", axis, x)]
    return split(x, -(-n // count) if n else [0] * count, axis)


def pad(
    x: Operand,
    amounts: Sequence[tuple[int, int]],
    value: Number = 0,
    interior: Sequence[int] | None = None,
) -> Tensor:
    """(before, after) per axis filled with `value`; `interior` puts as many between neighbours."""
    x = as_tensor(x)
    if isinstance(value, str):
        raise ArgumentError(
            "pad",
            f"value = {value!r}",
            "Give a number; nn.ReflectionPad2d, nn.ReplicationPad2d and nn.CircularPad2d pad "
            "with elements, as their kin for 1 and 3 axes do.",
        )
    if not isinstance(amounts, Sequence) or isinstance(amounts, str):
        raise ArgumentError("pad", f"amounts = {amounts!r}", "Give (before, after) for each axis.")
    if len(amounts) != x.ndim:
        raise ShapeError(
            "pad",
            f"{len(amounts)} pairs for the {x.ndim} axes of {x.type}",
            "Give (0, 0) for the others.",
        )
    if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in amounts):
        raise ArgumentError("pad", f"amounts are {amounts}", "Give (before, after) for each axis.")
    low = tuple(integer_of("pad", "an amount", before) for before, _ in amounts)
    high = tuple(integer_of("pad", "an amount", after) for _, after in amounts)
    gaps = tuple(integers_of("pad", "interior", (interior,))) if interior is not None else ()
    gaps = gaps or (0,) * x.ndim
    if not any((*low, *high, *gaps)):
        return x
    if x.dtype.is_integer:
        constant(value, (), x.dtype)  # refuses what the dtype cannot hold
    return bind1(s.PAD, s.Pad(low, high, gaps, value), x)


@takes_dim
def flip(x: Operand, axis: Axes = None) -> Tensor:
    """In reverse order along axes, or along all. The shape stays."""
    x = as_tensor(x)
    axes = axes_of("flip", axis, x)
    return bind1(s.FLIP, s.Flip(axes), x) if axes else x


@takes_dim
def roll(x: Operand, shift: int | Sequence[int], axis: Axes = None) -> Tensor:
    """Moved along axes, each by its shift; what leaves at one end enters at the other.

    Without an axis the elements move as one row. The shape stays.
    """
    x = as_tensor(x)
    shifts = shift if isinstance(shift, Sequence) else (shift,)
    if axis is None:
        if len(shifts) != 1:
            raise ArgumentError("roll", f"shifts {shift} without axes", "Name an axis for each.")
        return reshape(_rolled(reshape(x, (-1,)), shifts[0], 0), x.shape)
    axes = axis if isinstance(axis, Sequence) else (axis,)
    if len(axes) != len(shifts):
        raise ArgumentError("roll", f"shifts {shift} along axes {axis}", "Give one for each axis.")
    for by, along in zip(shifts, axes, strict=True):
        x = _rolled(x, by, axis_of("roll", along, x))
    return x


def _rolled(x: Tensor, shift: int, at: int) -> Tensor:
    n = x.shape[at]
    cut = -integer_of("roll", "the shift", shift) % n if n else 0
    return x if cut == 0 else concat([slice_along(x, at, cut, n), slice_along(x, at, 0, cut)], at)


def repeat(x: Operand, *times: int) -> Tensor:
    """Tiled: copies along each axis, as torch.Tensor.repeat: (A, B) → (m · A, n · B)."""
    x = as_tensor(x)
    counts = integers_of("repeat", "a count", times)
    if len(counts) < x.ndim:
        raise ShapeError(
            "repeat",
            f"{len(counts)} counts for the {x.ndim} axes of {x.type}",
            "Give 1 for the others.",
        )
    if min(counts, default=0) < 0:
        raise ArgumentError("repeat", f"counts {tuple(counts)} of {x.type}", "Give 0 or more.")
    shape = (1,) * (len(counts) - x.ndim) + x.shape
    paired = tuple(n for pair in zip(counts, shape, strict=True) for n in pair)
    spread = bind1(
        s.BROADCAST, s.Broadcast(paired, tuple(range(1, 2 * len(shape), 2))), reshape(x, shape)
    )
    return reshape(spread, tuple(c * n for c, n in zip(counts, shape, strict=True)))


def fitted(name: str, update: Operand, x: Tensor) -> Tensor:
    """An update in the dtype of what it goes into; never a float cut to an integer."""
    given = as_tensor(update)
    if given.dtype.is_float and not x.dtype.is_float:
        raise DTypeError(
            name, f"the update is {given.type}, x is {x.type}", "Cast one of them first."
        )
    return cast_to(given, x.dtype)


@takes_dim(size="shape", fill_value="value")
def full(shape: Shape, value: Number, dtype: object = dtypes.float32) -> Tensor:
    """One value everywhere: → shape."""
    if isinstance(value, Tensor):
        raise ArgumentError(
            "full", f"the value is the tensor {value.type}", "Use td.expand(x, shape)."
        )
    if not isinstance(value, (bool, int, float, Fraction, np.generic)):
        raise ArgumentError("full", f"the value is {value!r}", "It is a number.")
    checked = TensorType(shape, as_dtype(dtype))
    number = value.item() if isinstance(value, np.generic) else value
    return constant(number, checked.shape, checked.dtype)


@takes_dim(size="shape")
def zeros(shape: Shape, dtype: object = dtypes.float32) -> Tensor:
    """Zeros: → shape."""
    return full(shape, 0, dtype)


@takes_dim(size="shape")
def ones(shape: Shape, dtype: object = dtypes.float32) -> Tensor:
    """Ones: → shape."""
    return full(shape, 1, dtype)


@takes_dim
def zeros_like(x: Operand, dtype: object = None) -> Tensor:
    """Zeros of x's shape, and of its dtype unless one is given."""
    return _spread_like(x, 0, dtype)


@takes_dim
def ones_like(x: Operand, dtype: object = None) -> Tensor:
    """Ones of x's shape, and of its dtype unless one is given."""
    return _spread_like(x, 1, dtype)


def _spread_like(x: Operand, value: int, dtype: object) -> Tensor:
    x = as_tensor(x)
    return constant(value, x.shape, x.dtype if dtype is None else as_dtype(dtype))


def iota(shape: Shape, axis: int = -1, dtype: object = dtypes.int32) -> Tensor:
    """0, 1, 2, … along an axis, repeated along the others: → shape."""
    sizes = TensorType(shape).shape
    found = normal_axis(axis, len(sizes)) if isinstance(axis, (int, np.integer)) else None
    if found is None:
        raise AxisError(
            "iota", f"axis {axis} of the shape {sizes} does not exist", "Name an axis of the shape."
        )
    return bind1(IOTA, Iota(found, sizes, as_dtype(dtype)))


@takes_dim(end="stop")
def arange(
    start: int, stop: int | None = None, step: int = 1, dtype: object = dtypes.int32
) -> Tensor:
    """start, start + step, … up to but without stop: → (⌈(stop − start) / step⌉,)."""
    if stop is None:
        start, stop = 0, start
    bounds = (("start", start), ("stop", stop), ("step", step))
    start, stop, step = (integer_of("arange", f"the {label}", n) for label, n in bounds)
    if step == 0:
        raise ArgumentError("arange", "the step is 0", "Give a step up or down.")
    count = max(0, -(-(stop - start) // step))
    chosen = as_dtype(dtype)
    # An unsigned line may go down: it is counted in a type that holds the step.
    line = iota((count,), 0, dtypes.int64 if chosen.kind == "uint" else chosen)
    if step != 1:
        line = line * step
    return cast_to(line if start == 0 else line + start, chosen)


@takes_dim
def eye(n: int, m: int | None = None, dtype: object = dtypes.float32) -> Tensor:
    """Ones on the diagonal, zeros elsewhere: → (n, m)."""
    shape = (n, n if m is None else m)
    return cast_to(iota(shape, 0) == iota(shape, 1), as_dtype(dtype))


def tril(x: Operand, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two axes, zero above: (…, A, B) → (…, A, B)."""
    return _triangle("tril", as_tensor(x), diagonal, lower=True)


def triu(x: Operand, diagonal: int = 0) -> Tensor:
    """The upper triangle of the last two axes, zero below: (…, A, B) → (…, A, B)."""
    return _triangle("triu", as_tensor(x), diagonal, lower=False)


def _triangle(name: str, x: Tensor, diagonal: int, lower: bool) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(name, f"{x.type} has no two axes", "A triangle needs rows and columns.")
    column, row = iota(x.shape, -1), iota(x.shape, -2)
    kept = column <= row + diagonal if lower else row + diagonal <= column
    return where(kept, x, zeros_like(x))
