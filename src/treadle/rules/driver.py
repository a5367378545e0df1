"""One forward pass over a graph that applies rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.op import Types
from treadle.ir.ops.leaves import Leaf
from treadle.ir.rewrite import copied, inline_into, remove_dead_code, use_counts, walk
from treadle.kernel.target import CPU, Target
from treadle.rules.pattern import captures
from treadle.rules.rule import Body, Match, RuleSet

# Whether a node over operands of these types is left as it is.
Keeps = Callable[[Node, Types, Target], bool]
Values = tuple[Value, ...]


def rewrite(
    graph: Graph,
    rules: RuleSet,
    target: Target = CPU,
    fired: Counter[str] | None = None,
    keeps: Keeps | None = None,
) -> Graph:
    """The graph after one pass of rules, without dead code.

    Operands are rewritten before the nodes that read them, and patterns are matched in the new
    graph. What a rule builds is not matched again, but for graphs that take a node's place. `fired`
    counts rules by name; `keeps` says which nodes stay, whatever the rules say. Bodies of scans
    and calls that stay are left alone.
    """
    return _Rewriting(rules, target, Counter() if fired is None else fired, keeps).run(graph)


class _Rewriting:
    """The state of one pass over a graph and the graphs that take the place of its nodes."""

    def __init__(
        self, rules: RuleSet, target: Target, fired: Counter[str], keeps: Keeps | None
    ) -> None:
        self.rules, self.target, self.fired, self.keeps = rules, target, fired, keeps
        self.bodies: dict[Graph, Graph] = {}  # layers share them

    def run(self, graph: Graph) -> Graph:
        if not any(self.rules.candidates(n.op) for n in graph.nodes):
            return remove_dead_code(graph)
        builder = GraphBuilder()
        before = use_counts(graph) if self.rules.needs_uses else Counter[Value]()
        uses: Counter[Value] = Counter()  # of values in the new graph

        def visit(position: int, operands: Values) -> Values:
            values = self.moved(builder, graph.nodes[position], operands, uses)
            if before:
                for i, value in enumerate(values):
                    uses[value] += before[Value(position, i)]
            return values

        values = walk(graph, visit)
        outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
        return remove_dead_code(builder.build(outputs, graph.name))

    def moved(
        self, builder: GraphBuilder, node: Node, operands: Values, uses: Counter[Value]
    ) -> Values:
        """The values in the new graph that stand for a node's results."""
        candidates = self.rules.candidates(node.op)
        if not candidates or self.is_kept(builder, node, operands):
            return copied(builder, node, operands)
        root = node if operands == node.operands else node.over(operands)
        for rule, pattern in candidates:
            found = captures(builder, pattern, root, uses)
            if found is None:
                continue
            match = Match(builder, root, found, self.target)
            if rule.condition(match):
                self.fired[rule.name] += 1
                values = self.built(builder, root, rule.build(match, builder))
                types = tuple(map(builder.type_of, values))
                assert types == root.types, f"{rule.name} gives {types} for {root.types}"
                return values
        return copied(builder, node, operands)

    def is_kept(self, builder: GraphBuilder, node: Node, operands: Values) -> bool:
        if self.keeps is None:
            return False
        return self.keeps(node, tuple(map(builder.type_of, operands)), self.target)

    def built(self, builder: GraphBuilder, root: Node, found: Value | Body) -> Values:
        if isinstance(found, Value):
            return (found,)
        inner = self.bodies.get(found.graph)
        if inner is None:
            inner = self.bodies[found.graph] = self.run(found.graph)
        names = (_name(inner.nodes[i]) for i in inner.inputs)
        leaves = dict(zip(names, found.operands, strict=True))
        return tuple(inline_into(builder, inner, leaves, root.origin))


def _name(node: Node) -> str:
    assert isinstance(node.attributes, Leaf)
    return node.attributes.name
