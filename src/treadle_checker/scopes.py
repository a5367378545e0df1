"""Graphs in graphs: what a call's body computes, and a scan's, beside what is around them.

A buffer may hold a value of a graph, and another one of a body in it. Both are values of one graph
that has the body in the call's place. A scan stays, and before it stands its body as the first
iteration computes it; what of this is made of constants alone is the same in all iterations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from treadle_checker.reading import Rejected
from treadle_checker.types import Graph, Node, Value

MOST_NODES = 2**18
_LAST = re.compile(r"((?:[a-z]+[0-9]+:)*)(call|scan)([0-9]{1,9}):", re.ASCII)


def around(scope: str) -> tuple[str, str, int]:
    """The scope around another, and of which of its nodes it is: a call or a scan."""
    found = _LAST.fullmatch(scope)
    if found is None:
        raise Rejected(f"{scope[:50]!r} is no scope")
    return found[1], found[2], int(found[3])


@dataclass(frozen=True, eq=False)
class Opened:
    """A graph with others in it, and which of its values theirs are."""

    graph: Graph
    places: Mapping[tuple[str, Value], Value]

    def place(self, scope: str, value: Value) -> Value:
        if (scope, value) not in self.places:
            raise Rejected(f"%{value.node}.{value.output} is no value of {scope or 'the graph'}")
        return self.places[scope, value]


class Scopes:
    """A program's graph and those of its scans, by scope, with the bodies that are named."""

    def __init__(self, graphs: Mapping[str, Graph], named: Iterable[str]):
        self.graphs = graphs
        inside: dict[str, dict[int, str]] = {scope: {} for scope in graphs}
        for scope in {*named, *graphs} - {""}:
            outer, _, position = around(scope)
            self.body_of(scope)
            inside[outer][position] = scope
        self.opened = {scope: self._opened(scope, inside[scope]) for scope in graphs}

    def body_of(self, scope: str) -> tuple[Node, Graph]:
        """The node that a scope belongs to, and the graph of its body."""
        outer, kind, position = around(scope)
        nodes = self.graphs[outer].nodes if outer in self.graphs else ()
        if position >= len(nodes) or nodes[position].op != kind:
            raise Rejected(f"{scope} belongs to no {kind}")
        called = nodes[position].attributes["body"]
        body = called if kind == "call" else self.graphs.get(scope)
        if body is None or _form(body) != _form(called):
            raise Rejected(f"{scope} has no graph that fits")
        return nodes[position], body

    def _opened(self, name: str, inside: Mapping[int, str]) -> Opened:
        nodes, places = list[Node](), dict[tuple[str, Value], Value]()

        def put(scope: str, graph: Graph, given: Mapping[int, Value]) -> None:
            if len(nodes) + len(graph.nodes) > MOST_NODES:
                raise Rejected("there are too many nodes in bodies")
            for i, node in enumerate(graph.nodes):
                if i in given:
                    places[scope, Value(i)] = given[i]
                    continue
                operands = tuple([places[scope, v] for v in node.operands])
                results = range(len(node.types))
                if scope == name and i in inside:
                    body, a = self.body_of(inside[i])[1], node.attributes
                    known = a["constants"] + a["carries"] if node.op == "scan" else len(operands)
                    put(inside[i], body, dict(zip(body.inputs, operands[:known], strict=False)))
                    if node.op == "call":
                        for k, (_, _, v) in enumerate(body.outputs):
                            places[scope, Value(i, k)] = places[inside[i], v]
                        continue
                places.update({(scope, Value(i, k)): Value(len(nodes), k) for k in results})
                nodes.append(node._replace(operands=operands))

        graph = self.graphs[name]
        put(name, graph, {})
        outputs = tuple((kind, told, places[name, v]) for kind, told, v in graph.outputs)
        return Opened(replace(graph, nodes=tuple(nodes), outputs=outputs), places)


def _form(body: Graph) -> object:
    """What a body is given and gives, in order."""
    given = [(body.nodes[i].attributes["name"], body.nodes[i].types) for i in body.inputs]
    return given, [output[:2] for output in body.outputs], body.output_types
