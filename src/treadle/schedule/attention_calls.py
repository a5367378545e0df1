"""Attention as a library computes it, on tensors where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from treadle.ir.composites import ATTENTION, Attention
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.nodes import Kernel, LibraryCall, Load, View
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import along, axis_vars, flat_index
from treadle.schedule.operands import Site, load_of, reading


def library_attention(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Forward or backward, and copies of operands whose last axis is not contiguous."""
    attributes: Attention = attributes_of(node)
    site, copies = Site(lowering, position), list[Kernel]()
    operands = tuple(_operand(site, v, copies) for v in node.operands)
    every = [TensorValue(position, i) for i in range(len(node.types))]
    results = tuple(_result(lowering, v) for v in every)
    q, k = (lowering.graph.type_of(v).shape for v in node.operands[-3:-1])
    matmuls = 2 if node.op is ATTENTION else 5
    flops = matmuls * 2 * math.prod(q) * k[2] // (2 if attributes.causal else 1)
    numbers = (("scale", float(attributes.scale)), ("causal", float(attributes.causal)))
    reader = reading(lowering, (view.buffer for view in operands))
    parts = {lowering.parts[v].whole: None for v in every if v in lowering.parts}
    made = [*(v for v in every if v not in lowering.parts), *parts]
    body = [LibraryCall(node.op.name, results, operands, numbers, flops)]
    kernel = lowering.kernel(position, reader, made, body)
    return [*copies, replace(kernel, is_standalone=True)]


def _result(lowering: Lowering, value: TensorValue) -> View:
    shape = lowering.graph.type_of(value).shape
    part = lowering.parts.get(value)
    if part is not None:
        length, depth = shape[2:]
        row = lowering.graph.type_of(part.whole).shape[-1]
        strides = (length * row, depth, row, 1)
        return View(lowering.names[part.whole], part.start, shape, strides)
    axes = axis_vars("x", shape)
    index = lowering.address(value, along(axes))
    return _view(Load(lowering.names[value], index, lowering.buffer(value).dtype), shape)


def _operand(site: Site, value: TensorValue, copies: list[Kernel]) -> View:
    """Where an operand lies; a copy of it where its last axis is not contiguous."""
    lowering, type_ = site.lowering, site.lowering.graph.type_of(value)
    axes, pack = axis_vars("x", type_.shape), lowering.target.matmuls.pack
    load = load_of(lowering.reader(), value, axes)
    if load is not None:
        strides = [load.index.factor_of(v) for v in axes]
        is_even = all(s is not None and s % pack == 0 for s in strides[:-1])
        is_packed = type_.rank != 4 or (strides[-1] == 1 and is_even)
        if is_packed and load.index.offset % pack == 0:
            return _view(load, type_.shape)
    name = f"copy{value.node}.{value.output}"
    buffer, kernel = site.copied(value, name, axes, axes, f"_copy{value.node}")
    copies.append(kernel)
    return _view(Load(buffer.name, flat_index(axes), buffer.dtype), type_.shape)


def _view(load: Load, shape: Sequence[int]) -> View:
    """A tensor by its strides; those of axes of one element are filled in."""
    found = [load.index.factor_of(v) or 0 for v in axis_vars("x", shape)]
    reach = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] == 1:
            found[i] = reach
        reach = max(reach, found[i] * shape[i])
    return View(load.buffer, load.index.offset, tuple(shape), tuple(found))
