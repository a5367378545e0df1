"""Indices that are data, looked at: what debugging adds to a graph."""

from __future__ import annotations

from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.ops.indexing import GATHER, SCATTER_ADD, Gather, ScatterAdd
from treadle.ir.ops.reductions import REDUCE_MAX, REDUCE_MIN, Reduce
from treadle.kernel.plan import IndexCheck
from treadle.rules.expansion import expand


def with_index_checks(graph: Graph) -> tuple[Graph, tuple[IndexCheck, ...]]:
    """The graph with the lowest and highest of each index as further results, and their bounds.

    Indices inside scans are held inside, but not looked at.
    """
    plain = expand(graph)
    builder = GraphBuilder()
    for node in plain.nodes:
        builder.copy(node, node.operands)
    outputs = list(plain.outputs)
    checks: list[IndexCheck] = []
    for node in plain.nodes:
        if node.op not in (GATHER, SCATTER_ADD):
            continue
        indices = node.operands[1]
        type_ = plain.type_of(indices)
        if not type_.size:
            continue
        extent = _extent(plain, node.attributes, node.operands[0])
        every = Reduce(tuple(range(type_.rank)))
        for op in (REDUCE_MIN, REDUCE_MAX):
            found = builder.add(op, every, (indices,))[0] if type_.rank else indices
            outputs.append(Output(OutputKind.RESULT, f"index {len(outputs)}", found))
        origin = "" if node.origin is None else str(node.origin)
        checks.append(IndexCheck(node.op.name, extent, origin))
    return builder.build(outputs, graph.name), tuple(checks)


def _extent(graph: Graph, attributes: object, operand: Value) -> int:
    if isinstance(attributes, ScatterAdd):
        return attributes.size
    assert isinstance(attributes, Gather)
    return graph.type_of(operand).shape[attributes.axis]
