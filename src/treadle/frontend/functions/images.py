"""Functions of images and signals: transposed convolution, resizing, windows, pixel shuffle."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.base.dtypes import int32, uint8
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.coerce import as_tensor, broadcast_to, cast
from treadle.frontend.functions.arithmetic import clamp
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.linear import aligned, per_axis
from treadle.frontend.functions.pooling import adaptive_avg_pool
from treadle.frontend.functions.shaping import (
    concat,
    integer_of,
    pad,
    permute,
    reshape,
    slice_along,
    squeeze,
    stack,
    unsqueeze,
)
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir import composites as c
from treadle.ir.ops.linear import UNWINDOW, WINDOW, Unwindow, Window

Sizes = int | Sequence[int]


def conv_transpose(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of `conv`: x (N, C, …), weight (C, O / groups, …) → (N, O, …).

    What `conv` with the same arguments maps to x's shape, this maps back to; `output_padding`
    chooses among the shapes that it maps so.
    """
    a, w = aligned(x, weight)
    dims = w.ndim - 2
    if dims > 0 and a.ndim == w.ndim - 1:  # one image, without an axis of images
        given = (w, bias, stride, padding, output_padding, groups, dilation)
        return squeeze(conv_transpose(unsqueeze(a, 0), *given), 0)
    if dims < 1 or a.ndim != w.ndim:
        raise ShapeError(
            "conv_transpose",
            f"x is {a.type}, the weight {w.type}",
            "Both are (·, channels, spatial …).",
        )
    groups = integer_of("conv_transpose", "groups", groups)
    if groups < 1 or a.shape[1] != w.shape[0] or a.shape[1] % groups:
        raise ShapeError(
            "conv_transpose",
            f"x {a.type} and the weight {w.type} do not fit in {groups} groups",
            "The weight is (channels, outputs / groups, …), and groups divides the channels.",
        )
    strides, dilations = (
        per_axis("conv_transpose", label, value, dims)
        for label, value in (("stride", stride), ("dilation", dilation))
    )
    pads, extra = (
        per_axis("conv_transpose", label, value, dims, 0)
        for label, value in (("padding", padding), ("output_padding", output_padding))
    )
    _check_output_padding(extra, strides, dilations)
    # The convolution that this transposes pads less at the end; beyond its reach there are zeros.
    high = [max(0, p - e) for p, e in zip(pads, extra, strict=True)]
    reach = [d * (k - 1) for d, k in zip(dilations, w.shape[2:], strict=True)]
    lengths = [
        (n - 1) * s + r + 1 - p - h
        for n, s, r, p, h in zip(a.shape[2:], strides, reach, pads, high, strict=True)
    ]
    if min(lengths) < 1:
        raise ShapeError(
            "conv_transpose", f"padding {pads} leaves nothing of {a.type}", "Pad less."
        )
    attributes = c.Conv(strides, tuple(zip(pads, high, strict=True)), dilations, groups)
    shape = (a.shape[0], w.shape[1] * groups, *lengths)
    result = bind1(c.CONV_GRAD_X, c.ConvGrad(attributes, shape), a, w)
    beyond = [max(0, e - p) for p, e in zip(pads, extra, strict=True)]
    result = pad(result, ((0, 0), (0, 0), *((0, n) for n in beyond)))
    if bias is None:
        return result
    b = as_tensor(bias)
    if b.shape != (shape[1],):
        raise ShapeError(
            "conv_transpose", f"the bias is {b.type}", f"It has one entry for {shape[1]} channels."
        )
    return result + reshape(b, (shape[1], *(1,) * dims))


def _check_output_padding(
    extra: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> None:
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise ArgumentError(
            "conv_transpose",
            f"output_padding {tuple(extra)} with stride {tuple(strides)} and dilation "
            f"{tuple(dilations)}",
            "It is smaller than the stride or the dilation.",
        )


# Windows


def unfold(
    x: Operand, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Tensor:
    """Windows as columns: (N, C, spatial …) → (N, C · kernel, windows), as F.unfold."""
    x = as_tensor(x)
    if x.ndim < 3:
        raise ShapeError("unfold", f"x is {x.type}", "It is (N, channels, spatial …).")
    window, pads = _window("unfold", x.ndim - 2, kernel_size, dilation, padding, stride)
    padded = pad(x, ((0, 0), (0, 0), *((p, p) for p in pads)))
    windows = bind1(WINDOW, window, padded)  # (N, C, windows …, kernel …)
    dims = x.ndim - 2
    order = (0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    count = math.prod(windows.shape[2 : 2 + dims])
    columns = (x.shape[0], x.shape[1] * math.prod(window.sizes), count)
    return reshape(permute(windows, order), columns)


def fold(
    x: Operand,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor:
    """Columns added up where windows overlap, as F.fold: (N, C · kernel, windows) → (N, C, …)."""
    x = as_tensor(x)
    given = (output_size, kernel_size, dilation, padding, stride)
    dims = next((len(n) for n in given if isinstance(n, Sequence)), 2)
    size = per_axis("fold", "output_size", output_size, dims)
    window, pads = _window("fold", dims, kernel_size, dilation, padding, stride)
    lengths = tuple(n + 2 * p for n, p in zip(size, pads, strict=True))
    counts = [
        (n - d * (k - 1) - 1) // s + 1
        for n, d, k, s in zip(lengths, window.dilations, window.sizes, window.strides, strict=True)
    ]
    kernel = math.prod(window.sizes)
    if x.ndim != 3 or x.shape[1] % kernel or x.shape[2] != math.prod(counts):
        raise ShapeError(
            "fold",
            f"x is {x.type} for {math.prod(counts)} windows of {kernel} elements",
            "It is (N, channels · kernel, windows).",
        )
    n, channels = x.shape[0], x.shape[1] // kernel
    columns = reshape(x, (n, channels, *window.sizes, *counts))
    order = (0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    shape = (n, channels, *lengths)
    whole = bind1(UNWINDOW, Unwindow(window, shape), permute(columns, order))
    inside = [slice(p, p + s) for p, s in zip(pads, size, strict=True)]
    return whole[(slice(None), slice(None), *inside)]


def _window(
    name: str, dims: int, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes
) -> tuple[Window, tuple[int, ...]]:
    kernel = per_axis(name, "kernel_size", kernel_size, dims)
    strides = per_axis(name, "stride", stride, dims)
    dilations = per_axis(name, "dilation", dilation, dims)
    axes = tuple(range(2, 2 + dims))
    return Window(axes, kernel, strides, dilations), per_axis(name, "padding", padding, dims, 0)


# Pixels and channels


def pixel_shuffle(x: Operand, upscale_factor: int) -> Tensor:
    """Channels as pixels: (…, C · r², H, W) → (…, C, H · r, W · r)."""
    x, r = _with_factor("pixel_shuffle", x, upscale_factor)
    *lead, channels, h, w = x.shape
    if channels % (r * r):
        raise ShapeError(
            "pixel_shuffle", f"{channels} channels of {x.type}", f"{r * r} divides them."
        )
    parts = reshape(x, (*lead, channels // (r * r), r, r, h, w))
    n = len(lead)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return reshape(permute(parts, order), (*lead, channels // (r * r), h * r, w * r))


def pixel_unshuffle(x: Operand, downscale_factor: int) -> Tensor:
    """Pixels as channels: (…, C, H · r, W · r) → (…, C · r², H, W)."""
    x, r = _with_factor("pixel_unshuffle", x, downscale_factor)
    *lead, channels, h, w = x.shape
    if h % r or w % r:
        raise ShapeError("pixel_unshuffle", f"{h} × {w} of {x.type}", f"{r} divides both.")
    parts = reshape(x, (*lead, channels, h // r, r, w // r, r))
    n = len(lead)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return reshape(permute(parts, order), (*lead, channels * r * r, h // r, w // r))


def _with_factor(name: str, x: Operand, factor: int) -> tuple[Tensor, int]:
    x, r = as_tensor(x), integer_of(name, "the factor", factor)
    if x.ndim < 3 or r < 1:
        raise ShapeError(
            name, f"x is {x.type}, the factor {r}", "x is (…, channels, H, W), the factor positive."
        )
    return x, r


def channel_shuffle(x: Operand, groups: int) -> Tensor:
    """Channels (axis 1) of the groups taken in turn: (N, C, …) → (N, C, …)."""
    x, count = as_tensor(x), integer_of("channel_shuffle", "groups", groups)
    if x.ndim < 3 or count < 1 or x.shape[1] % count:
        raise ShapeError(
            "channel_shuffle", f"{count} groups of {x.type}", "groups divides the channels, axis 1."
        )
    n, channels, *rest = x.shape
    parts = reshape(x, (n, count, channels // count, *rest))
    return reshape(permute(parts, (0, 2, 1, *range(3, x.ndim + 1))), x.shape)


# Resizing

LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}
REACH = 3  # how far from its element a result of a whole factor may look
MOST_PHASES = 8  # results of an element that are written one by one
Tap = tuple[np.ndarray, np.ndarray]  # for each result: the index of an element, and its share
CUBIC = -0.75  # the curvature of PyTorch's kernel (Keys, 1981)
MODES = ("nearest", "nearest-exact", *LINEAR, "bicubic", "area")


def interpolate(
    x: Operand,
    size: Sizes | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    recompute_scale_factor: bool = False,
) -> Tensor:
    """Spatial axes resized to a size or by a factor, as in PyTorch: (N, C, …) → (N, C, size …).

    uint8 is resized in integers, with weights of 16 bits and a rounding after each axis, as in
    PyTorch: "bilinear", "bicubic" and "nearest". Other integers are for "nearest".
    """
    x = as_tensor(x)
    dims = x.ndim - 2
    _check_mode(x, mode, dims, align_corners)
    sizes, steps = _sizes_and_steps(x, size, scale_factor, recompute_scale_factor)
    if not x.dtype.is_float and not mode.startswith("nearest"):
        if x.dtype is not uint8 or mode not in ("bilinear", "bicubic"):
            raise DTypeError(
                "interpolate", f"mode {mode!r} of {x.type}", "Cast it to td.float32 first."
            )
        for axis in (3, 2):
            out, step = sizes[axis - 2], steps[axis - 2]
            x = _resized_bytes(x, axis, _taps(mode, x.shape[axis], out, step, align_corners))
        return x
    if mode == "area":
        return adaptive_avg_pool(x, sizes)
    for axis, (out, step) in enumerate(zip(sizes, steps, strict=True), 2):
        taps = _taps(mode, x.shape[axis], out, step, align_corners)
        shares = _phases(taps, x.shape[axis], out)
        x = _gathered(x, axis, taps) if shares is None else _interleaved(x, axis, shares)
    return x


def _check_mode(x: Tensor, mode: str, dims: int, align_corners: bool) -> None:
    if mode not in MODES:
        raise ArgumentError("interpolate", f"mode {mode!r}", f"Use one of {', '.join(MODES)}.")
    wanted = LINEAR.get(mode, 2 if mode == "bicubic" else dims)
    if dims < 1 or dims != wanted:
        names = {1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}
        raise ShapeError(
            "interpolate",
            f"mode {mode!r} of {x.type}",
            f"It is for {names.get(wanted, '(N, C, spatial …)')}.",
        )
    if align_corners and (mode.startswith("nearest") or mode == "area"):
        raise ArgumentError(
            "interpolate", f"align_corners with mode {mode!r}", "It is for linear and cubic modes."
        )


def _sizes_and_steps(
    x: Tensor, size: Sizes | None, scale_factor: Any, recompute: bool
) -> tuple[tuple[int, ...], list[float]]:
    """Output sizes, and how far apart their places are in the input."""
    dims, lengths = x.ndim - 2, x.shape[2:]
    if (size is None) == (scale_factor is None):
        raise ArgumentError(
            "interpolate", f"size = {size}, scale_factor = {scale_factor}", "Give one of them."
        )
    if size is not None:
        sizes = per_axis("interpolate", "size", size, dims)
        return sizes, [n / out for n, out in zip(lengths, sizes, strict=True)]
    given = scale_factor if isinstance(scale_factor, Sequence) else (scale_factor,) * dims
    factors = [float(f) for f in given]
    if len(factors) != dims or min(factors) <= 0:
        raise ArgumentError(
            "interpolate", f"scale_factor {scale_factor}", f"Give a positive one for {dims} axes."
        )
    sizes = tuple(math.floor(n * f) for n, f in zip(lengths, factors, strict=True))
    if min(sizes) < 1:
        raise ShapeError("interpolate", f"{x.type} by {scale_factor} has no elements", "Scale up.")
    if recompute:
        return sizes, [n / out for n, out in zip(lengths, sizes, strict=True)]
    return sizes, [1 / f for f in factors]


def _taps(mode: str, n: int, out: int, step: float, align: bool) -> list[Tap]:
    """What the elements of an axis are made of. Indices beyond the ends mean the last elements."""
    if mode.startswith("nearest"):
        shift = 0.5 if mode == "nearest-exact" else 0.0
        return [(np.floor((np.arange(out) + shift) * step), np.ones(out))]
    place = (np.arange(out) + 0.5) * step - 0.5
    if align:
        place = np.arange(out) * ((n - 1) / (out - 1) if out > 1 else 0.0)
    low = np.floor(place)
    t = place - low
    if mode != "bicubic":
        return [(low, 1 - t), (low + 1, t)]
    weights = (_far(t + 1), _near(t), _near(1 - t), _far(2 - t))
    return [(low + i, weight) for i, weight in enumerate(weights, -1)]


def _resized_bytes(x: Tensor, axis: int, taps: list[Tap]) -> Tensor:
    """An axis of uint8 resized: sums of elements by whole weights, over a power of two."""
    last = x.shape[axis] - 1
    places = [np.clip(at, 0, last).astype(np.int32) for at, _ in taps]
    weights = [np.array(weight, np.float64) for _, weight in taps]
    for i in range(1, len(taps)):  # one weight for an element at the end that is taken twice
        is_same = places[i] == places[i - 1]
        weights[i] += np.where(is_same, weights[i - 1], 0)
        weights[i - 1][is_same] = 0
    bits = _weight_bits(max(float(w.max(initial=0)) for w in weights))
    wide = cast(x, int32)
    total: Tensor | int = 1 << (bits - 1)
    for place, weight in zip(places, weights, strict=True):
        scaled = weight * (1 << bits)
        whole = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)
        total = take(wide, place, axis) * _along(wide, axis, whole) + total
    return cast(clamp(as_tensor(total) // (1 << bits), 0, 255), uint8)


def _weight_bits(largest: float) -> int:
    """How many bits below 1 a weight has, so that the largest one has 16 with its sign."""
    bits = 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return bits


def _near(t: np.ndarray) -> np.ndarray:
    return ((CUBIC + 2) * t - (CUBIC + 3)) * t * t + 1


def _far(t: np.ndarray) -> np.ndarray:
    return ((CUBIC * t - 5 * CUBIC) * t + 8 * CUBIC) * t - 4 * CUBIC


def _phases(taps: list[Tap], n: int, out: int) -> list[dict[int, float]] | None:
    """Of a whole factor, what each of as many results has of its element's neighbours, by distance.

    None where that differs from element to element, or where there are many results.
    """
    if n == 0 or out % n:
        return None
    factor = out // n
    shares = np.zeros((out, 2 * REACH + 1))
    for at, weight in taps:
        distance = at - np.arange(out) // factor
        if np.abs(distance).max() > REACH:
            return None
        shares[np.arange(out), distance.astype(int) + REACH] += weight
    by_element = shares.reshape(n, factor, -1)
    first = by_element[0]
    is_regular = np.abs(by_element - first).max() < 1e-9
    is_constant = np.abs(first - first[0]).max() < 1e-9
    if not is_regular or (factor > MOST_PHASES and not is_constant):
        return None
    return [{d - REACH: float(w) for d, w in enumerate(row) if abs(w) > 1e-9} for row in first]


def _interleaved(x: Tensor, axis: int, shares: list[dict[int, float]]) -> Tensor:
    """Each element several times, mixed with its neighbours: no index is data, nor is one
    scattered to in the gradient."""
    parts = []
    for row in shares:
        terms = [
            _shifted(x, axis, d) * w if w != 1 else _shifted(x, axis, d) for d, w in row.items()
        ]
        parts.append(functools.reduce(operator.add, terms))
    shape = (*x.shape[:axis], x.shape[axis] * len(shares), *x.shape[axis + 1 :])
    if all(row == shares[0] for row in shares):
        several = (*x.shape[: axis + 1], len(shares), *x.shape[axis + 1 :])
        return reshape(broadcast_to(unsqueeze(parts[0], axis + 1), several), shape)
    return reshape(stack(parts, axis + 1), shape)


def _shifted(x: Tensor, axis: int, distance: int) -> Tensor:
    """The neighbour at a distance; beyond the ends, the last element."""
    n = x.shape[axis]
    by = min(abs(distance), n - 1)
    if by == 0:
        return x
    if distance > 0:
        last = slice_along(x, axis, n - 1, n)
        return concat([slice_along(x, axis, by, n), *[last] * by], axis)
    first = slice_along(x, axis, 0, 1)
    return concat([*[first] * by, slice_along(x, axis, 0, n - by)], axis)


def _gathered(x: Tensor, axis: int, taps: list[Tap]) -> Tensor:
    """Elements by their indices, weighed and added."""
    n, terms = x.shape[axis], []
    for at, weight in taps:
        element = take(x, np.clip(at, 0, n - 1).astype(np.int32), axis)
        terms.append(element if (weight == 1).all() else element * _along(x, axis, weight))
    return functools.reduce(operator.add, terms)


def _along(x: Tensor, axis: int, values: np.ndarray) -> Tensor:
    """Numbers for the places of an axis, in x's dtype."""
    shape = (len(values), *(1,) * (x.ndim - axis - 1))
    return as_tensor(values.astype(x.dtype.numpy).reshape(shape))
