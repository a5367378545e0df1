"""Rules as values: a name, a statement, a pattern, a condition, a builder and a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from treadle.ir import literal
from treadle.ir.graph import Graph, GraphBuilder, Node, Value
from treadle.ir.op import Op
from treadle.ir.types import TensorType
from treadle.kernel.target import Target
from treadle.rules.pattern import Nodes, Root, in_each_order, is_root, needs_uses, number_of


class Exactness(Enum):
    """How near the two sides of a rule are."""

    BITWISE = "the same bits"
    ROUNDING = "equal over the reals; rounding, or the sign of a zero, may differ"


@dataclass(frozen=True, slots=True)
class Match:
    """Where a rule's pattern was found, and what its names stand for."""

    graph: Nodes
    root: Node  # its operands are in the graph; it may not be there itself
    values: Mapping[str, Value]
    target: Target

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def node(self, name: str) -> Node:
        return self.graph.nodes[self.values[name].node]

    def type_of(self, name: str) -> TensorType:
        return self.graph.type_of(self.values[name])

    def number(self, name: str) -> literal.Number:
        found = number_of(self.graph, self.values[name])
        assert found is not None, f"{name} is no number"
        return found

    @property
    def type(self) -> TensorType:
        """Of the root's first result."""
        return self.root.types[0]


@dataclass(frozen=True, slots=True)
class Body:
    """A graph in place of a node, its inputs bound to values in order.

    The driver rewrites it by the same rules before its nodes are copied.
    """

    graph: Graph
    operands: tuple[Value, ...]


Condition = Callable[[Match], bool]
Build = Callable[[Match, GraphBuilder], Value | Body]


def always(match: Match) -> bool:
    """always"""
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """What matches the pattern, under the condition, is what the builder makes.

    The condition's docstring says it in words, for the list of rules.
    """

    name: str
    statement: str
    pattern: Root
    build: Build
    condition: Condition = always
    exactness: Exactness = Exactness.BITWISE


def take_x(match: Match, builder: GraphBuilder) -> Value:
    """What the pattern calls x."""
    return match["x"]


Candidate = tuple[Rule, Root]


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules that are applied together. Of several that match, the first one is taken."""

    name: str
    rules: tuple[Rule, ...]
    _by_op: dict[Op, tuple[Candidate, ...]] = field(default_factory=dict, compare=False, repr=False)

    def candidates(self, op: Op) -> tuple[Candidate, ...]:
        """Rules whose root may be the op, each with its patterns of one order."""
        known = self._by_op.get(op)
        if known is None:
            known = self._by_op[op] = tuple(_candidates(self.rules, op))
        return known

    @property
    def needs_uses(self) -> bool:
        return any(needs_uses(r.pattern) for r in self.rules)


def _candidates(rules: tuple[Rule, ...], op: Op) -> list[Candidate]:
    found: list[Candidate] = []
    for rule in rules:
        if is_root(rule.pattern, op):
            found += [(rule, p) for p in in_each_order(rule.pattern)]
    return found
