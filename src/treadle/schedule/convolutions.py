"""Convolutions of a library, in kernels of their own, on images whose channels lie last.

Operands in another order are copied first, and a result that would lie otherwise is moved after
the call. The same copies fill channels up to whole packs, as tensor cores want them. Where windows
are as far apart as they are wide, they are rows of a matrix, and the convolution is a matmul.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

from treadle.ir.composites import CONV, CONV_GRAD_W, CONV_GRAD_X
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.bindings import Copy, Elements
from treadle.kernel.index import Index, Var, bounded, constant, variable
from treadle.kernel.nodes import (
    Buffer,
    Kernel,
    LibraryCall,
    Literal,
    Load,
    Matmul,
    Matrix,
    Store,
    StridedAxis,
    View,
    Within,
)
from treadle.schedule.inline import Indices
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import along, axis_vars, flat_index, parallel
from treadle.schedule.operands import Site, reading, transposed
from treadle.schedule.templates import (
    CONVOLUTIONS,
    Shape,
    conv_numbers,
    conv_of,
    filled_shapes,
    last_axes,
    last_strides,
)


@ROOTS(*CONVOLUTIONS)
def _conv(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """The call, copies of operands in another order, and the result moved after it."""
    site = Site(lowering, position)
    types = [lowering.graph.type_of(v) for v in node.operands]
    if _is_of_patches(lowering, node):
        return _patch_matmul(site, node)
    *shapes, shape = filled_shapes(node, types, lowering.target)
    pairs = zip(node.operands, shapes, strict=True)
    operands = tuple(_image(site, i, value, filled) for i, (value, filled) in enumerate(pairs))
    target, finish = _target(site, shape)
    result = View(target.name, 0, shape, last_strides(shape))
    flops = _flops(node, *(t.shape for t in types))
    call = LibraryCall(node.op.name, (result,), operands, conv_numbers(node), flops)
    made = site.standalone([call], [view.buffer for view in operands], [], (target,))
    return [*made, *finish]


def _flops(node: Node, first: Shape, second: Shape) -> int:
    """Twice the multiplications: each pixel of the image with each weight of a channel."""
    result = node.types[0].shape
    if node.op is CONV_GRAD_W:
        return 2 * math.prod(first) * math.prod(result[1:])
    pixels = result if node.op is CONV else first
    return 2 * math.prod(pixels) * math.prod(second[1:])


# Images


def _image(site: Site, number: int, value: TensorValue, shape: Shape) -> View:
    """Where an operand lies; a copy where its channels are not contiguous, or have to be filled."""
    own = site.lowering.graph.type_of(value).shape
    axes, name = axis_vars("x", shape), f"last{number}"
    if shape != own:
        buffer = _filled_copy(site, name, value, axes)
        return View(buffer.name, 0, shape, last_strides(shape))
    load = site.placed(
        value, name, axes, last_axes(axes), lambda index: _has_channels_last(index, axes)
    )
    return View(load.buffer, load.index.offset, shape, last_strides(shape))


def _filled_copy(site: Site, name: str, value: TensorValue, axes: Sequence[Var]) -> Buffer:
    """A copy with more channels than there are; the others are zeros."""
    type_, reader = site.lowering.graph.type_of(value), site.lowering.reader()
    pairs = list(zip(axes, type_.shape, strict=True))
    inside = tuple(bounded(variable(v), n) for v, n in pairs)
    guards = [Within(variable(v), 0, n) for v, n in pairs if v.extent > n]
    order = last_axes(axes)
    copy = Copy(Elements(tuple(order), flat_index(order), inside, tuple(guards)))
    into = site.memory(name, type_.dtype, math.prod(v.extent for v in axes), copy, value)
    zero = Literal(0, type_.dtype)
    element = reader.under(guards, lambda: reader.at(value, inside), zero)
    body = [*reader.lets, Store(into.name, flat_index(order), element)]
    kernel = site.lowering.kernel(
        site.position, reader, [], parallel(order, body), f"_{name}", (into,)
    )
    site.copies.append(kernel)
    return into


def _target(site: Site, shape: Shape) -> tuple[Buffer, list[Kernel]]:
    """Where a call writes its result, channels last, and what moves it to its place."""
    lowering, value = site.lowering, TensorValue(site.position)
    type_ = lowering.graph.type_of(value)
    axes = axis_vars("x", type_.shape)
    if shape == type_.shape and _has_channels_last(lowering.address(value, along(axes)), axes):
        return lowering.buffer(value), []
    at = _sum(zip(axes, last_strides(shape), strict=True))
    copy = Copy(Elements(axes, at, along(axes)))
    made = site.memory("last", type_.dtype, math.prod(shape), copy, value)
    store = lowering.store(value, along(axes), Load(made.name, at, made.dtype))
    return made, [_moving(site, made, axes, store)]


def _moving(site: Site, source: Buffer, axes: Sequence[Var], store: Store) -> Kernel:
    lowering, value = site.lowering, TensorValue(site.position)
    reader = reading(lowering, [source.name])
    loops = parallel(axes, [store])
    return lowering.kernel(site.position, reader, [value], loops, "_moved")


def _sum(terms: Iterable[tuple[Var, int]]) -> Index:
    return sum((variable(v) * factor for v, factor in terms), Index())


def _has_channels_last(index: Index, axes: Sequence[Var]) -> bool:
    """Whether channels are contiguous, or could as well be: axes of one element have no stride."""
    wanted = last_strides([v.extent for v in axes])
    pairs = zip(axes, wanted, strict=True)
    return all(index.factor_of(v) == stride for v, stride in pairs if v.extent > 1)


# Patches: windows that lie side by side


def _is_of_patches(lowering: Lowering, node: Node) -> bool:
    """Whether windows are as far apart as they are wide: a matmul of patches and weights.

    Rows of the matrices are whole packs, so that they are aligned.
    """
    conv, (weight, image) = conv_of(node), _weight_and_image(lowering, node)
    kernel, pack = weight[2:], lowering.target.matmuls.pack
    is_plain = conv.groups == 1 and all(d == 1 for d in conv.dilations)
    is_beside = conv.strides == kernel and not any(map(any, conv.padding))
    is_aligned = weight[0] % pack == 0 and math.prod(weight[1:]) % pack == 0
    is_whole = node.op is not CONV_GRAD_X or not any(
        n % k for n, k in zip(image[2:], kernel, strict=True)
    )
    return is_plain and is_beside and is_aligned and is_whole


def _weight_and_image(lowering: Lowering, node: Node) -> tuple[Shape, Shape]:
    """Shapes of the weight, and of what it slides over."""
    first, second = (lowering.graph.type_of(v).shape for v in node.operands)
    result = node.types[0].shape
    if node.op is CONV_GRAD_W:
        return result, second
    return second, first if node.op is CONV else result


def _patch_matmul(site: Site, node: Node) -> list[Kernel]:
    """Patches are rows, and so are pixels of outputs; a weight's rows are its outputs."""
    lowering, shape = site.lowering, node.types[0].shape
    weight, image = _weight_and_image(lowering, node)
    outputs, width = weight[0], math.prod(weight[1:])
    patches = _Patches(site, image, weight)
    first, second = (lowering.graph.type_of(v).shape for v in node.operands)
    if node.op is CONV:
        left = patches.copied(node.operands[0])
        right = transposed(_rows(_image(site, 1, node.operands[1], second), width))
        target, finish = _target(site, shape)
        into = _matrix(target.name, math.prod(shape) // outputs, outputs)
    elif node.op is CONV_GRAD_W:
        left = transposed(_rows(_image(site, 0, node.operands[0], first), outputs))
        right = patches.copied(node.operands[1])
        target, finish = _target(site, shape)
        into = _matrix(target.name, outputs, width)
    else:
        left = _rows(_image(site, 0, node.operands[0], first), outputs)
        right = _rows(_image(site, 1, node.operands[1], second), width)
        target, finish = patches.target()
        into = _matrix(target.name, math.prod(shape) // width, width)
    call = Matmul(into, left, right)
    return [*site.standalone([call], [left.buffer, right.buffer], [], (target,)), *finish]


def _matrix(buffer: str, rows: int, columns: int, start: int = 0) -> Matrix:
    return Matrix(buffer, constant(start), StridedAxis(rows, columns), StridedAxis(columns))


def _rows(view: View, width: int) -> Matrix:
    return _matrix(view.buffer, math.prod(view.shape) // width, width, view.start)


class _Patches:
    """An image as rows of windows that lie side by side, channels last inside them."""

    def __init__(self, site: Site, image: Shape, weight: Shape):
        self.site, self.kernel, self.width = site, weight[2:], math.prod(weight[1:])
        n, channels, *space = image
        counts = (size // wide for size, wide in zip(space, self.kernel, strict=True))
        self.axes = axis_vars("x", (n, *counts, *self.kernel, channels))
        self.is_image = not any(wide > 1 for wide in self.kernel)  # which has its channels last

    @property
    def pixel(self) -> Indices:
        """Of an element of a patch, which element of the image it is."""
        dims = len(self.kernel)
        n, *rest, channel = along(self.axes)
        pairs = zip(rest[:dims], self.kernel, rest[dims:], strict=True)
        return n, channel, *(patch * wide + inside for patch, wide, inside in pairs)

    def copied(self, value: TensorValue) -> Matrix:
        lowering, position = self.site.lowering, self.site.position
        type_, reader = lowering.graph.type_of(value), lowering.reader()
        if self.is_image:
            return _rows(_image(self.site, 2, value, type_.shape), self.width)
        size = math.prod(v.extent for v in self.axes)
        copy = Copy(Elements(tuple(self.axes), flat_index(self.axes), self.pixel))
        into = self.site.memory("patches", type_.dtype, size, copy, value)
        element = reader.at(value, self.pixel)
        body = [*reader.lets, Store(into.name, flat_index(self.axes), element)]
        loops = parallel(self.axes, body)
        self.site.copies.append(lowering.kernel(position, reader, [], loops, "_patches", (into,)))
        return _matrix(into.name, size // self.width, self.width)

    def target(self) -> tuple[Buffer, list[Kernel]]:
        """Where a gradient is written as patches, and what moves it to its pixels."""
        lowering, value = self.site.lowering, TensorValue(self.site.position)
        type_ = lowering.graph.type_of(value)
        if self.is_image:
            return _target(self.site, type_.shape)
        copy = Copy(Elements(tuple(self.axes), flat_index(self.axes), self.pixel))
        made = self.site.memory("patches", type_.dtype, type_.size, copy, value)
        found = Load(made.name, flat_index(self.axes), made.dtype)
        n, *rest, channel = self.axes
        dims = len(self.kernel)
        space = chain.from_iterable(zip(rest[:dims], rest[dims:], strict=True))
        store = lowering.store(value, self.pixel, found)
        return made, [_moving(self.site, made, (n, *space, channel), store)]
