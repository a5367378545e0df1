"""A product that only a cross-entropy reads becomes one composite with it: logits are then never
stored whole. The composite says what the product rounds its result to, so the values are the same.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from treadle.ir import composites as c
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.ops.shaping import RESHAPE, Reshape
from treadle.ir.rewrite import remove_dead_code

LEAST_CLASSES = 512
LEAST_LOGITS = 1 << 22  # elements: fewer are better kept


@dataclass(frozen=True, slots=True)
class _Head:
    """The product's operands: hidden states and a weight (classes, features)."""

    x: Value
    weight: Value
    rounded: bool


def with_heads(graph: Graph, least: int = LEAST_LOGITS) -> Graph:
    """The graph with `linear_cross_entropy` for logits of at least so many elements."""
    found = {
        i: head
        for i, node in enumerate(graph.nodes)
        if node.op is c.CROSS_ENTROPY and (head := _head(graph, node, least)) is not None
    }
    if not found:
        return graph
    builder = GraphBuilder()
    moved: list[tuple[Value, ...]] = []
    for i, node in enumerate(graph.nodes):
        operands = [moved[v.node][v.output] for v in node.operands]
        if i not in found:
            position = builder.copy(node, operands)
            moved.append(tuple(Value(position, k) for k in range(len(node.types))))
            continue
        x, weight = (moved[v.node][v.output] for v in (found[i].x, found[i].weight))
        moved.append((_rows(builder, node, x, weight, operands[1], found[i].rounded),))
    outputs = [Output(o.kind, o.name, moved[o.value.node][o.value.output]) for o in graph.outputs]
    return remove_dead_code(builder.build(outputs, graph.name))


def _rows(
    builder: GraphBuilder, node: Node, x: Value, weight: Value, targets: Value, rounded: bool
) -> Value:
    """The loss of each row, rows in the shape that they have."""
    assert isinstance(node.attributes, c.CrossEntropy)
    attributes = c.HeadCrossEntropy(node.attributes.label_smoothing, rounded)
    shape, width = node.types[0].shape, builder.type_of(x).shape[-1]
    count = math.prod(shape)
    flat = _reshaped(builder, x, (count, width), node)
    index = _reshaped(builder, targets, (count,), node)
    operands = (flat, weight, index)
    (rows,) = builder.add(c.LINEAR_CROSS_ENTROPY, attributes, operands, node.origin)
    return _reshaped(builder, rows, shape, node)


def _reshaped(builder: GraphBuilder, value: Value, shape: tuple[int, ...], node: Node) -> Value:
    if builder.type_of(value).shape == shape:
        return value
    return builder.add(RESHAPE, Reshape(shape), (value,), node.origin)[0]


def _head(graph: Graph, node: Node, least: int) -> _Head | None:
    """The product that only this cross-entropy reads, perhaps through a cast to more bytes."""
    uses = Counter(v for n in graph.nodes for v in n.operands)
    uses.update(o.value for o in graph.outputs)
    logits = node.operands[0]
    shape = graph.type_of(logits).shape
    if shape[-1] < LEAST_CLASSES or math.prod(shape) < least or uses[logits] != 1:
        return None
    made, wide = graph.nodes[logits.node], graph.type_of(logits).dtype
    if made.op is e.CAST:
        logits = made.operands[0]
        made = graph.nodes[logits.node]
        if uses[logits] != 1 or graph.type_of(logits).dtype.itemsize >= wide.itemsize:
            return None
    if made.op is not CONTRACT:
        return None
    assert isinstance(made.attributes, Contraction)
    of_x, of_weight, of_logits = made.attributes.labels
    x, weight = made.operands
    dtypes = {graph.type_of(v).dtype for v in (x, weight, logits)}
    is_linear = len(of_weight) == 2 and of_weight == of_logits[-1] + of_x[-1]
    is_linear = is_linear and of_logits[:-1] == of_x[:-1]
    if not is_linear or len(dtypes) != 1 or not dtypes.pop().is_float:
        return None
    return _Head(x, weight, graph.type_of(logits).dtype is not wide)
