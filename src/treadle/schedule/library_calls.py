"""Attention and convolutions as a library computes them, on tensors where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.ir.composites import ATTENTION, CONV, CONV_GRAD_W, Attention, Conv, ConvGrad
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, constant
from treadle.kernel.nodes import (
    Kernel,
    LibraryCall,
    Load,
    Matmul,
    Matrix,
    Statement,
    StridedAxis,
    View,
)
from treadle.schedule.channels import CONVOLUTIONS, channels_after, conv_numbers, last_strides
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import along, axis_vars
from treadle.schedule.operands import Site, transposed


def library_attention(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Forward or backward, and copies of operands whose last axis is not contiguous."""
    attributes: Attention = attributes_of(node)
    site = Site(lowering, position)
    operands = tuple(_attention_operand(site, v) for v in node.operands)
    every = [TensorValue(position, i) for i in range(len(node.types))]
    results = tuple(_result(lowering, v) for v in every)
    q, k = (lowering.graph.type_of(v).shape for v in node.operands[-3:-1])
    matmuls = 2 if node.op is ATTENTION else 5
    flops = matmuls * 2 * math.prod(q) * k[2] // (2 if attributes.causal else 1)
    numbers = (("scale", float(attributes.scale)), ("causal", float(attributes.causal)))
    parts = {lowering.parts[v].whole: None for v in every if v in lowering.parts}
    made = [*(v for v in every if v not in lowering.parts), *parts]
    call = LibraryCall(node.op.name, results, operands, numbers, flops)
    return site.standalone([call], [view.buffer for view in operands], made)


def _result(lowering: Lowering, value: TensorValue) -> View:
    shape = lowering.graph.type_of(value).shape
    part = lowering.parts.get(value)
    if part is not None:
        length, depth = shape[2:]
        row = lowering.graph.type_of(part.whole).shape[-1]
        strides = (length * row, depth, row, 1)
        return View(lowering.names[part.whole], part.start, shape, strides)
    index = lowering.address(value, along(axis_vars("x", shape)))
    return _view(Load(lowering.names[value], index, lowering.buffer(value).dtype), shape)


def _attention_operand(site: Site, value: TensorValue) -> View:
    """Where an operand lies; a copy of it where its last axis is not contiguous."""
    shape, pack = site.lowering.graph.type_of(value).shape, site.lowering.target.matmuls.pack
    axes = axis_vars("x", shape)

    def is_packed(index: Index) -> bool:
        strides = [index.factor_of(v) for v in axes]
        is_even = all(s is not None and s % pack == 0 for s in strides[:-1])
        return len(shape) != 4 or (strides[-1] == 1 and is_even)

    name = f"copy{value.node}.{value.output}"
    return _view(site.placed(value, name, axes, axes, is_packed), shape)


def _view(load: Load, shape: Sequence[int]) -> View:
    """A tensor by its strides; those of axes of one element are filled in."""
    found = [load.index.factor_of(v) or 0 for v in axis_vars("x", shape)]
    reach = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] == 1:
            found[i] = reach
        reach = max(reach, found[i] * shape[i])
    return View(load.buffer, load.index.offset, tuple(shape), tuple(found))


@ROOTS(*CONVOLUTIONS)
def _conv(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """The library call, copies of operands in another order, and the result moved after it."""
    site, finish = Site(lowering, position), list[Kernel]()
    operands = tuple(_image(site, i, v) for i, v in enumerate(node.operands))
    value, type_ = TensorValue(position), node.types[0]
    target, axes = lowering.buffer(value), axis_vars("x", type_.shape)
    if not _has_channels_last(lowering.address(value, along(axes)), axes):
        target = site.memory("last", type_.dtype, type_.size)
        finish = [site.moved(target, axes, channels_after(axes))]
    result = View(target.name, 0, type_.shape, last_strides(type_.shape))
    call: Statement = LibraryCall(
        node.op.name, (result,), operands, conv_numbers(node), _flops(lowering, node)
    )
    if _is_pointwise(lowering, node):
        call = _matmul(node, result, *operands)
    made = site.standalone([call], [view.buffer for view in operands], [], (target,))
    return [*made, *finish]


def _is_pointwise(lowering: Lowering, node: Node) -> bool:
    """Whether a convolution takes each pixel by itself: a matmul of pixels and channels.

    Channels are multiples of a pack, so that rows of matrices are aligned.
    """
    is_weight = node.op is CONV_GRAD_W
    weight = node.types[0] if is_weight else lowering.graph.type_of(node.operands[1])
    given = node.attributes
    conv = given.conv if isinstance(given, ConvGrad) else given
    assert isinstance(conv, Conv)
    is_still = all(s == 1 for s in conv.strides) and not any(map(any, conv.padding))
    is_aligned = all(n % lowering.target.matmuls.pack == 0 for n in weight.shape[:2])
    return weight.shape[2:] == (1, 1) and conv.groups == 1 and is_still and is_aligned


def _matmul(node: Node, result: View, left: View, right: View) -> Matmul:
    """Pixels are rows and channels columns; a weight's rows are its outputs."""

    def rows(view: View) -> Matrix:
        n, channels, h, w = view.shape
        walks = StridedAxis(n * h * w, channels), StridedAxis(channels, 1)
        return Matrix(view.buffer, constant(view.start), *walks)

    if node.op is CONV_GRAD_W:
        return Matmul(rows(result), transposed(rows(left)), rows(right))
    weight = rows(right)
    return Matmul(rows(result), rows(left), transposed(weight) if node.op is CONV else weight)


def _flops(lowering: Lowering, node: Node) -> int:
    """Twice the multiplications: each pixel of the image with each weight of a channel."""
    ct, other, result = (*(lowering.graph.type_of(v) for v in node.operands), node.types[0])
    if node.op is CONV_GRAD_W:
        return 2 * ct.size * math.prod(result.shape[1:])
    pixels = result if node.op is CONV else ct
    return 2 * pixels.size * math.prod(other.shape[1:])


def _image(site: Site, number: int, value: TensorValue) -> View:
    """Where an operand lies; a copy of it where its channels are not contiguous."""
    shape = site.lowering.graph.type_of(value).shape
    axes, name = axis_vars("x", shape), f"last{number}"
    load = site.placed(
        value, name, axes, channels_after(axes), lambda index: _has_channels_last(index, axes)
    )
    return View(load.buffer, load.index.offset, shape, last_strides(shape))


def _has_channels_last(index: Index, axes: Sequence[Var]) -> bool:
    """Whether channels are contiguous, or could as well be: axes of one element have no stride."""
    wanted = last_strides([v.extent for v in axes])
    pairs = zip(axes, wanted, strict=True)
    return all(index.factor_of(v) == stride for v, stride in pairs if v.extent > 1)
