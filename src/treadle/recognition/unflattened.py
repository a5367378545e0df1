"""Elements that are taken from a flattened matrix by row · columns + column, taken row by row.

That is how x[rows, columns] is traced. Columns are in range: what they index says so.
"""

from __future__ import annotations

import numpy as np

from treadle.ir.graph import Graph, GraphBuilder, Output, Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.indexing import GATHER, Gather
from treadle.ir.ops.shaping import RESHAPE, Reshape
from treadle.ir.rewrite import copied, remove_dead_code, walk
from treadle.recognition.masks import known
from treadle.rules.pattern import number_of


def unflattened(graph: Graph) -> Graph:
    """An equal graph that takes an element of each row where rows come in order."""
    if not any(n.op is GATHER for n in graph.nodes):
        return graph
    builder = GraphBuilder()

    def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node = graph.nodes[position]
        if node.op is GATHER and node.attributes == Gather(0):
            found = _of_rows(builder, *operands)
            if found is not None:
                return (found,)
        return copied(builder, node, operands)

    values = walk(graph, visit)
    outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
    return remove_dead_code(builder.build(outputs, graph.name))


def _of_rows(builder: GraphBuilder, flat: Value, index: Value) -> Value | None:
    source = builder.nodes[flat.node]
    total = builder.nodes[index.node]
    shape = builder.type_of(source.operands[0]).shape if source.op is RESHAPE else ()
    if len(shape) != 2 or builder.type_of(index).shape != shape[:1] or total.op is not e.ADD:
        return None
    for rows, columns in (total.operands, total.operands[::-1]):
        if _is_start_of_rows(builder, rows, *shape):
            attributes = Reshape((shape[0], 1))
            (column,) = builder.add(RESHAPE, attributes, (columns,))
            (taken,) = builder.add(GATHER, Gather(1, 1), (source.operands[0], column))
            return builder.add(RESHAPE, Reshape(shape[:1]), (taken,))[0]
    return None


def _is_start_of_rows(builder: GraphBuilder, value: Value, count: int, columns: int) -> bool:
    """Whether a value is 0, columns, 2 · columns, …"""
    node = builder.nodes[value.node]
    factors = [number_of(builder, v) for v in node.operands]
    if node.op is not e.MUL or columns not in factors:
        return False
    numbers = known(builder, value, {})
    return numbers is not None and np.array_equal(numbers, np.arange(count) * columns)
