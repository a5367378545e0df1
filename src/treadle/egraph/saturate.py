"""Applying rules to an e-graph until nothing new is found, or a count is reached.

Nothing depends on time: the same graph gives the same result. After the first round only classes
that changed are looked at, and those above them as far as patterns are deep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treadle.base.errors import TreadleError
from treadle.egraph.attributes import attributes_of
from treadle.egraph.graph import Application, EGraph
from treadle.egraph.matching import CompiledRule, Found, Made, Names, matches, needs


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts at which a search ends: rounds, and new nodes for each of the graph's."""

    rounds: int = 6
    growth: float = 1.0
    least_nodes: int = 1000


Sides = list[tuple[int, int]]  # nodes whose equality an application rests on
Needs = tuple[tuple[tuple[int, int], ...], ...]
ByOp = dict[int, list[tuple[CompiledRule, Needs]]]


@dataclass(slots=True)
class Search:
    """Rules on their way through an e-graph."""

    graph: EGraph
    rules: Sequence[CompiledRule]
    limits: Limits = Limits()
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def run(self) -> None:
        """Requires a canonical graph: rules of that set are tried on what the others make."""
        graph, limits = self.graph, self.limits
        most = len(graph) + max(limits.least_nodes, int(limits.growth * len(graph)))
        for rule in self.rules:
            if rule.rule.member:
                self._apply_to_each(rule)
        graph.rebuild()
        single = [r for r in self.rules if not r.rule.member]
        tried = self._by_op([r for r in single if r.rule.set != "canonical"])
        roots: Iterable[int] = range(len(graph))
        for _ in range(limits.rounds):
            every = [m for node in roots for m in self._matches(tried, node)]
            before = len(graph.log)
            graph.changed.clear()
            for rule, node, found in every:
                if len(graph) < most:
                    self._apply(rule, node, found)
            graph.rebuild()
            if len(graph.log) == before or len(graph) >= most:
                return
            tried = self._by_op(single)
            roots = self._near_changes()

    def _by_op(self, rules: Sequence[CompiledRule]) -> ByOp:
        """Rules by the bit of their root's op, each with what its operands need."""
        found: ByOp = {}
        for rule in rules:
            root = rule.sources[0]
            row = (rule, needs(self.graph, root))
            found.setdefault(self.graph.bit_of(root.op), []).append(row)
        return found

    def _near_changes(self) -> list[int]:
        """Nodes whose matches may be new, in order."""
        graph, find = self.graph, self.graph.find
        near = {find(c) for c in graph.changed}
        graph.changed.clear()
        edge = near
        for _ in range(max((r.depth for r in self.rules), default=1) - 1):
            edge = {find(user) for c in edge for user in graph.users[c]} - near
            near |= edge
        return sorted(node for c in near for node in graph.members[c])

    def _matches(self, rules: ByOp, node: int) -> Iterator[tuple[CompiledRule, int, Found]]:
        graph = self.graph
        tried = rules.get(graph.heads[graph.head[node]].bit)
        if tried is None:
            return
        ops = [graph.ops[graph.find(c)] for c in graph.children[node]]
        for rule, orders in tried:
            for wanted in orders:
                if all(i < len(ops) and ops[i] & bit for i, bit in wanted):
                    for found in matches(graph, rule.sources[0], node, {}):
                        yield rule, node, found
                    break

    def _apply(self, rule: CompiledRule, node: int, found: Found) -> None:
        key = (rule.rule.name, found.matched)
        if key in self._seen:
            return
        self._seen.add(key)
        sides = list(found.sides)
        result = self._result(rule, node, found.names, sides)
        if result is not None:
            self._merge(rule, (node,), (result,), found.matched, sides)

    def _result(self, rule: CompiledRule, root: int, found: Names, sides: Sides) -> int | None:
        """The node that takes the root's place, if conditions hold and it has the root's type."""
        graph = self.graph
        try:
            names = bindings(graph, rule, root, found)
            if names is None:
                return None
            result = build(graph, rule.targets[0], names, found, sides)
        except (TreadleError, IndexError, ValueError):
            return None  # a replacement without a type, or an expression without a value
        return result if graph.types[result] == graph.types[root] else None

    def _merge(
        self,
        rule: CompiledRule,
        roots: tuple[int, ...],
        results: tuple[int, ...],
        matched: tuple[int, ...],
        sides: Sides,
    ) -> None:
        step = Application(rule.rule.name, roots, results, matched, tuple(sides))
        merged = [self.graph.merge(a, b, step) for a, b in zip(roots, results, strict=True)]
        if any(merged):
            self.graph.log.append(step)

    def _apply_to_each(self, rule: CompiledRule) -> None:
        """A rule about several nodes at once, which are looked for in the graph as it was."""
        member = rule.rule.member
        families: dict[object, list[tuple[int, Found]]] = {}
        for node in self.graph.nodes_of(rule.sources[0].op):
            for found in matches(self.graph, rule.sources[0], node, {}):
                same = {n: v for n, v in found.names.items() if n != member}
                families.setdefault(tuple(sorted(same.items())), []).append((node, found))
        for family in families.values():
            self._apply_to_family(rule, family)

    def _apply_to_family(self, rule: CompiledRule, family: list[tuple[int, Found]]) -> None:
        member = rule.rule.member
        tensors = [found.names[member] for _, found in family]
        if len(set(tensors)) < 2:
            return
        results: list[int] = []
        sides = [pair for _, found in family for pair in found.sides]
        for i, (node, found) in enumerate(family):
            more = {f"{member}...": tuple(tensors), f"{member}.before": tuple(tensors[:i])}
            result = self._result(rule, node, {**found.names, **more}, sides)
            if result is None:
                return
            results.append(result)
        matched = tuple(n for _, found in family for n in found.matched)
        self._merge(rule, tuple(n for n, _ in family), tuple(results), matched, sides)


def bindings(graph: EGraph, rule: CompiledRule, root: int, found: Names) -> Names | None:
    """Names as expressions see them, tensors by their types; None where a condition fails."""
    types = graph.types
    names = {n: types[v] if n in rule.tensors else v for n, v in found.items()}
    names["root"] = types[root]
    if rule.rule.member:
        for key in (f"{rule.rule.member}...", f"{rule.rule.member}.before"):
            names[key] = tuple(types[v] for v in found[key])
    for name, compute in rule.lets:
        names[name] = compute(names)
    return names if all(holds(names) for holds in rule.conditions) else None


def build(graph: EGraph, made: Made | str, names: Names, nodes: Names, sides: Sides) -> int:
    """The node of a replacement, whose operands are nodes by name.

    It may be one that was there, over operands that are equal to those asked for: that is noted.
    """
    if isinstance(made, str):
        return int(nodes[made])
    given = {field: compute(names) for field, compute in made.fields}
    operands: list[int] = []
    for part in made.operands:
        if isinstance(part, str) and part.endswith("..."):
            operands += nodes[part]
        else:
            operands.append(build(graph, part, names, nodes, sides))
    node = graph.add(graph.head_of(made.op, attributes_of(made.op, given)), tuple(operands))
    known = graph.children[node]
    if known != tuple(operands):
        is_crossed = any(
            graph.find(a) != graph.find(b) for a, b in zip(operands, known, strict=True)
        )
        sides += zip(operands, known[::-1] if is_crossed else known, strict=True)
    return node
