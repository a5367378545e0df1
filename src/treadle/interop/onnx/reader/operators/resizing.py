"""`Resize` and `Upsample`: elements between elements."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import linear
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.indexing import take
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
FEW = 4  # taps of an element that are gathered; more are a product with a matrix


@operator("Resize")
def _resize(
    call: Call, x: Value, roi: Value = None, scales: Value = None, sizes: Value = None
) -> Tensor:
    """One axis after the other, each by the weights of a few elements."""
    tensor = as_tensor(x)
    rank = tensor.ndim
    axes = call.axes(call.integers("axes", tuple(range(rank))), rank)
    factors, lengths = _targets(call, tensor, axes, scales, sizes)
    region = None
    if roi is not None and call.text("coordinate_transformation_mode", "") == COORDINATES[-1]:
        region = call.static(roi, "the region").astype(np.float64)
        if region.shape != (2 * len(axes),):
            raise call.refuse(f"a region of the shape {region.shape}")
    wide = tensor if tensor.dtype.is_float else cast_to(tensor, dtypes.float32)
    for i, axis in enumerate(axes):
        part = None if region is None else (region[i], region[i + len(axes)])
        is_whole = part is None or part == (0.0, 1.0)
        if not (math.isclose(factors[i], 1) and lengths[i] == tensor.shape[axis] and is_whole):
            wide = _along(call, wide, axis, factors[i], lengths[i], part)
    if tensor.dtype.is_float:
        return wide
    low, high = tensor.dtype.range()
    return cast_to(a.clamp(wide, low, high), tensor.dtype)


@operator("Upsample")
def _upsample(call: Call, x: Value, scales: Value) -> Tensor:
    """The older name of `Resize`."""
    set_ = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _resize(replace(call, attributes={**call.attributes, **set_}), x, None, scales)


def _targets(
    call: Call, x: Tensor, axes: tuple[int, ...], scales: Value, sizes: Value
) -> tuple[list[float], list[int]]:
    """By how much each axis grows, and how long it becomes."""
    old = [x.shape[i] for i in axes]
    if sizes is not None and sizes.size:
        new = list(call.whole(sizes, "the sizes"))
        if len(new) != len(axes) or min(old, default=0) < 1:
            raise call.refuse(f"sizes {new[:32]} of {x.type}")
        factors = [n / o for n, o in zip(new, old, strict=True)]
        policy = call.text("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factor = min(factors) if policy == "not_larger" else max(factors)
            factors = [factor] * len(axes)
            new = [int(factor * o + 0.5) for o in old]
    else:
        factors = [float(f) for f in call.static(scales, "the scales").reshape(-1)]
        if len(factors) != len(axes) or not all(math.isfinite(f) and f > 0 for f in factors):
            raise call.refuse(f"scales {factors[:32]} of {x.type}")
        new = [int(f * o) for f, o in zip(factors, old, strict=True)]
    call.bounded(max(new, default=0))
    return factors, new


def _along(
    call: Call, x: Tensor, axis: int, scale: float, length: int, region: tuple[float, float] | None
) -> Tensor:
    size = x.shape[axis]
    if length == 0:
        return s.slice_along(x, axis, 0, 0)
    places, outside = _places(call, size, scale, length, region)
    indices, weights = _taps(call, places, scale, size)
    if call.flag("exclude_outside"):
        weights = np.where((indices < 0) | (indices >= size), 0.0, weights)
        weights = weights / weights.sum(1, keepdims=True)
    indices = np.clip(indices, 0, size - 1)
    moved = s.moveaxis(x, axis, x.ndim - 1)
    if weights.shape[1] <= FEW:
        found = _gathered(moved, indices, weights)
    else:
        call.bounded(length, size)
        matrix = np.zeros((size, length))
        np.add.at(matrix, (indices, np.arange(length)[:, None]), weights)
        found = linear.matmul(moved, as_tensor(matrix.astype(x.dtype.numpy)))
    if outside is not None and outside.any():
        found = a.where(as_tensor(outside), call.real("extrapolation_value", 0.0), found)
    return s.moveaxis(found, x.ndim - 1, axis)


def _gathered(x: Tensor, indices: np.ndarray, weights: np.ndarray) -> Tensor:
    """Σ over taps of elements of the last axis times their weights."""
    total: Tensor | None = None
    for k in range(weights.shape[1]):
        if not weights[:, k].any():
            continue
        part = take(x, as_tensor(indices[:, k]), x.ndim - 1)
        if not (weights[:, k] == 1).all():
            part = part * as_tensor(weights[:, k].astype(x.dtype.numpy))
        total = part if total is None else total + part
    assert total is not None
    return total


def _places(
    call: Call, size: int, scale: float, length: int, region: tuple[float, float] | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Where each new element lies among the old ones, and which lie outside of the region."""
    mode = call.choice("coordinate_transformation_mode", "half_pixel", COORDINATES)
    new, width = np.arange(length, dtype=np.float64), scale * size
    if mode == "align_corners":
        return new * 0.0 if width == 1 else new * (size - 1) / (width - 1), None
    if mode == "asymmetric":
        return new / scale, None
    if mode == "pytorch_half_pixel" and width == 1:
        return new * 0.0 - 0.5, None
    if mode == "half_pixel_symmetric":
        return size / 2 * (1 - length / width) + (new + 0.5) / scale - 0.5, None
    if mode != "tf_crop_and_resize":
        return (new + 0.5) / scale - 0.5, None
    if region is None:
        raise call.refuse("tf_crop_and_resize without a region")
    first, last = region
    step = 0.0 if width == 1 else (last - first) * (size - 1) / (width - 1)
    places = first * (size - 1) + new * step
    if width == 1:
        places = places + (last - first) * (size - 1) / 2
    return places, (places < 0) | (places > size - 1)


def _taps(call: Call, places: np.ndarray, scale: float, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights (length, taps) of the elements around each place."""
    mode = call.choice("mode", "nearest", ("nearest", "linear", "cubic"))
    left = np.floor(places)
    if mode == "nearest":
        return _nearest(call, places)[:, None], np.ones((len(places), 1))
    reach = 1 if mode == "linear" else 2
    shrink = min(scale, 1.0) if call.flag("antialias") else 1.0
    first = math.floor(-reach / shrink) + 1
    count = 2 - 2 * first
    call.bounded(len(places), count)
    offsets = np.arange(first, first + count)
    apart = (offsets[None, :] - (places - left)[:, None]) * shrink
    if mode == "linear":
        weights = np.clip(1 - np.abs(apart), 0, 1)
    else:
        weights = _cubic(np.abs(apart), call.real("cubic_coeff_a", -0.75))
    if call.flag("antialias"):
        weights = weights / weights.sum(1, keepdims=True)
    return (left[:, None] + offsets).astype(np.int64), weights


def _cubic(x: np.ndarray, a_: float) -> np.ndarray:
    near = ((a_ + 2) * x - (a_ + 3)) * x * x + 1
    far = ((a_ * x - 5 * a_) * x + 8 * a_) * x - 4 * a_
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _nearest(call: Call, places: np.ndarray) -> np.ndarray:
    mode = call.choice("nearest_mode", NEAREST[0], NEAREST)
    if mode == "floor":
        found = np.floor(places)
    elif mode == "ceil":
        found = np.ceil(places)
    elif mode == "round_prefer_floor":
        found = np.ceil(places - 0.5)
    else:
        found = np.floor(places + 0.5)
    return found.astype(np.int64)
