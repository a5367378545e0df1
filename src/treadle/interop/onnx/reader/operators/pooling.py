"""Pools, norms and resizing of images."""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import reductions as r
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.padding import pad
from treadle.frontend.functions.pooling import least
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator
from treadle.interop.onnx.reader.operators.indexing import scattered, wrapped
from treadle.interop.onnx.reader.operators.linear import Pads, pads_of, per_axis
from treadle.ir import composites as c
from treadle.ir.ops.linear import WINDOW, Window

Geometry = tuple[c.Pool, Pads, Pads]


def _geometry(call: Call, x: Tensor) -> Geometry:
    """The windows, the pads, and how far the last windows reach beyond them."""
    dims = x.ndim - 2
    kernel = per_axis(call, "kernel_shape", dims)
    if dims < 1:
        raise call.refuse(f"{x.type} has no spatial axes")
    strides, dilations = (per_axis(call, n, dims) for n in ("strides", "dilations"))
    pads = pads_of(call, x.shape[2:], kernel, strides, dilations)
    beyond = []
    for i, n in enumerate(x.shape[2:]):
        span, (low, high) = dilations[i] * (kernel[i] - 1) + 1, pads[i]
        room = n + low + high - span
        if room < 0:
            raise call.refuse(f"the kernel {kernel} does not fit into {x.type}, padded by {pads}")
        count = room // strides[i] + 1
        if call.flag("ceil_mode") and room % strides[i] and count * strides[i] < n + low:
            count += 1  # a window that begins inside and ends beyond
        beyond.append((0, max(0, (count - 1) * strides[i] + span - n - low - high)))
    return c.Pool(kernel, strides, (0,) * dims, dilations), pads, tuple(beyond)


def _both(pads: Pads, beyond: Pads) -> list[tuple[int, int]]:
    pairs = zip(pads, beyond, strict=True)
    return [(0, 0), (0, 0), *((low, high + more) for (low, high), (_, more) in pairs)]


def _windows(pool: c.Pool, x: Tensor) -> Tensor:
    """(N, C, windows …, elements of a window)"""
    axes = tuple(range(2, x.ndim))
    found = bind1(WINDOW, Window(axes, pool.sizes, pool.strides, pool.dilations), x)
    return s.reshape(found, (*found.shape[: x.ndim], math.prod(pool.sizes)))


@operator("MaxPool")
def _max_pool(call: Call, x: Value) -> list[Tensor]:
    tensor = as_tensor(x)
    pool, pads, beyond = _geometry(call, tensor)
    amounts = _both(pads, beyond)
    padded = pad(tensor, amounts, least(tensor.dtype))
    if not call.is_read(1):
        return [bind1(c.MAX_POOL, pool, padded)]
    windows = _windows(pool, padded)
    first = r.argmax(windows, -1, keepdims=True)
    values = take_along_axis(windows, first, -1)
    sizes = tensor.shape[2:]
    if call.flag("storage_order"):  # columns first
        count = s.iota((math.prod(sizes),), 0, dtypes.int64)
        places = s.permute(s.reshape(count, sizes[::-1]), tuple(reversed(range(len(sizes)))))
    else:
        places = s.reshape(s.iota((math.prod(sizes),), 0, dtypes.int64), sizes)
    number = s.iota((*tensor.shape[:2], 1), 0, dtypes.int64) * tensor.shape[1]
    number = s.reshape(number + s.iota((*tensor.shape[:2], 1), 1, dtypes.int64), tensor.shape[:2])
    lead = s.reshape(number * math.prod(sizes), (*tensor.shape[:2], *(1,) * len(sizes)))
    indices = take_along_axis(_windows(pool, pad(places + lead, amounts, -1)), first, -1)
    return [s.squeeze(values, -1), s.squeeze(indices, -1)]


@operator("MaxUnpool")
def _max_unpool(call: Call, x: Value, indices: Value, shape: Value = None) -> Tensor:
    """Values put back to the places among all elements that `MaxPool` gave."""
    tensor, places = as_tensor(x), as_tensor(indices)
    dims = tensor.ndim - 2
    kernel, strides = (per_axis(call, name, dims) for name in ("kernel_shape", "strides"))
    pads = call.integers("pads", (0,) * 2 * dims)
    if places.shape != tensor.shape or dims < 1 or len(pads) != 2 * dims:
        raise call.refuse(f"values {tensor.type}, indices {places.type}, pads {pads[:32]}")
    sizes = list(tensor.shape[:2])
    for i, n in enumerate(tensor.shape[2:]):
        sizes.append((n - 1) * strides[i] + kernel[i] - pads[i] - pads[dims + i])
    whole = list(sizes) if shape is None else list(call.whole(shape, "the shape"))
    fits = len(whole) == len(sizes) and all(n <= m for n, m in zip(sizes, whole, strict=True))
    if min(sizes) < 0 or not fits:
        raise call.refuse(f"{sizes} elements in the shape {whole[:32]}")
    empty = s.zeros((math.prod(sizes),), tensor.dtype)
    flat = wrapped(call, s.reshape(places, (-1,)), math.prod(sizes))
    found = s.reshape(scattered(empty, flat, s.reshape(tensor, (-1,))), tuple(sizes))
    return pad(found, [(0, m - n) for n, m in zip(sizes, whole, strict=True)])


def _counts(x: Tensor, pool: c.Pool, pads: Pads, beyond: Pads, with_padding: bool) -> np.ndarray:
    """Elements of each window that count."""
    found = np.ones(())
    for i, n in enumerate(x.shape[2:]):
        (low, high), more = pads[i], beyond[i][1]
        inside = np.full(low + n + high, float(with_padding))
        inside[low : low + n] = 1
        line = np.concatenate([inside, np.zeros(more)])
        starts = np.arange(0, line.size - pool.dilations[i] * (pool.sizes[i] - 1), pool.strides[i])
        steps = np.arange(pool.sizes[i]) * pool.dilations[i]
        found = found[..., None] * line[starts[:, None] + steps].sum(1)
    return found


@operator("AveragePool")
def _average_pool(call: Call, x: Value) -> Tensor:
    tensor = as_tensor(x)
    pool, pads, beyond = _geometry(call, tensor)
    call.bounded(
        *(sum(p) + sum(b) + n for p, b, n in zip(pads, beyond, tensor.shape[2:], strict=True))
    )
    mean = bind1(c.AVG_POOL, pool, pad(tensor, _both(pads, beyond)))
    with_padding = call.flag("count_include_pad")
    if not any(map(any, beyond)) and (with_padding or not any(map(any, pads))):
        return mean
    counts = _counts(tensor, pool, pads, beyond, with_padding)
    factors = math.prod(pool.sizes) / np.maximum(counts, 1)
    return mean * as_tensor(factors.astype(tensor.dtype.numpy))


@operator("LpPool")
def _lp_pool(call: Call, x: Value) -> Tensor:
    tensor, p = as_tensor(x), float(call.integer("p", 2))
    pool, pads, beyond = _geometry(call, tensor)
    powers = a.pow(a.abs(pad(tensor, _both(pads, beyond))), p)
    return a.pow(r.sum(_windows(pool, powers), -1), 1 / p)


def _spatial(call: Call, x: Value) -> tuple[Tensor, Shape]:
    tensor = as_tensor(x)
    if tensor.ndim < 3:
        raise call.refuse(f"{tensor.type} has no spatial axes")
    return tensor, tuple(range(2, tensor.ndim))


@operator("GlobalAveragePool")
def _global_average(call: Call, x: Value) -> Tensor:
    tensor, axes = _spatial(call, x)
    return r.mean(tensor, axes, keepdims=True)


@operator("GlobalMaxPool")
def _global_max(call: Call, x: Value) -> Tensor:
    tensor, axes = _spatial(call, x)
    return r.max(tensor, axes, keepdims=True)


@operator("GlobalLpPool")
def _global_lp(call: Call, x: Value) -> Tensor:
    tensor, axes = _spatial(call, x)
    p = float(call.integer("p", 2))
    return a.pow(r.sum(a.pow(a.abs(tensor), p), axes, keepdims=True), 1 / p)


# Norms


@operator("LRN")
def _lrn(call: Call, x: Value) -> Tensor:
    """Divided by a power of the squares of neighbouring channels."""
    tensor, size = as_tensor(x), call.integer("size")
    if tensor.ndim < 2 or size < 1:
        raise call.refuse(f"{size} channels of {tensor.type}")
    alpha, beta, bias = call.real("alpha", 1e-4), call.real("beta", 0.75), call.real("bias", 1.0)
    low = (size - 1) // 2
    amounts = [(low, size - 1 - low) if i == 1 else (0, 0) for i in range(tensor.ndim)]
    squares = pad(tensor * tensor, amounts)
    windows = bind1(WINDOW, Window((1,), (size,), (1,), (1,)), squares)
    return tensor / a.pow(r.sum(windows, -1) * (alpha / size) + bias, beta)


@operator("LpNormalization")
def _lp_norm(call: Call, x: Value) -> Tensor:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", -1), tensor.ndim)
    if call.integer("p", 2) == 1:
        norm = r.sum(a.abs(tensor), axis, keepdims=True)
    else:
        norm = r.norm(tensor, axis=axis, keepdims=True)
    return a.where(a.eq(norm, 0), 0.0, tensor / a.where(a.eq(norm, 0), 1.0, norm))


@operator("MeanVarianceNormalization")
def _mean_variance(call: Call, x: Value) -> Tensor:
    tensor = as_tensor(x)
    axes = call.axes(call.integers("axes", (0, 2, 3)), tensor.ndim)
    centred = tensor - r.mean(tensor, axes, keepdims=True)
    return centred / (a.sqrt(r.mean(centred * centred, axes, keepdims=True)) + 1e-9)


def _channels(value: Value, rank: int) -> Tensor:
    vector = as_tensor(value)
    return s.reshape(vector, (vector.size, *(1,) * (rank - 2)))


@operator("BatchNormalization")
def _batch_norm(
    call: Call, x: Value, scale: Value, bias: Value, mean: Value, variance: Value
) -> list[Tensor]:
    """By the file's statistics, or by those of the batch where it says that it is training."""
    if not call.flag("spatial", True):  # an attribute of older files
        raise call.refuse("statistics of each element", "Those of each channel are read.")
    tensor = as_tensor(x)
    eps = call.real("epsilon", 1e-5)
    wide = tensor if tensor.dtype.bits >= 32 else cast_to(tensor, dtypes.float32)
    statistics = [cast_to(as_tensor(v), wide.dtype) for v in (mean, variance)]
    results = []
    if call.flag("training_mode"):
        axes = tuple(i for i in range(tensor.ndim) if i != 1)
        found = [r.mean(wide, axes), r.var(wide, axes, 0)]
        keep = call.real("momentum", 0.9)
        results = [
            old * keep + new * (1 - keep) for old, new in zip(statistics, found, strict=True)
        ]
        statistics = found
    centre, spread = (_channels(t, tensor.ndim) for t in statistics)
    factor = a.rsqrt(spread + eps) * _channels(cast_to(as_tensor(scale), wide.dtype), tensor.ndim)
    shift = _channels(cast_to(as_tensor(bias), wide.dtype), tensor.ndim)
    return [cast_to((wide - centre) * factor + shift, tensor.dtype), *results]


@operator("InstanceNormalization")
def _instance_norm(call: Call, x: Value, scale: Value, bias: Value) -> Tensor:
    tensor = as_tensor(x)
    return _group_norm(call, tensor, tensor.shape[1], scale, bias)


def _group_norm(call: Call, x: Tensor, groups: int, scale: Value, bias: Value) -> Tensor:
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise call.refuse(f"{groups} groups of {x.type}")
    attributes = c.GroupNorm(groups, call.real("epsilon", 1e-5))
    return bind1(c.GROUP_NORM, attributes, x, as_tensor(scale), as_tensor(bias))


@operator("GroupNormalization")
def _groups(call: Call, x: Value, scale: Value, bias: Value) -> Tensor:
    """Before opset 21 the scale and bias are one for each group."""
    tensor, groups = as_tensor(x), call.integer("num_groups")
    affine = [as_tensor(v) for v in (scale, bias)]
    if call.opset < 21 and groups > 0:
        each = tensor.shape[1] // groups
        affine = [
            s.reshape(s.expand(s.unsqueeze(t, 1), (groups, each)), (groups * each,)) for t in affine
        ]
    return _group_norm(call, tensor, groups, *affine)


@operator("LayerNormalization")
def _layer_norm(call: Call, x: Value, scale: Value, bias: Value = None) -> list[Tensor]:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", -1), tensor.ndim)
    eps, dims = call.real("epsilon", 1e-5), tensor.ndim - axis
    axes = tuple(range(axis, tensor.ndim))
    factor = as_tensor(scale)
    affine = [factor] if bias is None else [factor, as_tensor(bias)]
    if all(t.shape == tensor.shape[axis:] for t in affine):
        found = bind1(c.LAYER_NORM, c.Norm(dims, eps), tensor, *affine)
    else:
        found = bind1(c.LAYER_NORM, c.Norm(dims, eps), tensor) * factor
        found = found if bias is None else found + affine[1]
    if not (call.is_read(1) or call.is_read(2)):
        return [found]
    mean = r.mean(tensor, axes, keepdims=True)
    return [found, mean, a.rsqrt(r.var(tensor, axes, 0, keepdims=True) + eps)]


@operator("RMSNormalization")
def _rms_norm(call: Call, x: Value, scale: Value) -> Tensor:
    tensor, factor = as_tensor(x), as_tensor(scale)
    axis = call.axis(call.integer("axis", -1), tensor.ndim)
    norm = c.Norm(tensor.ndim - axis, call.real("epsilon", 1e-5))
    if factor.shape == tensor.shape[axis:]:
        return bind1(c.RMS_NORM, norm, tensor, factor)
    return bind1(c.RMS_NORM, norm, tensor) * factor
