"""Running products and maxima, lines of numbers, diagonals and repeated elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend.coerce import as_tensor, broadcast_to, constant
from treadle.frontend.functions.arithmetic import logical_or, where
from treadle.frontend.functions.elementary import logaddexp
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.reductions import accumulated
from treadle.frontend.functions.shaping import (
    axis_of,
    concat,
    integer_of,
    iota,
    moveaxis,
    number_of,
    permute,
    reshape,
    slice_along,
    unsqueeze,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.types import as_dtype

State = tuple[Tensor, ...]


def _doubled(x: State, axis: int, combine: Callable[[State, State], State], none: State) -> State:
    """Running results along an axis: spans of 1, 2, 4, … elements are combined.

    `none` is what leaves the other unchanged, for what lies before the first.
    """
    n, span = x[0].shape[axis], 1
    while span < n:
        earlier = tuple(_later(t, axis, span, e) for t, e in zip(x, none, strict=True))
        x = combine(earlier, x)
        span *= 2
    return x


def _later(x: Tensor, axis: int, by: int, fill: Tensor) -> Tensor:
    """Moved towards the end, something else coming in."""
    shape = (*x.shape[:axis], by, *x.shape[axis + 1 :])
    return concat([broadcast_to(fill, shape), slice_along(x, axis, 0, x.shape[axis] - by)], axis)


@takes_dim
def cumprod(x: Operand, axis: int, dtype: object = None) -> Tensor:
    """Running products along an axis; gradients are right with zeros among the factors.

    The shape stays. Those of integers and bool are int64, as PyTorch's. `dtype` casts x first.
    """
    wide = accumulated(x, dtype)
    at = axis_of("cumprod", axis, wide)
    one = (constant(1, (), wide.dtype),)
    return _doubled((wide,), at, lambda a, b: (a[0] * b[0],), one)[0]


@takes_dim
def cummax(x: Operand, axis: int) -> tuple[Tensor, Tensor]:
    """Running maxima along an axis, and the index of the last as great, both of x's shape."""
    return _running("cummax", x, axis, is_max=True)


@takes_dim
def cummin(x: Operand, axis: int) -> tuple[Tensor, Tensor]:
    """Running minima along an axis, and the index of the last as small, both of x's shape."""
    return _running("cummin", x, axis, is_max=False)


def _running(name: str, x: Operand, axis: int, is_max: bool) -> tuple[Tensor, Tensor]:
    x = as_tensor(x)
    at = axis_of(name, axis, x)
    worst = extreme(x.dtype, not is_max)

    def combine(earlier: State, later: State) -> State:
        (a, i), (b, j) = earlier, later
        stays = (b >= a) if is_max else (b <= a)
        stays = logical_or(stays, b != b)  # NaN stays
        stays = stays & (a == a)
        return where(stays, b, a), where(stays, j, i)

    none = constant(worst, (), x.dtype), constant(0, (), dtypes.int32)
    values, indices = _doubled((x, iota(x.shape, at)), at, combine, none)
    return values, indices


def extreme(dtype: dtypes.DType, is_max: bool) -> float:
    """The greatest or the least number of a dtype."""
    if dtype.is_float:
        return math.inf if is_max else -math.inf
    return dtype.range()[1 if is_max else 0]


@takes_dim
def logcumsumexp(x: Operand, axis: int) -> Tensor:
    """log of the running sums of eˣ along an axis, without overflow. The shape stays."""
    x = as_tensor(x)
    at = axis_of("logcumsumexp", axis, x)
    none = (constant(-math.inf, (), x.dtype),)
    return _doubled((x,), at, lambda a, b: (logaddexp(a[0], b[0]),), none)[0]


# Lines


@takes_dim
def linspace(start: float, end: float, steps: int, dtype: object = dtypes.float32) -> Tensor:
    """Evenly spaced values from start to end, both included: → (steps,)."""
    count = _steps("linspace", steps)
    a, b = number_of("linspace", "start", start), number_of("linspace", "end", end)
    return as_tensor(np.linspace(a, b, count).astype(as_dtype(dtype).numpy))


def _steps(name: str, steps: int) -> int:
    count = integer_of(name, "steps", steps)
    if count < 0:
        raise ArgumentError(name, f"{count} steps", "Give 0 or more.")
    return count


@takes_dim
def logspace(
    start: float, end: float, steps: int, base: float = 10.0, dtype: object = dtypes.float32
) -> Tensor:
    """Values from baseˢᵗᵃʳᵗ to baseᵉⁿᵈ, evenly spaced in their logarithm: → (steps,)."""
    count, root = _steps("logspace", steps), number_of("logspace", "base", base)
    a, b = number_of("logspace", "start", start), number_of("logspace", "end", end)
    return as_tensor(np.logspace(a, b, count, base=root).astype(as_dtype(dtype).numpy))


def meshgrid(*tensors: Operand, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Vectors along axes of their own, repeated along the others: (n,), (m,) → two of (n, m).

    They may be given as one list.
    """
    if indexing not in ("ij", "xy"):
        raise ArgumentError("meshgrid", f"indexing is {indexing!r}", 'Use "ij" or "xy".')
    listed = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    given = [as_tensor(t) for t in listed]
    if any(t.ndim > 1 for t in given):
        raise ShapeError("meshgrid", f"{[str(t.type) for t in given]}", "They are vectors.")
    order = list(range(len(given)))
    if indexing == "xy" and len(given) > 1:
        order[:2] = [1, 0]
    lengths = [max(1, t.size) for t in given]
    shape = tuple(lengths[i] for i in order)
    found = []
    for i, t in enumerate(given):
        place = order.index(i)
        own = (*(1,) * place, t.size, *(1,) * (len(given) - place - 1))
        found.append(broadcast_to(reshape(t, own), shape))
    return tuple(found)


# Diagonals


def outer(x: Operand, y: Operand) -> Tensor:
    """All products of elements of two vectors: (n,), (m,) → (n, m)."""
    a, b = as_tensor(x), as_tensor(y)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError("outer", f"{a.type} and {b.type}", "Both are vectors.")
    return unsqueeze(a, 1) * unsqueeze(b, 0)


def kron(x: Operand, y: Operand) -> Tensor:
    """Each element of x times all of y (Kronecker): (A, B), (A′, B′) → (A · A′, B · B′)."""
    a, b = as_tensor(x), as_tensor(y)
    rank = max(a.ndim, b.ndim)
    first, second = ((1,) * (rank - t.ndim) + t.shape for t in (a, b))
    left = reshape(a, tuple(n for size in first for n in (size, 1)))
    right = reshape(b, tuple(n for size in second for n in (1, size)))
    return reshape(left * right, tuple(p * q for p, q in zip(first, second, strict=True)))


@takes_dim(dim1="axis1", dim2="axis2")
def diagonal(x: Operand, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The diagonal of two axes, as the last axis: (A, B, C) → (C, min(A, B)) without an offset."""
    x, shift = as_tensor(x), integer_of("diagonal", "offset", offset)
    i, j = axis_of("diagonal", axis1, x), axis_of("diagonal", axis2, x)
    if i == j:
        raise ShapeError("diagonal", f"axes {axis1} and {axis2} are one", "Name two axes.")
    rows, columns = x.shape[i], x.shape[j]
    start_row, start_column = max(0, -shift), max(0, shift)
    count = max(0, min(rows - start_row, columns - start_column))
    rest = [a for a in range(x.ndim) if a not in (i, j)]
    moved = permute(x, (*rest, i, j))
    flat = reshape(moved, (*(x.shape[a] for a in rest), rows * columns))
    first = start_row * columns + start_column
    if not count:
        return slice_along(flat, len(rest), 0, 0)
    return slice_along(flat, len(rest), first, first + (count - 1) * (columns + 1) + 1, columns + 1)


def diag(x: Operand, offset: int = 0) -> Tensor:
    """A matrix with a vector on its diagonal, or a matrix's diagonal: (n,) → (n, n), or back."""
    x = as_tensor(x)
    if x.ndim == 2:
        return diagonal(x, offset)
    if x.ndim != 1:
        raise ShapeError("diag", f"{x.type}", "It is a vector or a matrix.")
    return diag_embed(x, offset)


@takes_dim(dim1="axis1", dim2="axis2")
def diag_embed(x: Operand, offset: int = 0, axis1: int = -2, axis2: int = -1) -> Tensor:
    """Matrices with the last axis on their diagonal: (…, n) → (…, n + |offset|, n + |offset|).

    `axis1` and `axis2` are where the rows and columns are in the result.
    """
    x, shift = as_tensor(x), integer_of("diag_embed", "offset", offset)
    if x.ndim == 0:
        raise ShapeError("diag_embed", f"{x.type}", "It has an axis.")
    ends = [axis_of("diag_embed", axis, x, extra=1) for axis in (axis1, axis2)]
    if ends[0] == ends[1]:
        raise ShapeError("diag_embed", f"axes {axis1} and {axis2} are one", "Name two axes.")
    n, n_all = x.shape[-1], x.shape[-1] + abs(shift)
    low = max(0, -shift)
    on_line = iota((n_all, n_all), 1) - iota((n_all, n_all), 0) == shift
    # Element (i, j) of the line is entry i − low.
    entries = np.clip(np.arange(n_all) - low, 0, max(0, n - 1)).astype(np.int32)
    found = where(on_line, unsqueeze(take(x, entries, -1), -1), constant(0, (), x.dtype))
    return moveaxis(found, (-2, -1), ends)


# Repeats


@takes_dim
def repeat_interleave(x: Operand, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
    """Each element of an axis a number of times, one after the other: (n,) → (n · repeats,)."""
    x = as_tensor(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    at = axis_of("repeat_interleave", axis, x)
    n = x.shape[at]
    if isinstance(repeats, Sequence):
        counts = [integer_of("repeat_interleave", "a count", r) for r in repeats]
        if len(counts) != n or min(counts, default=0) < 0:
            raise ShapeError(
                "repeat_interleave", f"{counts} for {n} elements", "Give one count for each."
            )
        return take(x, np.repeat(np.arange(n), counts).astype(np.int32), at)
    times = integer_of("repeat_interleave", "repeats", repeats)
    if times < 0:
        raise ArgumentError("repeat_interleave", f"{times} times", "Give 0 or more.")
    spread = broadcast_to(unsqueeze(x, at + 1), (*x.shape[: at + 1], times, *x.shape[at + 1 :]))
    return reshape(spread, (*x.shape[:at], n * times, *x.shape[at + 1 :]))
