"""Rebuilding graphs: the traversal, dead code, replacement, cutting out. Nothing recurses."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from treadle.base.origin import Origin
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value, values_at
from treadle.ir.ops.leaves import INPUT, Leaf


def remove_dead_code(graph: Graph) -> Graph:
    """Only what the outputs need, and every input: inputs are the interface."""
    return without_dead_code(graph)[0]


def without_dead_code(graph: Graph) -> tuple[Graph, list[int]]:
    """The same, and the new position of each node, −1 for those that are gone."""
    needed = bytearray(len(graph.nodes))
    for i in (*graph.inputs, *(o.value.node for o in graph.outputs)):
        needed[i] = True
    for i in range(len(graph.nodes) - 1, -1, -1):
        if needed[i]:
            for v in graph.nodes[i].operands:
                needed[v.node] = True
    if all(needed):
        return graph, list(range(len(graph.nodes)))
    moved: list[int] = []
    nodes: list[Node] = []
    for i, node in enumerate(graph.nodes):
        moved.append(len(nodes) if needed[i] else -1)
        if needed[i]:
            operands = tuple([Value(moved[v.node], v.output) for v in node.operands])
            nodes.append(node if operands == node.operands else node.over(operands))
    outputs = (Output(o.kind, o.name, Value(moved[o.value.node], o.value.output))
               for o in graph.outputs)  # fmt: skip
    return Graph(tuple(nodes), tuple(outputs), graph.name), moved


def replace_values(graph: Graph, replacements: Mapping[Value, Value]) -> Graph:
    """Every use of a key reads its value instead, outputs too. Nodes are sorted; dead ones go.

    Requires types to agree and the result to have no cycle.
    """
    outputs = [Output(o.kind, o.name, _final(replacements, o.value)) for o in graph.outputs]
    operands = [tuple(_final(replacements, v) for v in n.operands) for n in graph.nodes]
    for old, new in replacements.items():
        assert graph.type_of(old) == graph.type_of(new), (old, new)
    roots = [o.value.node for o in outputs] + list(graph.inputs)
    order = _topological(operands, roots)
    builder = GraphBuilder()
    moved: dict[int, int] = {}
    for i in order:
        moved[i] = builder.copy(
            graph.nodes[i], [Value(moved[v.node], v.output) for v in operands[i]]
        )
    final = [Output(o.kind, o.name, Value(moved[o.value.node], o.value.output)) for o in outputs]
    return builder.build(final, graph.name)


def cut(
    graph: Graph,
    inputs: Sequence[tuple[str, Value]],
    outputs: Iterable[Output],
    name: str | None = None,
) -> Graph:
    """The part of a graph that leads from some values to others: a graph of its own.

    Each of `inputs` becomes an `input` of that name, in order, used or not. Whatever else the
    outputs need comes along.
    """
    builder = GraphBuilder()
    moved: dict[Value, Value] = {}
    for label, value in inputs:
        (moved[value],) = builder.add(INPUT, Leaf(label, graph.type_of(value)), ())
    outputs = tuple(outputs)
    # Values that are given need nothing: a node is visited only for outputs that are not.
    operands = [[v for v in n.operands if v not in moved] for n in graph.nodes]
    for i in _topological(operands, [o.value.node for o in outputs if o.value not in moved]):
        node = graph.nodes[i]
        position = builder.copy(node, [moved[v] for v in node.operands])
        for k in range(len(node.types)):
            moved.setdefault(Value(i, k), Value(position, k))
    final = [Output(o.kind, o.name, moved[o.value]) for o in outputs]
    return builder.build(final, name or graph.name)


Visit = Callable[[int, tuple[Value, ...]], tuple[Value, ...]]


def walk(graph: Graph, visit: Visit) -> list[Value]:
    """Visit every node in order, by position; what stands for the graph's outputs in the end.

    A visit gets what the visits before it gave for the node's operands, and gives a value for each
    of the node's results: the traversal behind every pass that builds a graph from another.
    """
    moved: list[tuple[Value, ...]] = []
    for position, node in enumerate(graph.nodes):
        operands = tuple([moved[v.node][v.output] for v in node.operands])
        moved.append(visit(position, operands))
    return [moved[o.value.node][o.value.output] for o in graph.outputs]


def copied(
    builder: GraphBuilder, node: Node, operands: Sequence[Value], origin: Origin | None = None
) -> tuple[Value, ...]:
    """The results of a node that is copied over other operands of the same types."""
    position = builder.copy(node, operands, origin)
    return values_at(position, len(node.types))


def inline_into(
    builder: GraphBuilder, graph: Graph, leaves: Mapping[str, Value], origin: Origin | None = None
) -> list[Value]:
    """Copy a graph's nodes into a builder, named leaves bound to values; where its outputs are.

    Nodes keep their origin unless another is given.
    """

    def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node = graph.nodes[position]
        bound = leaves.get(node.attributes.name) if isinstance(node.attributes, Leaf) else None
        return (bound,) if bound is not None else copied(builder, node, operands, origin)

    return walk(graph, visit)


def use_counts(graph: Graph) -> Counter[Value]:
    """How often each value is read, by nodes and as an output."""
    found = Counter(v for n in graph.nodes for v in n.operands)
    found.update(o.value for o in graph.outputs)
    return found


def _final(replacements: Mapping[Value, Value], value: Value) -> Value:
    while value in replacements:
        value = replacements[value]
    return value


def _topological(operands: Sequence[Sequence[Value]], roots: Iterable[int]) -> list[int]:
    """What the roots need, operands first, otherwise in the old order (so text stays stable)."""
    needed: set[int] = set()
    stack = list(roots)
    while stack:
        i = stack.pop()
        if i not in needed:
            needed.add(i)
            stack.extend(v.node for v in operands[i])
    if all(v.node < i for i in needed for v in operands[i]):
        return sorted(needed)
    users: dict[int, list[int]] = {i: [] for i in needed}
    waiting: dict[int, int] = {}
    for i in needed:
        sources = {v.node for v in operands[i]}
        waiting[i] = len(sources)
        for source in sources:
            users[source].append(i)
    ready = [i for i in needed if waiting[i] == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for user in users[i]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, user)
    assert len(order) == len(needed), "the replacement made a cycle"
    return order
