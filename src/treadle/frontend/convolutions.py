"""Definitions of convolutions and their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from treadle.base.dtypes import accumulator
from treadle.frontend.coerce import cast, constant
from treadle.frontend.definitions import definition
from treadle.frontend.functions.linear import contract
from treadle.frontend.functions.shaping import (
    flip,
    pad,
    permute,
    reshape,
    slice_along,
    stack,
    transpose,
)
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Tensor
from treadle.ir import composites as c
from treadle.ir.ops.linear import UNWINDOW, WINDOW, Unwindow, Window

MOST_PHASES = 9  # convolutions that a gradient is made of, at most: strides of 3 and 3


@definition(c.CONV)
def conv(attributes: c.Conv, x: Tensor, w: Tensor) -> Tensor:
    grouped_x = _conv_windows(attributes, x, w.shape[2:])
    spatial = grouped_x.shape[3 : 1 + w.ndim]
    labels = _conv_labels(len(spatial))
    result = contract(grouped_x, _grouped(attributes, w), labels, accumulator(x.dtype))
    return cast(reshape(result, (x.shape[0], w.shape[0], *spatial)), x.dtype)


def _conv_windows(attributes: c.Conv, x: Tensor, kernel: c.Ints) -> Tensor:
    """(N, groups, channels of a group, windows …, kernel …)"""
    padded = pad(x, ((0, 0), (0, 0), *attributes.padding))
    axes = tuple(range(2, x.ndim))
    windows = bind1(WINDOW, Window(axes, kernel, attributes.strides, attributes.dilations), padded)
    n, channels, *rest = windows.shape
    return reshape(windows, (n, attributes.groups, channels // attributes.groups, *rest))


def _grouped(attributes: c.Conv, w: Tensor) -> Tensor:
    groups = attributes.groups
    return reshape(w, (groups, w.shape[0] // groups, *w.shape[1:]))


def _conv_labels(dims: int) -> tuple[str, str, str]:
    o, k = "stuvwxyz"[:dims], "STUVWXYZ"[:dims]
    return f"ngc{o}{k}", f"gfc{k}", f"ngf{o}"


@definition(c.CONV_GRAD_X)
def conv_grad_x(attributes: c.ConvGrad, ct: Tensor, w: Tensor) -> Tensor:
    """Elements that are a stride apart are a convolution of ct with part of the kernel, turned.

    There are as many such parts as elements in a stride. Where those are many, each element
    collects the windows it lies in.
    """
    a, shape, kernel = attributes.conv, attributes.shape, w.shape[2:]
    if math.prod(a.strides) > MOST_PHASES:
        return _collected(a, shape, ct, w)
    turned = _turned(a, w)
    phases = [
        _phases_of_axis(a, i, k, n, out)
        for i, (k, n, out) in enumerate(zip(kernel, shape[2:], ct.shape[2:], strict=True))
    ]
    counts = [-(-n // s) for n, s in zip(shape[2:], a.strides, strict=True)]
    parts = [_phase(a, ct, turned, chosen, (*shape[:2], *counts)) for chosen in product(*phases)]
    result = parts[0] if len(parts) == 1 else _interleaved(stack(parts, 2), a.strides)
    for axis, n in enumerate(shape[2:], 2):
        result = slice_along(result, axis, 0, n)
    return result


@dataclass(frozen=True, slots=True)
class _Phase:
    """Along one axis, every so many elements: the taps they have, and how ct lies around them."""

    first: int  # of the kernel's elements, and how far apart the next ones are
    step: int
    count: int
    dilation: int
    before: int  # zeros in front of ct; elements that are cut off, where negative
    after: int


def _phases_of_axis(a: c.Conv, axis: int, kernel: int, n: int, out: int) -> list[_Phase]:
    """Element stride · i + p of x is Σ ct[i + first − reach] · w over the taps that meet it."""
    stride, dilation, low = a.strides[axis], a.dilations[axis], a.padding[axis][0]
    found = []
    for p in range(stride):
        start, rest = divmod(low + p, stride)
        taps = [k for k in range(kernel) if dilation * k % stride == rest]
        if not taps:
            found.append(_Phase(0, 1, 0, 1, 0, 0))
            continue
        reach = [dilation * k // stride for k in taps]
        step, apart = (taps[1] - taps[0], reach[1] - reach[0]) if len(taps) > 1 else (1, 1)
        after = -(-n // stride) + start - reach[0] - out
        found.append(_Phase(taps[0], step, len(taps), apart, reach[-1] - start, after))
    return found


def _turned(a: c.Conv, w: Tensor) -> Tensor:
    """The kernel from outputs to channels of each group, in reverse order."""
    if a.groups == 1:
        return transpose(w, 0, 1)
    g, outputs, channels = a.groups, w.shape[0], w.shape[1]
    exchanged = transpose(reshape(w, (g, outputs // g, *w.shape[1:])), 1, 2)
    return reshape(exchanged, (g * channels, outputs // g, *w.shape[2:]))


def _phase(
    a: c.Conv, ct: Tensor, w: Tensor, phases: tuple[_Phase, ...], shape: tuple[int, ...]
) -> Tensor:
    """The convolution for one choice of phases; zeros where the kernel has no element."""
    if any(p.count == 0 for p in phases):
        return constant(0, shape, ct.dtype)
    for axis, p in enumerate(phases, 2):
        w = slice_along(w, axis, p.first, p.first + p.step * (p.count - 1) + 1, p.step)
        low, high = max(0, -p.before), ct.shape[axis] - max(0, -p.after)
        ct = slice_along(ct, axis, low, high)
    padding = tuple((max(0, p.before), max(0, p.after)) for p in phases)
    dilations = tuple(p.dilation for p in phases)
    attributes = c.Conv((1,) * len(phases), padding, dilations, a.groups)
    return conv(attributes, ct, flip(w, tuple(range(2, w.ndim))))


def _interleaved(x: Tensor, strides: c.Ints) -> Tensor:
    """(N, C, phases, counts …) as (N, C, spatial …), the phases of an axis next to each other."""
    n, channels, _, *counts = x.shape
    dims = len(strides)
    apart = reshape(x, (n, channels, *strides, *counts))
    pairs = [axis for i in range(dims) for axis in (2 + dims + i, 2 + i)]
    sizes = [m * s for m, s in zip(counts, strides, strict=True)]
    return reshape(permute(apart, (0, 1, *pairs)), (n, channels, *sizes))


def _collected(a: c.Conv, shape: c.Ints, ct: Tensor, w: Tensor) -> Tensor:
    """Every window's products, added up where they overlap."""
    lx, ly, lr = _conv_labels(w.ndim - 2)
    n, outputs, *spatial = ct.shape
    grouped = reshape(ct, (n, a.groups, outputs // a.groups, *spatial))
    windows = contract(grouped, _grouped(a, w), (lr, ly, lx))
    lengths = [s + low + high for s, (low, high) in zip(shape[2:], a.padding, strict=True)]
    window = Window(tuple(range(2, len(shape))), w.shape[2:], a.strides, a.dilations)
    whole = reshape(windows, (*shape[:2], *spatial, *w.shape[2:]))
    padded = bind1(UNWINDOW, Unwindow(window, (*shape[:2], *lengths)), whole)
    inside = [slice(low, low + s) for s, (low, _) in zip(shape[2:], a.padding, strict=True)]
    return padded[(slice(None), slice(None), *inside)]


@definition(c.CONV_GRAD_W)
def conv_grad_w(attributes: c.ConvGrad, ct: Tensor, x: Tensor) -> Tensor:
    """Products of ct and windows, summed over places."""
    a, shape = attributes.conv, attributes.shape
    windows = _conv_windows(a, x, shape[2:])
    lx, ly, lr = _conv_labels(len(shape) - 2)
    n, outputs, *spatial = ct.shape
    grouped = reshape(ct, (n, a.groups, outputs // a.groups, *spatial))
    return reshape(contract(grouped, windows, (lr, lx, ly)), shape)
