"""Composites and calls replaced by what they are made of, so that only primitives remain."""

from __future__ import annotations

from treadle.ir.composites import MAX_POOL, definition_graph
from treadle.ir.control import CALL, Call
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.ops.leaves import Leaf
from treadle.ir.ops.reductions import ARGMAX, REDUCE_MAX, ArgReduce, Reduce
from treadle.ir.rewrite import inline_into, remove_dead_code


def expand(graph: Graph) -> Graph:
    """The same graph in primitives. Nothing recurses: definitions are expanded as they come."""
    builder = GraphBuilder()
    moved: list[tuple[Value, ...]] = []
    for node in graph.nodes:
        operands = [moved[v.node][v.output] for v in node.operands]
        body = _body(node, builder, operands)
        if body is None:
            position = builder.copy(node, operands)
            moved.append(tuple(Value(position, i) for i in range(len(node.types))))
        else:
            names = (_leaf_name(body.nodes[i]) for i in body.inputs)
            leaves = dict(zip(names, operands, strict=True))
            moved.append(tuple(inline_into(builder, expand(body), leaves, node.origin)))
    outputs = [Output(o.kind, o.name, moved[o.value.node][o.value.output]) for o in graph.outputs]
    return remove_dead_code(builder.build(outputs, graph.name))


def _body(node: Node, builder: GraphBuilder, operands: list[Value]) -> Graph | None:
    if node.op.is_composite:
        types = tuple(builder.type_of(v) for v in operands)
        body = definition_graph(node.op, node.attributes, types)
        return _by_maximum(body) if node.op is MAX_POOL else body
    if node.op is CALL:
        assert isinstance(node.attributes, Call)
        return node.attributes.body
    return None


def _leaf_name(node: Node) -> str:
    assert isinstance(node.attributes, Leaf)
    return node.attributes.name


def _by_maximum(body: Graph) -> Graph:
    """A pool's definition takes the first of the greatest; its value is the maximum, no more."""
    node = next(n for n in body.nodes if n.op is ARGMAX)
    assert isinstance(node.attributes, ArgReduce)
    builder = GraphBuilder()
    moved: list[Value] = []
    for source in body.nodes[: node.operands[0].node + 1]:
        moved.append(Value(builder.copy(source, [moved[v.node] for v in source.operands])))
    windows = moved[node.operands[0].node]
    (value,) = builder.add(REDUCE_MAX, Reduce((node.attributes.axis,)), (windows,))
    output = body.outputs[0]
    return builder.build([Output(output.kind, output.name, value)], body.name)
