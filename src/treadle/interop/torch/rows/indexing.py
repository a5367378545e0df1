"""Rows of ops that take integers as places: gathers, scatters, embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from treadle.base.dtypes import bool_, int32, int64, promote
from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions import indexing as i
from treadle.frontend.functions import segments
from treadle.frontend.functions.arithmetic import eq, maximum, minimum, ne, stop_gradient, where
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import expand, iota, ones, reshape, unsqueeze, zeros
from treadle.frontend.tensor import Operand, Tensor
from treadle.interop.torch.rows.table import aten

Items = Sequence[Tensor | None]


@aten("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Tensor, indices: Items) -> Tensor:
    return i.getitem(x, tuple(slice(None) if t is None else t for t in indices))


@aten("index_put", "_unsafe_index_put")
def _index_put(x: Tensor, indices: Items, values: Tensor, accumulate: bool = False) -> Tensor:
    given = [t for t in indices if t is not None]
    if len(given) == 1 and given[0].dtype is bool_ and given[0] is indices[0]:
        return _masked_put(x, given[0], cast(values, x.dtype), accumulate)
    whole = reshape(iota((x.size,), 0, int32), x.shape)
    places = _index(whole, indices)
    updates = expand(cast(values, x.dtype), places.shape)
    return _written(x, places, updates, accumulate)


def _masked_put(x: Tensor, mask: Tensor, values: Tensor, accumulate: bool) -> Tensor:
    """x[mask] = values, of which there are as many as one row of x has, not one for each True."""
    wide = reshape(mask, (*mask.shape, *(1,) * (x.ndim - mask.ndim)))
    if values.ndim > x.ndim - mask.ndim and values.size != 1:
        raise ArgumentError(
            "from_module",
            f"index_put of {values.type} at a bool mask: how many are taken is not known before",
            "Write torch.where(mask, values, x) instead.",
        )
    row = reshape(values, ()) if values.size == 1 else values
    return where(wide, x + row if accumulate else row, x)


def _written(x: Tensor, places: Tensor, updates: Tensor, accumulate: bool) -> Tensor:
    """x with updates at places of its flattened elements."""
    flat, at, given = reshape(x, -1), reshape(places, -1), reshape(updates, -1)
    if accumulate:
        return reshape(i.scatter_add(flat, at, given), x.shape)
    return reshape(segments.scatter(flat, 0, at, given), x.shape)


def _places(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Where elements that an index along an axis names lie among the flattened ones of x."""
    wide = cast(index, promote(index.dtype, int32))
    at = dim % x.ndim
    total = wide * math.prod(x.shape[at + 1 :])
    for axis in range(x.ndim):
        if axis != at and index.shape[axis] > 1:
            total = total + iota(index.shape, axis, wide.dtype) * math.prod(x.shape[axis + 1 :])
    return total


@aten("gather")
def _gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    if not x.ndim:
        return expand(x, index.shape)
    at = dim % x.ndim
    cut = tuple(slice(None) if a == at else slice(n) for a, n in enumerate(index.shape))
    return i.take_along_axis(i.getitem(x, cut), index, at)


@aten("take_along_dim")
def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return i.take(reshape(x, -1), reshape(index, -1), 0)
    return i.take_along_axis(x, index, dim)


@aten("take")
def _take(x: Tensor, index: Tensor) -> Tensor:
    return i.take(reshape(x, -1), index, 0)


@aten("scatter.src", "scatter.value")
def _scatter(x: Tensor, dim: int, index: Tensor, source: Operand) -> Tensor:
    return _written(x, _places(x, dim, index), _cut(x, index, source), accumulate=False)


def _cut(x: Tensor, index: Tensor, source: Operand) -> Tensor:
    """As much of the source as there are indices."""
    given = cast(as_tensor(source), x.dtype)
    if not given.ndim:
        return expand(given, index.shape)
    return i.getitem(given, tuple(slice(n) for n in index.shape))


@aten("scatter_add")
def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _written(x, _places(x, dim, index), _cut(x, index, source), accumulate=True)


@aten("scatter_reduce.two")
def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    places, updates = _places(x, dim, index), _cut(x, index, source)
    counts = _written(zeros(x.shape, x.dtype), places, ones(updates.shape, x.dtype), True)
    if reduce in ("sum", "mean"):
        start = x if include_self else where(counts > 0, 0, x)
        total = _written(start, places, updates, accumulate=True)
        divisor = maximum(counts + 1 if include_self else counts, 1)
        return total if reduce == "sum" else total / divisor
    if reduce not in ("amax", "amin"):
        raise ArgumentError("from_module", f"scatter_reduce by {reduce!r}", "Sum, average, max.")
    extreme = segments.segment_max if reduce == "amax" else segments.segment_min
    combine = maximum if reduce == "amax" else minimum
    found = reshape(extreme(reshape(updates, -1), reshape(places, -1), x.size), x.shape)
    best = combine(x, found) if include_self else found
    return where(counts > 0, best, x)


@aten("index_select")
def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return i.take(x, reshape(index, -1), dim)


@aten("index_add")
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    updates = source if alpha == 1 else source * alpha
    return i.scatter_add(x, reshape(index, -1), cast(updates, x.dtype), dim)


@aten("index_copy")
def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    at = dim % x.ndim
    shape = [1] * x.ndim
    shape[at] = index.size
    return _scatter(x, at, expand(reshape(index, shape), source.shape), source)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    at, flat = dim % x.ndim, reshape(index, -1)
    hits = i.scatter_add(zeros((x.shape[at],), int32), flat, ones(flat.shape, int32))
    shape = [1] * x.ndim
    shape[at] = x.shape[at]
    return where(reshape(hits > 0, shape), cast(as_tensor(value), x.dtype), x)


@aten("embedding")
def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    rows = i.embedding(indices, weight)
    if padding_idx < 0:
        return rows
    # The row of the padding gets no gradient.
    return where(unsqueeze(eq(indices, padding_idx), -1), stop_gradient(rows), rows)


@aten("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor | None, ...]:
    """Sums (0), means (1) or maxima (2) of rows from each offset to the next."""
    bags = offsets.size - int(include_last_offset)
    line = iota((indices.size,), 0, offsets.dtype)
    bag = cast(segments.searchsorted(offsets, line, right=True), int32) - 1
    rows = i.embedding(indices, weight)
    counts = cast(ne(indices, padding_idx), weight.dtype)
    size = segments.segment_sum(counts, bag, bags)
    if mode == 2:
        least = where(unsqueeze(counts, -1) > 0, rows, -weight.dtype.largest)
        found = segments.segment_max(least, bag, bags)
        return where(unsqueeze(size, -1) > 0, found, 0.0), None, None, None
    factors = counts if per_sample_weights is None else counts * per_sample_weights
    total = segments.segment_sum(rows * unsqueeze(factors, -1), bag, bags)
    return total / unsqueeze(maximum(size, 1.0), -1) if mode == 1 else total, None, None, None


@aten("one_hot")
def _one_hot(indices: Tensor, classes: int = -1) -> Tensor:
    if classes < 0:
        raise ArgumentError(
            "from_module", "one_hot without a number of classes", "Give num_classes."
        )
    return i.one_hot(indices, classes, int64)


@aten("searchsorted.Tensor")
def _searchsorted(
    line: Tensor,
    values: Tensor,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Tensor:
    return segments.searchsorted(line, values, right or side == "right")


@aten("bucketize.Tensor")
def _bucketize(x: Tensor, line: Tensor, out_int32: bool = False, right: bool = False) -> Tensor:
    return segments.searchsorted(line, x, right)


@aten("isin.Tensor_Tensor")
def _isin(x: Tensor, among: Tensor, assume_unique: bool = False, invert: bool = False) -> Tensor:
    same = eq(unsqueeze(x, -1), reshape(among, -1))
    count = sum_over(same, -1, dtype=int32)
    return eq(count, 0) if invert else count > 0
