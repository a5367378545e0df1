"""Invariants of a graph, checked between stages. An error names the node and the user's line."""

from __future__ import annotations

from treadle.base.errors import GraphError, TreadleError
from treadle.ir.control import bodies
from treadle.ir.graph import Graph, Node, OutputKind, Value
from treadle.ir.op import OPS, infer_types
from treadle.ir.ops.leaves import Leaf

# Kinds whose names must be unique among themselves.
_UNIQUE = (
    OutputKind.CAPTURE,
    OutputKind.METRIC,
    OutputKind.WEIGHT,
    OutputKind.UPDATE,
    OutputKind.GRADIENT,
)


def verify(graph: Graph) -> Graph:
    """The graph itself if all invariants hold; a GraphError otherwise."""
    pending, seen = [graph], set[Graph]()  # bodies: layers share them
    while pending:
        current = pending.pop()
        _verify_one(current)
        for attributes in {id(n.attributes): n.attributes for n in current.nodes}.values():
            inner = [b for b in bodies(attributes) if b not in seen]
            seen.update(inner)
            pending.extend(inner)
    return graph


def _verify_one(graph: Graph) -> None:
    names: set[str] = set()
    for position, node in enumerate(graph.nodes):
        _verify_node(graph, position, node)
        if isinstance(node.attributes, Leaf):
            if node.attributes.name in names:
                raise _broken(
                    position, node, f"the leaf name {node.attributes.name!r} is used twice"
                )
            names.add(node.attributes.name)
    taken: set[tuple[OutputKind, str]] = set()
    for output in graph.outputs:
        if not _exists(graph, output.value, len(graph.nodes)):
            raise GraphError(
                "verify",
                f"output {output.name!r} of {graph.name} reads {output.value}, which is not there",
            )
        key = (output.kind, output.name)
        if output.kind in _UNIQUE and key in taken:
            raise GraphError(
                "verify", f"{output.kind.value} {output.name!r} of {graph.name} is given twice"
            )
        taken.add(key)


def _verify_node(graph: Graph, position: int, node: Node) -> None:
    if OPS.get(node.op.name) is not node.op:
        raise _broken(position, node, "the op is not in the table")
    if type(node.attributes) is not node.op.attributes:
        found = type(node.attributes).__name__
        raise _broken(position, node, f"attributes are {found}, not {node.op.attributes.__name__}")
    nodes, given = graph.nodes, []
    for at, output in node.operands:  # there are many: each is looked at once, and here
        held = nodes[at].types if 0 <= at < position else ()
        if not 0 <= output < len(held):
            told = f"operand {Value(at, output)} does not come before it"
            raise _broken(position, node, told)
        given.append(held[output])
    try:
        types = infer_types(node.op, node.attributes, tuple(given))
    except TreadleError as error:
        raise _broken(position, node, f"its type rule rejects it: {error}") from error
    if types != node.types:
        raise _broken(position, node, f"its types are {node.types}, the rule says {types}")


def _exists(graph: Graph, value: Value, before: int) -> bool:
    node, output = value
    return 0 <= node < before and 0 <= output < len(graph.nodes[node].types)


def _broken(position: int, node: Node, cause: str) -> GraphError:
    return GraphError("verify", f"node %{position} = {node.op}: {cause}", origin=node.origin)
