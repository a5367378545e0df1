"""Convolutions as a library computes them: on images whose channels lie together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from treadle.ir.composites import CONV, CONV_GRAD_W, Conv, ConvGrad
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.types import TensorType
from treadle.kernel.index import Var, constant, flatten, variable
from treadle.kernel.nodes import (
    Buffer,
    Kernel,
    Library,
    Load,
    Matrix,
    Multiply,
    Role,
    Statement,
    Store,
    View,
    Walk,
)
from treadle.schedule.channels import (
    CONVOLUTIONS,
    conv_numbers,
    last_order,
    last_strides,
)
from treadle.schedule.keep import ROOTS
from treadle.schedule.labels import plain_load
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import axis_vars, nest


@ROOTS(*CONVOLUTIONS)
def _conv(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """The routine, copies of operands that lie otherwise, and the result moved where it leaves."""
    writer = _Images(lowering, position)
    operands = tuple(writer.operand(i, v) for i, v in enumerate(node.operands))
    value, type_ = TensorValue(position), node.types[0]
    target, moved = lowering.buffer(value), list[Kernel]()
    if not writer.lies_last(value):
        name = f"{lowering.prefix}b{position}.last"
        target = lowering.buffers[name] = Buffer(name, type_.dtype, type_.size)
        moved = [writer.moved(value, target)]
    reader = lowering.reader()
    for view in operands:
        reader.used[view.buffer] = lowering.as_type(lowering.buffers[view.buffer])
    result = View(target.name, 0, type_.shape, last_strides(type_.shape))
    body: list[Statement] = [
        _product(node, result, *operands)
        if is_pointwise(node, [lowering.graph.type_of(v) for v in node.operands])
        else Library(node.op.name, (result,), operands, conv_numbers(node), _flops(lowering, node))
    ]
    kernel = lowering.kernel(position, reader, [], body, "", (target,))
    return [*writer.copies, replace(kernel, is_whole=True), *moved]


def is_pointwise(node: Node, types: Sequence[TensorType]) -> bool:
    """Whether a convolution takes each place by itself: a product of places and channels.

    Channels are whole packs, so that rows of matrices are aligned.
    """
    weight = node.types[0] if node.op is CONV_GRAD_W else types[1]
    given = node.attributes
    conv = given.conv if isinstance(given, ConvGrad) else given
    assert isinstance(conv, Conv)
    is_still = all(s == 1 for s in conv.strides) and not any(map(any, conv.padding))
    is_aligned = all(n % 8 == 0 for n in weight.shape[:2])
    return weight.shape[2:] == (1, 1) and conv.groups == 1 and is_still and is_aligned


def _product(node: Node, result: View, left: View, right: View) -> Multiply:
    """Places are rows and channels columns; a weight's rows are its outputs."""

    def rows(view: View) -> Matrix:
        n, channels, h, w = view.shape
        walks = Walk(n * h * w, channels), Walk(channels, 1)
        return Matrix(view.buffer, constant(view.start), *walks)

    def turned(matrix: Matrix) -> Matrix:
        return Matrix(matrix.buffer, matrix.index, matrix.columns, matrix.rows)

    if node.op is CONV_GRAD_W:
        return Multiply(rows(result), turned(rows(left)), rows(right))
    weight = rows(right)
    return Multiply(rows(result), rows(left), turned(weight) if node.op is CONV else weight)


def _flops(lowering: Lowering, node: Node) -> int:
    """Twice the products: each place of what is convolved with each weight of a channel."""
    types = [*(lowering.graph.type_of(v) for v in node.operands), node.types[0]]
    ct, other, result = types
    if node.op is CONV_GRAD_W:
        return 2 * ct.size * math.prod(result.shape[1:])
    places = result if node.op.name == "conv" else ct
    return 2 * places.size * math.prod(other.shape[1:])


class _Images:
    def __init__(self, lowering: Lowering, position: int):
        self.lowering, self.position = lowering, position
        self.copies: list[Kernel] = []

    def lies_last(self, value: TensorValue) -> bool:
        """Whether a result's place has channels together, or could as well have."""
        shape = self.lowering.graph.type_of(value).shape
        axes = axis_vars("x", shape)
        index = self.lowering.place(value, [variable(v) for v in axes])
        return _is_last(axes, [index.factor_of(v) for v in axes], shape)

    def operand(self, number: int, value: TensorValue) -> View:
        """Where an operand is; a copy of it where its channels do not lie together."""
        lowering, type_ = self.lowering, self.lowering.graph.type_of(value)
        axes = axis_vars("x", type_.shape)
        reader = lowering.reader()
        load = plain_load(reader, reader.at(value, tuple(map(variable, axes))))
        if load is not None and load.index.offset % 8 == 0:
            steps = [load.index.factor_of(v) for v in axes]
            if load.dtype is type_.dtype and _is_last(axes, steps, type_.shape):
                return View(load.buffer, load.index.offset, type_.shape, last_strides(type_.shape))
        name = f"{lowering.prefix}b{self.position}.last{number}"
        buffer = lowering.buffers[name] = Buffer(name, type_.dtype, type_.size)
        reader = lowering.reader()
        element = reader.at(value, tuple(map(variable, axes)))
        order = [axes[i] for i in last_order(4)]
        at = flatten([variable(v) for v in order], [v.extent for v in order])
        body = nest(order, Role.PARALLEL, [*reader.lets, Store(name, at, element)])
        suffix = f"_last{number}"
        self.copies.append(lowering.kernel(self.position, reader, [], body, suffix, (buffer,)))
        return View(name, 0, type_.shape, last_strides(type_.shape))

    def moved(self, value: TensorValue, source: Buffer) -> Kernel:
        """The result as its axes are counted."""
        lowering, type_ = self.lowering, self.lowering.graph.type_of(value)
        axes = axis_vars("x", type_.shape)
        order = [axes[i] for i in last_order(4)]
        at = flatten([variable(v) for v in order], [v.extent for v in order])
        reader = lowering.reader()
        reader.used[source.name] = lowering.as_type(source)
        place = lowering.place(value, [variable(v) for v in axes])
        store = Store(lowering.names[value], place, Load(source.name, at, source.dtype))
        body = nest(axes, Role.PARALLEL, [store])
        return lowering.kernel(self.position, reader, [value], body, "_moved")


def _is_last(axes: tuple[Var, ...], steps: list[int | None], shape: tuple[int, ...]) -> bool:
    wanted = last_strides(shape)
    return all(s == w for v, s, w in zip(axes, steps, wanted, strict=True) if v.extent > 1)
