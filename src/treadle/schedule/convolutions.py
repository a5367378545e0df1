"""Convolutions as a library computes them: on images whose channels are contiguous."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from treadle.ir.composites import CONV, CONV_GRAD_W, Conv, ConvGrad
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, constant
from treadle.kernel.nodes import Kernel, LibraryCall, Matmul, Matrix, Statement, StridedAxis, View
from treadle.schedule.channels import CONVOLUTIONS, conv_numbers, last_order, last_strides
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import along, axis_vars
from treadle.schedule.operands import Site, load_of, reading


@ROOTS(*CONVOLUTIONS)
def _conv(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """The library call, copies of operands in another order, and the result moved after it."""
    copies, finish = list[Kernel](), list[Kernel]()
    site = Site(lowering, position)
    operands = tuple(_operand(site, i, v, copies) for i, v in enumerate(node.operands))
    value, type_ = TensorValue(position), node.types[0]
    target, axes = lowering.buffer(value), axis_vars("x", type_.shape)
    if not _has_channels_last(lowering.address(value, along(axes)), axes):
        target = site.memory("last", type_.dtype, type_.size)
        order = tuple(axes[i] for i in last_order(4))
        finish = [site.moved(target, axes, order)]
    reader = reading(lowering, (view.buffer for view in operands))
    result = View(target.name, 0, type_.shape, last_strides(type_.shape))
    body: list[Statement] = [
        _matmul(node, result, *operands)
        if _is_pointwise(lowering, node)
        else LibraryCall(
            node.op.name, (result,), operands, conv_numbers(node), _flops(lowering, node)
        )
    ]
    kernel = lowering.kernel(position, reader, [], body, "", (target,))
    return [*copies, replace(kernel, is_standalone=True), *finish]


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

    def transposed(matrix: Matrix) -> Matrix:
        return Matrix(matrix.buffer, matrix.index, matrix.columns, matrix.rows)

    if node.op is CONV_GRAD_W:
        return Matmul(rows(result), transposed(rows(left)), rows(right))
    weight = rows(right)
    return Matmul(rows(result), rows(left), transposed(weight) if node.op is CONV else weight)


def _flops(lowering: Lowering, node: Node) -> int:
    """Twice the multiplications: each pixel of the image with each weight of a channel."""
    types = [*(lowering.graph.type_of(v) for v in node.operands), node.types[0]]
    ct, other, result = types
    if node.op is CONV_GRAD_W:
        return 2 * ct.size * math.prod(result.shape[1:])
    pixels = result if node.op.name == "conv" else ct
    return 2 * pixels.size * math.prod(other.shape[1:])


def _operand(site: Site, number: int, value: TensorValue, copies: list[Kernel]) -> View:
    """Where an operand lies; a copy of it where its channels are not contiguous."""
    lowering, type_ = site.lowering, site.lowering.graph.type_of(value)
    axes = axis_vars("x", type_.shape)
    load = load_of(lowering.reader(), value, axes)
    is_aligned = load is not None and load.index.offset % lowering.target.matmuls.pack == 0
    if load is not None and is_aligned and _has_channels_last(load.index, axes):
        return View(load.buffer, load.index.offset, type_.shape, last_strides(type_.shape))
    order = tuple(axes[i] for i in last_order(4))
    buffer, kernel = site.copied(value, f"last{number}", axes, order, f"_last{number}")
    copies.append(kernel)
    return View(buffer.name, 0, type_.shape, last_strides(type_.shape))


def _has_channels_last(index: Index, axes: Sequence[Var]) -> bool:
    """Whether channels are contiguous, or could as well be: axes of one element have no stride."""
    wanted = last_strides([v.extent for v in axes])
    pairs = zip(axes, wanted, strict=True)
    return all(index.factor_of(v) == stride for v, stride in pairs if v.extent > 1)
