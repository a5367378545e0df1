"""Elements of images at places that are data."""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import grids, linear
from treadle.frontend.functions import reductions as r
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.indexing import take
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator
from treadle.interop.onnx.reader.operators.linear import channels, pads_of, per_axis


@operator("GridSample")
def _grid_sample(call: Call, x: Value, grid: Value) -> Tensor:
    """x (N, C, d sizes) at places (N, d sizes′, d), from −1 to 1."""
    image, places = as_tensor(x), as_tensor(grid)
    mode = call.text("mode", "linear")
    if mode not in ("linear", "bilinear", "nearest"):
        raise call.refuse(f"mode is {mode[:40]!r}", "linear and nearest are read.")
    mode = "nearest" if mode == "nearest" else "bilinear"
    padding = call.choice("padding_mode", "zeros", grids.PADDINGS)
    return grids.grid_sample(image, places, mode, padding, call.flag("align_corners"))


@operator("AffineGrid")
def _affine_grid(call: Call, theta: Value, size: Value) -> Tensor:
    sizes = call.whole(size, "the size")
    return grids.affine_grid(theta, sizes, call.flag("align_corners"))


@operator("DeformConv")
def _deformed_convolution(
    call: Call, x: Value, w: Value, offset: Value, bias: Value = None, mask: Value = None
) -> Tensor:
    """A convolution whose elements are taken at places that are moved by offsets.

    x (N, C, H, W), offset (N, groups · kh · kw · 2, H′, W′), mask (N, groups · kh · kw, H′, W′)
    """
    image, weight, moves = as_tensor(x), as_tensor(w), as_tensor(offset)
    if {t.ndim for t in (image, weight, moves)} != {4}:
        raise call.refuse(f"x is {image.type}, the weight {weight.type}, offsets {moves.type}")
    groups, parts = call.integer("group", 1), call.integer("offset_group", 1)
    n, count, *space = image.shape
    kernel = weight.shape[2:]
    taps = math.prod(kernel)
    strides, dilations = (per_axis(call, name, 2) for name in ("strides", "dilations"))
    pads = pads_of(call, (*space,), kernel, strides, dilations)
    sizes = [
        (size + low + high - d * (k - 1) - 1) // stride + 1
        for size, (low, high), d, k, stride in zip(
            space, pads, dilations, kernel, strides, strict=True
        )
    ]
    if groups < 1 or parts < 1 or count % parts or count != weight.shape[1] * groups:
        raise call.refuse(f"x {image.type}, the weight {weight.type}: {groups}, {parts} groups")
    if moves.shape != (n, parts * taps * 2, *sizes) or weight.shape[0] % groups:
        raise call.refuse(f"offsets {moves.type} for {parts} groups of {taps}, {sizes}")
    moved = s.reshape(moves, (n * parts, *kernel, 2, *sizes))
    places = []
    for i in (1, 0):  # a grid has the last axis first
        starts = np.arange(sizes[i]) * strides[i] - pads[i][0]
        steps = np.arange(kernel[i]) * dilations[i]
        plain = (steps[:, None] + starts).astype(image.dtype.numpy)
        shape = [kernel[j] if j == i else 1 for j in (0, 1)]
        shape += [sizes[j] if j == i else 1 for j in (0, 1)]
        place = moved[:, :, :, i] + as_tensor(plain.reshape(shape))
        places.append((place * 2.0 + 1.0) / float(space[i]) - 1.0)
    grid = s.reshape(s.stack(places, -1), (n * parts, taps, math.prod(sizes), 2))
    apart = s.reshape(image, (n * parts, count // parts, *space))
    found = grids.grid_sample(apart, grid, "bilinear", "zeros", False)
    if mask is not None:
        shares = s.reshape(as_tensor(mask), (n * parts, 1, taps, math.prod(sizes)))
        found = found * shares
    columns = s.reshape(found, (n, groups, weight.shape[1] * taps, math.prod(sizes)))
    rows = s.reshape(weight, (groups, weight.shape[0] // groups, weight.shape[1] * taps))
    result = s.reshape(linear.matmul(rows, columns), (n, weight.shape[0], *sizes))
    return result if bias is None else result + channels(bias, 2)


@operator("RoiAlign")
def _roi_align(call: Call, x: Value, regions: Value, batch: Value) -> Tensor:
    """Means or maxima of samples of rectangles: x (N, C, H, W), regions (R, 4) → (R, C, H′, W′)."""
    image, boxes = as_tensor(x), as_tensor(regions)
    number = cast_to(as_tensor(batch), dtypes.int32)
    count = call.integer("sampling_ratio", 0)
    if count < 1:
        raise call.refuse("as many samples as a region's size asks for", "Set sampling_ratio.")
    sizes = call.integer("output_height", 1), call.integer("output_width", 1)
    if image.ndim != 4 or boxes.ndim != 2 or boxes.shape[1] != 4 or min(sizes) < 1:
        raise call.refuse(f"regions {boxes.type} of {image.type} to {sizes}")
    call.bounded(*sizes, count, count)
    modes = ("half_pixel", "output_half_pixel")
    default = modes[call.opset < 16]
    is_half = call.choice("coordinate_transformation_mode", default, modes) == "half_pixel"
    edges = boxes * call.real("spatial_scale", 1.0) - (0.5 if is_half else 0.0)
    lines = []
    for i, (n, size) in enumerate(zip(image.shape[2:], sizes, strict=True)):
        first, last = edges[:, 1 - i], edges[:, 3 - i]
        length = last - first if is_half else a.maximum(last - first, 1.0)
        steps = ((np.arange(size * count) + 0.5) / (size * count)).astype(boxes.dtype.numpy)
        places = s.unsqueeze(first, 1) + s.unsqueeze(length, 1) * as_tensor(steps)
        lines.append(_ends(places, n))
    is_mean = call.choice("mode", "avg", ("avg", "max")) == "avg"
    found = _corners(image, number, lines, is_mean)
    groups = s.reshape(found, (boxes.shape[0], sizes[0], count, sizes[1], count, image.shape[1]))
    reduced = r.mean(groups, (2, 4)) if is_mean else r.max(groups, (2, 4))
    return s.moveaxis(reduced, -1, 1)


Ends = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def _ends(places: Tensor, n: int) -> Ends:
    """The elements on both sides of each place, with their weights; none beyond one outside."""
    inside = a.logical_and(a.ge(places, -1.0), a.le(places, float(n)))
    held = a.clamp(places, 0.0, n - 1.0)
    low = a.floor(held)
    part = held - low
    indices = (cast_to(low, dtypes.int32), cast_to(a.minimum(low + 1.0, n - 1.0), dtypes.int32))
    weights = (a.where(inside, 1.0 - part, 0.0), a.where(inside, part, 0.0))
    return (indices[0], weights[0]), (indices[1], weights[1])


def _corners(image: Tensor, number: Tensor, lines: list[Ends], is_mean: bool) -> Tensor:
    """(R, rows, columns, C): four elements times their weights, added up, or the largest."""
    n, count, height, width = image.shape
    rows = s.reshape(s.moveaxis(image, 1, -1), (n * height * width, count))
    first = s.reshape(number, (-1, 1, 1)) * (height * width)
    total: Tensor | None = None
    for y, above in lines[0]:
        for x, beside in lines[1]:
            flat = first + s.unsqueeze(y, 2) * width + s.unsqueeze(x, 1)
            weight = s.unsqueeze(s.unsqueeze(above, 2) * s.unsqueeze(beside, 1), -1)
            term = take(rows, flat) * weight
            if total is not None:
                term = total + term if is_mean else a.maximum(total, term)
            total = term
    assert total is not None
    return total
