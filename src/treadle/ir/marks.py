"""Which nodes came of which: nodes are marked before a pass, by where they came from."""

from __future__ import annotations

from dataclasses import replace

from treadle.base.origin import Origin
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.types import TensorType

Pairs = tuple[tuple[Value, Value], ...]


def marked(graph: Graph) -> Graph:
    """The same graph; the origin of each node knows its position."""
    return replace(graph, nodes=tuple(_marked(n, i) for i, n in enumerate(graph.nodes)))


def _marked(node: Node, position: int) -> Node:
    o = node.origin
    if o is None:
        return node
    return Node(
        node.op,
        node.attributes,
        node.operands,
        node.types,
        Origin(o.file, o.line, o.function, position),
    )


def pairs_of(before: Graph, after: Graph) -> Pairs:
    """Values before a pass, and those after it that they may be: nodes keep marks they came with.

    What a rule has put in a node's place has its mark, and so has what that is made over: of values
    of one type the last is the one, if any is.
    """
    found: dict[tuple[Value, TensorType], tuple[Value, Value]] = {}
    for position, node in enumerate(after.nodes):
        mark = -1 if node.origin is None else node.origin.mark
        if not 0 <= mark < len(before.nodes):
            continue
        types = before.nodes[mark].types
        for output, type_ in enumerate(node.types):
            same = [k for k, a in enumerate(types) if _alike(a, type_)]
            k = output if output in same else same[-1] if same else -1
            if k >= 0:
                found[Value(mark, k), type_] = Value(mark, k), Value(position, output)
    return tuple(sorted(found.values(), key=lambda pair: pair[1]))


def _alike(a: TensorType, b: TensorType) -> bool:
    return a.shape == b.shape and a.dtype.kind == b.dtype.kind
