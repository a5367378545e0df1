"""Gathers and scatters. A negative index counts from the end."""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor, broadcast_to
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import segments
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.indexing import scatter_add, take, take_along_axis
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator

REDUCTIONS = ("none", "add", "mul", "max", "min")


def wrapped(call: Call, indices: Value, size: int) -> Tensor:
    """Indices from 0 on."""
    if isinstance(indices, np.ndarray):
        if indices.dtype.kind not in "iu":
            raise call.refuse(f"indices are {indices.dtype}")
        if indices.size and not -size <= indices.min() <= indices.max() < size:
            raise call.refuse(f"indices {indices.min()} … {indices.max()} of {size}")
        return as_tensor(np.where(indices < 0, indices + size, indices).astype(indices.dtype))
    index = as_tensor(indices)
    return a.where(index < 0, index + size, index)


@operator("Gather")
def _gather(call: Call, x: Value, indices: Value) -> Tensor:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", 0), tensor.ndim)
    return take(tensor, wrapped(call, indices, tensor.shape[axis]), axis)


@operator("GatherElements")
def _gather_elements(call: Call, x: Value, indices: Value) -> Tensor:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", 0), tensor.ndim)
    index = wrapped(call, indices, tensor.shape[axis])
    if index.ndim != tensor.ndim:
        raise call.refuse(f"indices {index.type} for {tensor.type}")
    for i, n in enumerate(index.shape):
        if i != axis:
            tensor = s.slice_along(tensor, i, 0, n)
    return take_along_axis(tensor, index, axis)


def _places(call: Call, indices: Value, sizes: Shape) -> Tensor:
    """Rows of indices (…, len(sizes)) as numbers of elements of an array of these sizes."""
    if isinstance(indices, np.ndarray):
        columns: list[Value] = [indices[..., i] for i in range(len(sizes))]
    else:
        columns = [as_tensor(indices)[..., i] for i in range(len(sizes))]
    total = None
    for i, n in enumerate(sizes):
        stride = math.prod(sizes[i + 1 :])
        part = cast_to(wrapped(call, columns[i], n), dtypes.int64) * stride
        total = part if total is None else total + part
    assert total is not None
    return total


@operator("GatherND")
def _gather_nd(call: Call, x: Value, indices: Value) -> Tensor:
    tensor, batch = as_tensor(x), call.integer("batch_dims", 0)
    shape = as_tensor(indices).shape
    if not shape or not 0 <= batch < min(len(shape), tensor.ndim):
        raise call.refuse(f"indices {shape} for {tensor.type} with {batch} batch axes")
    depth = shape[-1]
    if not 1 <= depth <= tensor.ndim - batch or shape[:batch] != tensor.shape[:batch]:
        raise call.refuse(f"indices {shape} for {tensor.type} with {batch} batch axes")
    lead, sizes = math.prod(tensor.shape[:batch]), tensor.shape[batch : batch + depth]
    places = s.reshape(_places(call, indices, sizes), (lead, math.prod(shape[batch:-1])))
    count = math.prod(sizes)
    flat = places + s.iota((lead, 1), 0, dtypes.int64) * count
    rest = tensor.shape[batch + depth :]
    rows = s.reshape(tensor, (lead * count, *rest))
    return s.reshape(take(rows, flat), (*shape[:-1], *rest))


def scattered(x: Tensor, places: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    """A vector, or rows of one, with updates at some places."""
    if reduction == "add":
        return scatter_add(x, places, updates)
    if reduction == "mul":
        return x * segments.segments_folded(updates, places, x.shape[0], _product, 1)
    hits = scatter_add(
        s.zeros((x.shape[0],), dtypes.int32), places, s.ones(places.shape, dtypes.int32)
    )
    is_hit = s.reshape(hits > 0, (x.shape[0], *(1,) * (x.ndim - 1)))
    if reduction == "none":
        # The last of several, as runtimes write them one after the other.
        order = s.iota(places.shape, 0)
        last = segments.segment_max(order, places, x.shape[0])
        chosen = a.where(hits > 0, last, 0)
        return a.where(is_hit, take(updates, chosen), x) if updates.shape[0] else x
    function = segments.segment_max if reduction == "max" else segments.segment_min
    combine = a.maximum if reduction == "max" else a.minimum
    extreme = function(updates, places, x.shape[0])
    return a.where(is_hit, combine(x, extreme), x)


def _product(earlier: Tensor, found: Tensor, takes: Tensor) -> Tensor:
    return a.where(takes, earlier * found, found)


@operator("ScatterND")
def _scatter_nd(call: Call, x: Value, indices: Value, updates: Value) -> Tensor:
    tensor, update = as_tensor(x), as_tensor(updates)
    shape = as_tensor(indices).shape
    if not shape or not 1 <= shape[-1] <= tensor.ndim:
        raise call.refuse(f"indices {shape} for {tensor.type}")
    sizes, rest = tensor.shape[: shape[-1]], tensor.shape[shape[-1] :]
    if update.shape != (*shape[:-1], *rest):
        raise call.refuse(f"updates {update.type} at indices {shape} of {tensor.type}")
    count = math.prod(shape[:-1])
    places = s.reshape(_places(call, indices, sizes), (count,))
    rows = s.reshape(tensor, (math.prod(sizes), *rest))
    reduction = call.choice("reduction", "none", REDUCTIONS)
    found = scattered(rows, places, s.reshape(update, (count, *rest)), reduction)
    return s.reshape(found, tensor.shape)


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: Call, x: Value, indices: Value, updates: Value) -> Tensor:
    tensor, update = as_tensor(x), as_tensor(updates)
    axis = call.axis(call.integer("axis", 0), tensor.ndim)
    index = cast_to(wrapped(call, indices, tensor.shape[axis]), dtypes.int64)
    if index.ndim != tensor.ndim or update.shape != index.shape:
        raise call.refuse(f"updates {update.type} at indices {index.type} of {tensor.type}")
    flat = s.zeros(index.shape, dtypes.int64)
    for i in range(tensor.ndim):
        stride = math.prod(tensor.shape[i + 1 :])
        line = index if i == axis else s.iota(index.shape, i, dtypes.int64)
        flat = flat + line * stride
    vector = s.reshape(tensor, (tensor.size,))
    count = (index.size,)
    reduction = call.choice("reduction", "none", REDUCTIONS)
    found = scattered(vector, s.reshape(flat, count), s.reshape(update, count), reduction)
    return s.reshape(found, tensor.shape)


@operator("TensorScatter")
def _tensor_scatter(call: Call, x: Value, update: Value, starts: Value = None) -> Tensor:
    """A part of a cache written from a place on, of each row of the batch its own."""
    cache, new = as_tensor(x), as_tensor(update)
    axis = call.axis(call.integer("axis", -2), cache.ndim)
    is_circular = call.choice("mode", "linear", ("linear", "circular")) == "circular"
    n, size, count = cache.shape[0], cache.shape[axis], new.shape[axis]
    first = (
        s.zeros((n,), dtypes.int64) if starts is None else cast_to(as_tensor(starts), dtypes.int64)
    )
    shape = tuple(n if i == 0 else size if i == axis else 1 for i in range(cache.ndim))
    offset = s.iota((n, size), 1, dtypes.int64) - s.unsqueeze(first, 1)
    if is_circular:
        offset = a.remainder(offset, size)
    is_new = s.reshape(a.logical_and(offset >= 0, offset < count), shape)
    places = s.reshape(a.clamp(offset, 0, max(0, count - 1)), shape)
    wide = broadcast_to(places, cache.shape)
    return a.where(is_new, take_along_axis(new, wide, axis), cache)
