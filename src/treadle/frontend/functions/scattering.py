"""Elements written, added or reduced at places that are data, by PyTorch's names.

Where several are written to one place, the last of them stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import check_choice
from treadle.base.shapes import Shape, broadcast_shapes, size_of
from treadle.frontend.coerce import align, as_tensor, broadcast_to, constant
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import (
    eq,
    floor_divide,
    ge,
    isfinite,
    isnan,
    logical_and,
    logical_or,
    lt,
    maximum,
    minimum,
    stop_gradient,
    where,
)
from treadle.frontend.functions.indexing import scatter_add, take, wrapped
from treadle.frontend.functions.reductions import argsort, cumsum
from treadle.frontend.functions.segments import (
    is_last_of_run,
    segment_max,
    segment_min,
    segments_folded,
)
from treadle.frontend.functions.shaping import (
    axis_of,
    fitted,
    iota,
    number_of,
    reshape,
    slice_along,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


@takes_dim
def scatter_reduce(
    x: Operand,
    axis: int,
    index: Operand,
    src: Operand,
    reduce: str,
    include_self: bool = True,
) -> Tensor:
    """x with src reduced at one index along the axis for each, as torch.Tensor.scatter_reduce.

    x (A, C), index and src (n, C) → (A, C) for axis 0. Ties of extremes share the gradient evenly.
    """
    check_choice("scatter_reduce", "reduce", reduce, REDUCTIONS)
    x = as_tensor(x)
    places, updates = _places("scatter_reduce", x, axis, index, src)
    flat = reshape(x, (-1,))
    ones = constant(1, places.shape, dtypes.int32)
    count = scatter_add(constant(0, flat.shape, dtypes.int32), places, ones)
    is_kept = eq(count, 0) if not include_self else constant(True, flat.shape, dtypes.bool_)
    if reduce in ("amax", "amin"):
        found = _extremes(flat, places, updates, is_kept, reduce == "amax")
    elif reduce == "prod":
        product = lambda earlier, found, takes: where(takes, earlier * found, found)  # noqa: E731
        found = where(is_kept, flat, 1) * segments_folded(updates, places, flat.size, product, 1)
    else:
        found = scatter_add(where(is_kept, flat, 0), places, updates)
    if reduce == "mean":
        parts = maximum(count + int(include_self), 1)
        found = found / parts if x.dtype.is_float else floor_divide(found, parts)
    return reshape(cast_to(found, x.dtype), x.shape)


def _places(name: str, x: Tensor, axis: int, index: Operand, src: Operand) -> tuple[Tensor, Tensor]:
    """Positions among all elements of x, and what goes there: two vectors."""
    at, given, update = axis_of(name, axis, x), as_tensor(index), fitted(name, src, x)
    if not given.dtype.is_integer:
        raise DTypeError(name, f"the indices are {given.type}", "They are integers.")
    fits = given.ndim == x.ndim == update.ndim and all(
        n <= m and (n <= k or a == at)
        for a, (n, m, k) in enumerate(zip(given.shape, update.shape, x.shape, strict=True))
    )
    if not fits:
        raise ShapeError(
            name,
            f"indices {given.type} and src {update.type} for {x.type}",
            f"The indices fit into src, and into x but along axis {axis}.",
        )
    for a, n in enumerate(given.shape):
        update = slice_along(update, a, 0, n)
    wide = _wide_index(given, x.size)
    strides = _strides(x.shape)
    found = wide * strides[at]
    for a, n in enumerate(given.shape):
        if a != at and n > 1:
            found = found + iota(given.shape, a, wide.dtype) * strides[a]
    inside = logical_and(ge(wide, 0), lt(wide, x.shape[at]))
    return reshape(where(inside, found, x.size), (-1,)), reshape(update, (-1,))


def _strides(shape: Shape) -> list[int]:
    return list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]


def _wide_index(index: Tensor, size: int) -> Tensor:
    """In a dtype that holds positions among `size` elements."""
    least = dtypes.int64 if size >= 2**31 else dtypes.int32
    return cast_to(index, dtypes.promote(index.dtype, least))


def _extremes(
    flat: Tensor, places: Tensor, updates: Tensor, is_kept: Tensor, is_max: bool
) -> Tensor:
    own = flat if flat.dtype is not dtypes.bool_ else cast_to(flat, dtypes.int32)
    new = updates if own is flat else cast_to(updates, own.dtype)
    written = (segment_max if is_max else segment_min)(new, places, flat.size)
    better = (maximum if is_max else minimum)(own, written)
    found = stop_gradient(where(is_kept, better, written))
    if not own.dtype.is_float:
        return found
    # What is found is a number; its slope is shared by all that are equal to it.
    zeros = constant(0, own.shape, own.dtype)
    is_own = logical_and(is_kept, logical_and(eq(own, found), isfinite(own)))
    is_new = logical_and(eq(new, take(found, places)), isfinite(new))
    ties = scatter_add(cast_to(is_own, own.dtype), places, cast_to(is_new, own.dtype))
    moves = where(is_own, own - stop_gradient(own), 0)
    moved = scatter_add(moves, places, where(is_new, new - stop_gradient(new), 0))
    lost = scatter_add(zeros, places, cast_to(isnan(new), own.dtype))
    result = where(eq(ties, 0), found, found + moved / maximum(ties, 1))
    is_lost = logical_or(lost > 0, logical_and(is_kept, isnan(own)))
    return where(is_lost, math.nan, result)


@takes_dim
def index_add(x: Operand, axis: int, index: Operand, source: Operand, alpha: float = 1) -> Tensor:
    """x with alpha · source added at indices along an axis: `scatter_add` in PyTorch's order.

    x (A, C), index (n,), source (n, C) → (A, C) for axis 0.
    """
    factor = number_of("index_add", "alpha", alpha)
    update = as_tensor(source)
    return scatter_add(x, index, update if factor == 1 else update * alpha, axis)


@takes_dim
def index_copy(x: Operand, axis: int, index: Operand, source: Operand) -> Tensor:
    """x with entries of source written at indices along an axis.

    x (A, C), index (n,), source (n, C) → (A, C) for axis 0.
    """
    x, update = as_tensor(x), fitted("index_copy", source, as_tensor(x))
    at = axis_of("index_copy", axis, x)
    place = _line_of("index_copy", x, at, index)
    expected = (*x.shape[:at], place.shape[0], *x.shape[at + 1 :])
    if update.shape != expected:
        raise ShapeError(
            "index_copy",
            f"source {update.type} into {x.type} at indices {place.type}",
            f"It must be {expected}.",
        )
    return _written(x, place, update, at)


@takes_dim
def index_fill(x: Operand, axis: int, index: Operand, value: Operand) -> Tensor:
    """x with one value at indices along an axis: x (A, C), index (n,) → (A, C)."""
    x = as_tensor(x)
    at = axis_of("index_fill", axis, x)
    if not isinstance(value, (bool, int, float)) and as_tensor(value).ndim:
        raise ShapeError("index_fill", f"the value is {as_tensor(value).type}", "Give a number.")
    place = _line_of("index_fill", x, at, index)
    ones = constant(1, place.shape, dtypes.int32)
    count = scatter_add(constant(0, (x.shape[at],), dtypes.int32), place, ones)
    is_filled = reshape(count > 0, (-1, *(1,) * (x.ndim - at - 1)))
    return where(is_filled, cast_to(as_tensor(value), x.dtype), x)


def index_put(
    x: Operand, indices: Sequence[Operand], values: Operand, accumulate: bool = False
) -> Tensor:
    """x with values written at x[indices], or added if `accumulate`: x[indices] = values.

    The indices are of the first axes and broadcast together: integers, or one mask of them, with a
    single value if it is known only when the program runs.

    Shapes: x (A, B, C), two indices (n,), values (n, C) → (A, B, C).
    """
    x = as_tensor(x)
    update = fitted("index_put", values, x)
    given = list(indices) if isinstance(indices, Sequence) else [indices]
    tensors = [as_tensor(i) for i in given]
    if len(tensors) == 1 and tensors[0].dtype is dtypes.bool_:
        return _masked_put(x, tensors[0], update, accumulate)
    if not tensors or len(tensors) > x.ndim or any(t.dtype is dtypes.bool_ for t in tensors):
        raise ArgumentError(
            "index_put",
            f"indices {[str(t.type) for t in tensors]} for {x.type}",
            "Give a tensor of integers for each of the first axes, or one mask.",
        )
    count = len(tensors)
    sizes, rest = x.shape[:count], x.shape[count:]
    places = align("index_put", *(wrapped(x, a, t, "index_put") for a, t in enumerate(given)))
    linear: Tensor = _wide_index(places[0], x.size)
    inside = logical_and(ge(places[0], 0), lt(places[0], sizes[0]))
    for place, n in zip(places[1:], sizes[1:], strict=True):
        linear = linear * n + place
        inside = logical_and(inside, logical_and(ge(place, 0), lt(place, n)))
    flat = reshape(x, (size_of(sizes), *rest))
    line = reshape(where(inside, linear, size_of(sizes)), (-1,))
    shape = (*places[0].shape, *rest)
    if broadcast_shapes(update.shape, shape) != shape:
        raise ShapeError(
            "index_put", f"values {update.type} at {shape}", "Values broadcast to what is written."
        )
    spread = reshape(broadcast_to(update, shape), (line.shape[0], *rest))
    found = scatter_add(flat, line, spread) if accumulate else _written(flat, line, spread, 0)
    return reshape(found, x.shape)


def _masked_put(x: Tensor, mask: Tensor, update: Tensor, accumulate: bool) -> Tensor:
    if mask.ndim > x.ndim or mask.shape != x.shape[: mask.ndim]:
        raise ShapeError(
            "index_put", f"a mask {mask.type} for {x.type}", "It has the sizes of the first axes."
        )
    rest = x.shape[mask.ndim :]
    is_set = reshape(mask, (*mask.shape, *(1,) * len(rest)))
    if update.ndim > len(rest) and update.shape[0] == 1:
        update = reshape(update, update.shape[1:])
    if broadcast_shapes(update.shape, rest) == rest:
        return where(is_set, x + update if accumulate else update, x)
    if update.ndim != len(rest) + 1 or accumulate:
        raise ShapeError(
            "index_put",
            f"values {update.type} where a mask {mask.type} is set",
            "Give one value, or one for each place in order.",
        )
    return masked_scatter(x, is_set, broadcast_to(update, (update.shape[0], *rest)))


def masked_scatter(x: Operand, mask: Operand, source: Operand) -> Tensor:
    """x with the elements of source, in order, where the mask is set.

    x and mask (A, B), source (n,) → (A, B). Source has as many elements as places are set, or more.
    """
    x = as_tensor(x)
    flags, update = as_tensor(mask), as_tensor(source)
    if flags.dtype is not dtypes.bool_:
        raise DTypeError("masked_scatter", f"the mask is {flags.type}", "Compare first: x > 0.")
    if update.dtype is not x.dtype:
        raise DTypeError(
            "masked_scatter", f"source is {update.type}, x is {x.type}", "Cast one of them."
        )
    shape = broadcast_shapes(x.shape, flags.shape)
    if shape is None:
        raise ShapeError(
            "masked_scatter", f"a mask {flags.type} for {x.type}", "They broadcast together."
        )
    value, line = broadcast_to(x, shape), reshape(update, (-1,))
    is_set = reshape(broadcast_to(flags, shape), (-1,))
    if not line.size:
        if value.size == 0:
            return value
        line = constant(0, (1,), x.dtype)
    rank = cumsum(cast_to(is_set, dtypes.int32), 0, dtype=dtypes.int32) - 1
    new = take(line, where(is_set, rank, 0))
    return where(broadcast_to(flags, shape), reshape(new, shape), value)


def _line_of(name: str, x: Tensor, axis: int, index: Operand) -> Tensor:
    """A vector of places along an axis, negative ones counted from the end."""
    place = wrapped(x, axis, index, name)
    if place.ndim > 1:
        raise ShapeError(name, f"the indices are {place.type}", "Give a vector.")
    return reshape(place, (-1,))


def _written(x: Tensor, index: Tensor, update: Tensor, axis: int) -> Tensor:
    """x with entries of an update along an axis; the last of those with one index stays."""
    if not index.shape[0]:
        return x
    numeric = dtypes.int32 if x.dtype is dtypes.bool_ else x.dtype
    new = cast_to(update, numeric)
    order = argsort(index, 0)
    own = take(index, order)
    is_last = is_last_of_run(own)
    trailing = (-1, *(1,) * (x.ndim - axis - 1))
    ordered = where(reshape(is_last, trailing), take(new, order, axis), 0)
    total = scatter_add(constant(0, x.shape, numeric), own, ordered, axis)
    found = constant(0, (x.shape[axis],), dtypes.int32)
    is_written = scatter_add(found, own, cast_to(is_last, dtypes.int32)) > 0
    return where(reshape(is_written, trailing), cast_to(total, x.dtype), x)
