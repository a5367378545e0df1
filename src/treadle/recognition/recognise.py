"""`recognise`: the passes over a graph, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from treadle.base.rewrites import Exactness, Recognised
from treadle.ir.control import Call, Scan
from treadle.ir.graph import Graph, Node
from treadle.kernel.target import Target
from treadle.recognition.regions import Flow
from treadle.recognition.scanned import with_scan
from treadle.recognition.search import Found, Search, replaced
from treadle.recognition.unrolled import chains
from treadle.rules.canonical import canonicalise
from treadle.rules.heads import recognise_heads

MOST_CHAINS = 16  # recurrences of a graph: chosen, layers that are unrolled one by one
MOST_ROUNDS = 3  # in which what was found is part of something larger: chosen


def recognised(
    graph: Graph,
    target: Target,
    fired: Counter[str],
    found: list[Recognised],
    is_differentiated: bool = False,
) -> Graph:
    """A canonical graph with composites in place of what is written out; bodies of calls too."""
    search = Search(len(graph.nodes), is_differentiated)
    return _Recognition(target, fired, found, search).run(graph)


class _Recognition:
    """The state of one run: comparisons that were made, and bodies that layers share."""

    def __init__(
        self, target: Target, fired: Counter[str], found: list[Recognised], search: Search
    ):
        self.target, self.fired, self.found, self.search = target, fired, found, search
        self.bodies: dict[Graph, Graph] = {}

    def run(self, graph: Graph) -> Graph:
        graph = self._scanned(self._with_bodies(graph))
        for _ in range(MOST_ROUNDS):
            before = graph
            graph = self._pass(graph, self.search.unary)
            if graph is before:
                break
        graph = self._pass(graph, self.search.convolutions)
        graph = self._pass(graph, self.search.pools)
        graph = self._pass(graph, self.search.losses)
        graph = self._pass(graph, self.search.weights)
        graph = canonicalise(graph) if self.found else graph
        graph = self._pass(graph, lambda g: self.search.attentions(g, self.target))
        return recognise_heads(graph, self.target, self.fired)

    def _scanned(self, graph: Graph) -> Graph:
        """The graph with scans for chains of equal steps."""
        for _ in range(MOST_CHAINS):
            flow = Flow(graph)
            chain = next(chains(flow), None)
            if chain is None:
                break
            origin = graph.nodes[chain.model[0]].origin
            self.found.append(Recognised("scan", Exactness.EXACT, origin))
            self.fired["scan"] += 1
            graph = canonicalise(with_scan(flow, chain))
        return graph

    def _pass(self, graph: Graph, search: Callable[[Graph], list[Found]]) -> Graph:
        found = search(graph)
        if not found:
            return graph
        for match in found:
            origin = graph.nodes[match.root.node].origin
            verdict = match.verdict
            entry = Recognised(match.name, verdict.kind, origin, verdict.status)
            self.found.append(entry)
            self.fired[match.name] += 1
        return replaced(graph, found)

    def _with_bodies(self, graph: Graph) -> Graph:
        nodes = tuple(map(self._with_body, graph.nodes))
        return graph if nodes == graph.nodes else replace(graph, nodes=nodes)

    def _with_body(self, node: Node) -> Node:
        """A scan, or a call without a gradient of its own, with its body recognised."""
        attributes = node.attributes
        if not isinstance(attributes, (Call, Scan)):
            return node
        if isinstance(attributes, Call) and attributes.backward is not None:
            return node
        body = self._recognised(attributes.body)
        is_same = body is attributes.body
        return node if is_same else replace(node, attributes=replace(attributes, body=body))

    def _recognised(self, body: Graph) -> Graph:
        if body not in self.bodies:
            count = sum(self.fired.values()), len(self.found)
            found = self.run(canonicalise(body))
            is_same = count == (sum(self.fired.values()), len(self.found))
            self.bodies[body] = body if is_same else found
        return self.bodies[body]
