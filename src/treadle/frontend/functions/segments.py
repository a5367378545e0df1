"""Scattering, and reductions of elements by the segment they belong to."""

from __future__ import annotations

from collections.abc import Callable

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import check_choice
from treadle.base.shapes import inverse_permutation, size_of
from treadle.frontend.coerce import as_tensor, broadcast_to, constant
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import (
    eq,
    exp,
    ge,
    gt,
    isnan,
    le,
    logical_and,
    logical_not,
    logical_or,
    lt,
    maximum,
    ne,
    stop_gradient,
    where,
)
from treadle.frontend.functions.indexing import scatter_add, take
from treadle.frontend.functions.reductions import argsort, cumsum
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.sequences import extreme
from treadle.frontend.functions.shaping import (
    axis_of,
    concat,
    fitted,
    full,
    integer_of,
    iota,
    permute,
    reshape,
    slice_along,
    unsqueeze,
    zeros,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor


def _flat(name: str, x: Tensor, index: Operand, updates: Operand, axis: int) -> tuple[Tensor, ...]:
    """Operands with the axis last, flattened, and indices into the whole."""
    at, given, update = axis_of(name, axis, x), as_tensor(index), fitted(name, updates, x)
    if not given.dtype.is_integer:
        raise DTypeError(name, f"the indices are {given.type}", "They are integers.")
    if update.ndim == 0:
        update = broadcast_to(update, given.shape)
    fits = given.ndim == x.ndim and given.shape == update.shape
    others = [(n, m) for a, (n, m) in enumerate(zip(x.shape, given.shape, strict=False)) if a != at]
    if not fits or any(n != m for n, m in others):
        raise ShapeError(
            name,
            f"indices {given.type} and updates {update.type} for {x.type}",
            f"Both have x's sizes, but along axis {axis}.",
        )
    order = (*(a for a in range(x.ndim) if a != at), at)
    rows = size_of([n for a, n in enumerate(x.shape) if a != at])
    wide = cast_to(given, dtypes.promote(given.dtype, dtypes.int32))
    places = reshape(permute(wide, order), (rows, given.shape[at]))
    flat = reshape(places + iota((rows, 1), 0, wide.dtype) * x.shape[at], (-1,))
    return reshape(permute(x, order), (-1,)), flat, reshape(permute(update, order), (-1,))


def _back(flat: Tensor, x: Tensor, axis: int) -> Tensor:
    at = axis % x.ndim
    order = (*(a for a in range(x.ndim) if a != at), at)
    moved = reshape(flat, tuple(x.shape[a] for a in order))
    return permute(moved, inverse_permutation(order))


@takes_dim
def scatter_add_along(x: Operand, axis: int, index: Operand, src: Operand) -> Tensor:
    """x with src added at one index along the axis for each, as torch.Tensor.scatter_add.

    x (A, C), index and src (n, C) → (A, C) for axis 0.
    """
    x = as_tensor(x)
    flat, places, updates = _flat("scatter_add_along", x, index, src, axis)
    return _back(scatter_add(flat, places, updates), x, axis)


@takes_dim
def scatter(x: Operand, axis: int, index: Operand, src: Operand) -> Tensor:
    """x with src written at one index along the axis for each, as torch.Tensor.scatter.

    x (A, C), index and src (n, C) → (A, C) for axis 0.

    Where several are written to one place it is their mean, which is none of them.
    """
    x = as_tensor(x)
    flat, places, updates = _flat("scatter", x, index, src, axis)
    empty = constant(0, flat.shape, flat.dtype)
    total = scatter_add(empty, places, updates)
    ones = constant(1, updates.shape, flat.dtype)
    count = scatter_add(empty, places, ones)
    mean = total / maximum(count, 1) if x.dtype.is_float else total // maximum(count, 1)
    return _back(where(count > 0, mean, flat), x, axis)


@takes_dim
def scatter_max(x: Operand, axis: int, index: Operand, src: Operand) -> Tensor:
    """x with the greatest of itself and what src has for an index, along the axis.

    x (A, C), index and src (n, C) → (A, C) for axis 0.
    """
    x = as_tensor(x)
    flat, places, updates = _flat("scatter_max", x, index, src, axis)
    return _back(maximum(flat, segment_max(updates, places, flat.size)), x, axis)


def bincount(x: Operand, size: int, weights: Operand | None = None) -> Tensor:
    """How often each of 0 … size − 1 occurs, or the sum of its weights: (n,) → (size,)."""
    index = as_tensor(x)
    count = _size("bincount", size)
    if index.ndim != 1 or not index.dtype.is_integer:
        raise ShapeError("bincount", f"{index.type}", "It is a vector of integers.")
    if weights is None:
        ones = constant(1, index.shape, dtypes.int32)
        return scatter_add(constant(0, (count,), dtypes.int32), index, ones)
    given = as_tensor(weights)
    return scatter_add(zeros((count,), given.dtype), index, given)


def _size(name: str, size: int) -> int:
    count = integer_of(name, "the number of segments", size)
    if count < 1:
        raise ArgumentError(name, f"{count} segments", "Give 1 or more: shapes are static.")
    return count


# Segments


def _segments(name: str, x: Operand, segments: Operand, count: int) -> tuple[Tensor, Tensor, int]:
    value, index = as_tensor(x), as_tensor(segments)
    if index.ndim != 1 or value.ndim == 0 or value.shape[0] != index.shape[0]:
        raise ShapeError(
            name,
            f"x is {value.type}, the segments {index.type}",
            "There is one segment for each entry of the first axis.",
        )
    if not index.dtype.is_integer:
        raise DTypeError(name, f"the segments are {index.type}", "They are integers.")
    return value, index, _size(name, count)


def segment_sum(x: Operand, segments: Operand, count: int) -> Tensor:
    """The sum of each segment's entries, 0 of none: x (n, …), segments (n,) → (count, …)."""
    value, index, n = _segments("segment_sum", x, segments, count)
    return scatter_add(zeros((n, *value.shape[1:]), value.dtype), index, value)


def segment_mean(x: Operand, segments: Operand, count: int) -> Tensor:
    """The mean of each segment's entries, 0 of none: x (n, …), segments (n,) → (count, …)."""
    value, index, n = _segments("segment_mean", x, segments, count)
    ones = constant(1, index.shape, value.dtype)
    amount = maximum(scatter_add(zeros((n,), value.dtype), index, ones), 1)
    return segment_sum(value, index, n) / reshape(amount, (n, *(1,) * (value.ndim - 1)))


def segment_max(x: Operand, segments: Operand, count: int) -> Tensor:
    """The greatest of each segment's entries: x (n, …), segments (n,) → (count, …).

    Empty segments have the least number of the dtype, −∞ for floats.

    Entries are sorted by segment, then spans of 1, 2, 4, … entries are compared.
    """
    return _segment_extreme("segment_max", x, segments, count, is_max=True)


def segment_min(x: Operand, segments: Operand, count: int) -> Tensor:
    """The least of each segment's entries: x (n, …), segments (n,) → (count, …).

    Empty segments have the greatest number of the dtype, ∞ for floats.
    """
    return _segment_extreme("segment_min", x, segments, count, is_max=False)


def _segment_extreme(name: str, x: Operand, segments: Operand, count: int, is_max: bool) -> Tensor:
    value, index, n = _segments(name, x, segments, count)

    def better(earlier: Tensor, found: Tensor, takes: Tensor) -> Tensor:
        is_better = lt(found, earlier) if is_max else lt(earlier, found)
        if value.dtype.is_float:  # NaN stays
            is_better = logical_or(is_better, isnan(earlier))
        return where(logical_and(takes, is_better), earlier, found)

    return segments_folded(value, index, n, better, extreme(value.dtype, not is_max))


def segments_folded(
    value: Tensor, index: Tensor, n: int, fold: Callable[..., Tensor], empty: float
) -> Tensor:
    """Each segment's entries folded: (m, …), segments (m,) → (n, …).

    Entries are sorted by segment, then spans of 1, 2, 4, … are folded. `fold(earlier, found,
    takes)` is `found`, with the earlier entries where `takes`.
    """
    if not value.shape[0]:
        return full((n, *value.shape[1:]), empty, value.dtype)
    order = argsort(index, 0)
    own, found = take(index, order), take(value, order, 0)
    span, length = 1, value.shape[0]
    trailing = (1,) * (value.ndim - 1)
    # As many segments as values: kernels then compare both element by element.
    spread = broadcast_to(reshape(own, (length, *trailing)), value.shape)
    while span < length:
        earlier, same = (
            concat([slice_along(x, 0, 0, span), slice_along(x, 0, 0, length - span)], 0)
            for x in (found, spread)
        )
        is_inside = ge(iota(value.shape, 0, dtypes.int32), span)
        found = fold(earlier, found, logical_and(is_inside, eq(same, spread)))
        span *= 2
    # How many entries there are up to a segment's last one: 0 where it has none.
    counted = where(is_last_of_run(own), iota((length,), 0, dtypes.int32) + 1, 0)
    ends = scatter_add(constant(0, (n,), dtypes.int32), own, counted)
    is_empty = reshape(le(ends, 0), (n, *trailing))
    return where(is_empty, empty, take(found, maximum(ends - 1, 0), 0))


def is_last_of_run(x: Tensor) -> Tensor:
    """Whether the next element of a sorted vector is another one: (n,) → (n,)."""
    end = constant(True, (1,), dtypes.bool_)
    return concat([ne(x[1:], x[: x.shape[0] - 1]), end], 0)


def segment_softmax(x: Operand, segments: Operand, count: int) -> Tensor:
    """softmax over the entries of each segment: x (n, …), segments (n,) → (n, …).

    It is the attention over a graph's edges, a segment being what leads to one node.
    """
    value, index, n = _segments("segment_softmax", x, segments, count)
    top = stop_gradient(segment_max(value, index, n))
    weights = exp(value - take(top, index, 0))
    return weights / take(segment_sum(weights, index, n), index, 0)


# Searching


@takes_dim(sorted_sequence="sorted")
def searchsorted(
    sorted: Operand, values: Operand, right: bool = False, side: str | None = None
) -> Tensor:
    """Where values would go into a sorted vector to keep it sorted, as int32: → values' shape.

    `right`, or `side="right"`, puts them after equal ones.
    """
    if side is not None:
        check_choice("searchsorted", "side", side, ("left", "right"))
        if right and side == "left":
            raise ArgumentError("searchsorted", 'right=True with side="left"', "Give one of them.")
        right = side == "right"
    line, given = as_tensor(sorted), as_tensor(values)
    if line.ndim != 1:
        raise ShapeError("searchsorted", f"{line.type} is no vector", "Give a sorted vector.")
    each = unsqueeze(given, -1)
    if line.dtype.is_float or given.dtype.is_float:  # NaN comes last, as in PyTorch
        before = logical_not(gt(line, each) if right else ge(line, each))
    else:
        before = le(line, each) if right else lt(line, each)
    return sum_of(before, -1, dtype=dtypes.int32)


@takes_dim
def nonzero(x: Operand, size: int, fill: int = 0) -> Tensor:
    """Indices of the elements of a vector that are not 0, the first `size` of them: (n,) → (size,).

    The number is not known before a program runs: what is left is `fill`.
    """
    value = as_tensor(x)
    count = _size("nonzero", size)
    if value.ndim != 1:
        raise ShapeError("nonzero", f"{value.type}", "It is a vector: reshape(-1) comes first.")
    is_set = cast_to(value != 0 if value.dtype is not dtypes.bool_ else value, dtypes.int32)
    rank = cumsum(is_set, 0, dtype=dtypes.int32) - 1
    is_kept = logical_and(is_set > 0, rank < count)
    # Ranks are distinct, so that each place is written once; the rest goes to one place beyond.
    places = where(is_kept, rank, count)
    index = iota(value.shape, 0)
    found = scatter_add(constant(0, (count + 1,), dtypes.int32), places, index)
    is_there = iota((count,), 0) < sum_of(is_set, dtype=dtypes.int32)
    return where(is_there, slice_along(found, 0, 0, count), fill)
