"""Attention as a library computes it, on tensors where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from treadle.ir.composites import ATTENTION, Attention
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Var, constant, flatten, variable
from treadle.kernel.nodes import Buffer, Kernel, Library, Role, Store, View
from treadle.schedule.labels import plain_load
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import nest


def library_attention(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Forward or backward, and copies of operands whose last axis does not lie together."""
    attributes: Attention = attributes_of(node)
    writer = _Views(lowering, position)
    operands = tuple(writer.operand(v) for v in node.operands)
    results = tuple(writer.result(TensorValue(position, i)) for i in range(len(node.types)))
    q, k = (lowering.graph.type_of(v).shape for v in node.operands[-3:-1])
    products = 2 if node.op is ATTENTION else 5
    flops = products * 2 * math.prod(q) * k[2] // (2 if attributes.causal else 1)
    numbers = (("scale", float(attributes.scale)), ("causal", float(attributes.causal)))
    reader = lowering.reader()
    for view in operands:
        reader.used[view.buffer] = lowering.as_type(lowering.buffers[view.buffer])
    every = [TensorValue(position, i) for i in range(len(node.types))]
    parts = {lowering.parts[v].whole: None for v in every if v in lowering.parts}
    made = [*(v for v in every if v not in lowering.parts), *parts]
    body = [Library(node.op.name, results, operands, numbers, flops)]
    kernel = lowering.kernel(position, reader, made, body)
    return [*writer.copies, replace(kernel, is_whole=True)]


class _Views:
    def __init__(self, lowering: Lowering, position: int):
        self.lowering, self.position = lowering, position
        self.copies: list[Kernel] = []

    def result(self, value: TensorValue) -> View:
        shape = self.lowering.graph.type_of(value).shape
        axes = [Var(f"x{i}", n) for i, n in enumerate(shape)]
        part = self.lowering.parts.get(value)
        if part is not None:
            length, depth = shape[2:]
            row = self.lowering.graph.type_of(part.whole).shape[-1]
            name = self.lowering.names[part.whole]
            return View(name, part.start, shape, (length * row, depth, row, 1))
        index = self.lowering.place(value, [variable(v) for v in axes])
        steps = tuple(index.factor_of(v) or 0 for v in axes)
        return View(self.lowering.names[value], 0, shape, _whole(shape, steps))

    def operand(self, value: TensorValue) -> View:
        """Where an operand is; a copy of it where its last axis does not lie together."""
        shape = self.lowering.graph.type_of(value).shape
        axes = [Var(f"x{i}", n) for i, n in enumerate(shape)]
        reader = self.lowering.reader()
        load = plain_load(reader, reader.at(value, tuple(map(variable, axes))))
        if load is None:
            return self._copied(value, axes)
        steps = tuple(load.index.factor_of(v) for v in axes)
        if len(shape) == 4 and (steps[-1] != 1 or any(s is None or s % 8 for s in steps[:-1])):
            return self._copied(value, axes)
        if load.index.offset % 8:
            return self._copied(value, axes)
        strides = _whole(shape, tuple(s or 0 for s in steps))
        return View(load.buffer, load.index.offset, shape, strides)

    def _copied(self, value: TensorValue, axes: Sequence[Var]) -> View:
        lowering, type_ = self.lowering, self.lowering.graph.type_of(value)
        name = f"{lowering.prefix}b{self.position}.whole{value.node}.{value.output}"
        buffer = lowering.buffers[name] = Buffer(name, type_.dtype, type_.size)
        reader = lowering.reader()
        element = reader.at(value, tuple(map(variable, axes)))
        place = flatten([variable(v) for v in axes], type_.shape)
        body = nest(axes, Role.PARALLEL, [*reader.lets, Store(name, place, element)])
        suffix = f"_whole{value.node}"
        self.copies.append(lowering.kernel(self.position, reader, [], body, suffix, (buffer,)))
        steps = tuple(place.factor_of(v) or 0 for v in axes)
        return View(name, constant(0).offset, type_.shape, _whole(type_.shape, steps))


def _whole(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """Steps with those of axes of one element filled in."""
    found, size = list(steps), 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] == 1:
            found[i] = size
        size = max(size, found[i] * shape[i])
    return tuple(found)
