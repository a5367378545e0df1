"""From a graph to an equal one that costs less on a target, with the proof that they are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from treadle.base.origin import Origin
from treadle.egraph.added import added_rules
from treadle.egraph.cost import cost_of
from treadle.egraph.explain import needed
from treadle.egraph.extract import Extraction, moves_of
from treadle.egraph.graph import Application, EGraph
from treadle.egraph.language import DataRule, own_rules
from treadle.egraph.matching import CompiledRule, compiled
from treadle.egraph.saturate import Limits, Search
from treadle.ir.graph import Graph, GraphBuilder, Output, Value
from treadle.ir.ops.leaves import INPUT
from treadle.kernel.target import Target

USUAL = Limits()


@dataclass(frozen=True, slots=True)
class Optimised:
    """A graph, what it costs by the target's figures before and after, and why it is equal.

    `steps` are the rules that the proof needs, in order, over the nodes of `search`; its first
    nodes are those of the graph as it was.
    """

    graph: Graph
    before: float = 0.0
    after: float = 0.0
    steps: tuple[Application, ...] = ()
    search: EGraph = field(default_factory=EGraph, repr=False)

    @property
    def fired(self) -> Counter[str]:
        return Counter(step.rule for step in self.steps)


@cache
def usual_rules() -> tuple[CompiledRule, ...]:
    """Treadle's own, compiled once."""
    return tuple(map(compiled, own_rules()))


def optimise(
    graph: Graph,
    target: Target,
    more: Sequence[DataRule] = (),
    limits: Limits = USUAL,
    only_exact: bool = False,
) -> Optimised:
    """The cheapest equal graph that is found; the same one where nothing pays.

    Rules are Treadle's own, those that a user added, and `more`; with `only_exact` those of them
    that change no bit.
    """
    every = (*usual_rules(), *map(compiled, (*added_rules(), *more)))
    rules = [r for r in every if r.rule.is_exact or not only_exact]
    egraph, nodes = load(graph)
    originals = len(egraph)
    Search(egraph, rules, limits).run()
    if not egraph.log:
        return Optimised(graph, search=egraph)

    def cost(node: int) -> float:
        head = egraph.heads[egraph.head[node]]
        types = [egraph.types[c] for c in egraph.children[node]]
        return cost_of(head.op, head.attributes, types, egraph.types[node], target)

    roots = [nodes[o.value.node][o.value.output] for o in graph.outputs]
    chosen = Extraction(egraph, roots, cost, originals)
    chosen.improve(moves_of(egraph), target.costs.least_move * chosen.before)
    if chosen.total >= (1 - target.costs.least_gain) * chosen.before:
        return Optimised(graph, chosen.before, chosen.before, (), egraph)
    found = emitted(graph, chosen, nodes)
    steps = needed(egraph, _pairs(chosen, roots))
    return Optimised(found, chosen.before, chosen.total, tuple(steps), egraph)


def load(graph: Graph) -> tuple[EGraph, list[tuple[int, ...]]]:
    """An e-graph of a graph's nodes, and where each result of each node is."""
    egraph = EGraph()
    nodes: list[tuple[int, ...]] = []
    for node in graph.nodes:
        children = tuple([nodes[v.node][v.output] for v in node.operands])
        results = [
            egraph.add(egraph.head_of(node.op, node.attributes, k), children, type_)
            for k, type_ in enumerate(node.types)
        ]
        nodes.append(tuple(results))
    return egraph, nodes


def _pairs(chosen: Extraction, roots: Sequence[int]) -> list[tuple[int, int]]:
    """What must be equal: roots and their choices, and children of choices likewise."""
    graph, choice = chosen.graph, chosen.choice
    pairs = [(r, choice[graph.find(r)]) for r in roots]
    seen: set[int] = set()
    stack = [node for _, node in pairs]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for child in graph.children[node]:
            other = choice[graph.find(child)]
            pairs.append((child, other))
            stack.append(other)
    return pairs


def emitted(graph: Graph, chosen: Extraction, nodes: Sequence[tuple[int, ...]]) -> Graph:
    """The graph of the nodes chosen: old ones in their order, new ones before what reads them."""
    egraph, choice, find = chosen.graph, chosen.choice, chosen.graph.find
    builder = GraphBuilder()
    origins = {r: n.origin for n, results in zip(graph.nodes, nodes, strict=True) for r in results}
    placed: dict[int, Value] = {}

    def place(class_: int, origin: Origin | None) -> Value:
        stack = [(class_, origin)]
        while stack:
            c, given = stack[-1]
            node = choice[c]
            told = origins.get(node) or given
            missing = [x for x in map(find, egraph.children[node]) if x not in placed]
            if missing and c not in placed:
                stack += [(x, told) for x in reversed(missing)]
                continue
            stack.pop()
            if c not in placed:
                head = egraph.heads[egraph.head[node]]
                operands = [placed[find(x)] for x in egraph.children[node]]
                placed[c] = builder.add(head.op, head.attributes, operands, told)[head.output]
        return placed[class_]

    for node, results in zip(graph.nodes, nodes, strict=True):
        for result in results:
            is_used = chosen.reads.get(find(result)) and choice[find(result)] == result
            if is_used or node.op is INPUT:
                place(find(result), node.origin)
    outputs = [
        Output(o.kind, o.name, place(find(nodes[o.value.node][o.value.output]), None))
        for o in graph.outputs
    ]
    return builder.build(outputs, graph.name)
