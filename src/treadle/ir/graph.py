"""Graphs: frozen nodes in topological order, and the builder that interns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from treadle.base.origin import Origin
from treadle.base.quick import quick
from treadle.ir.op import Attributes, Op, Types, infer_types
from treadle.ir.ops.leaves import INPUT, Leaf
from treadle.ir.types import TensorType


class Value(NamedTuple):
    """One output of one node, by the node's position."""

    node: int
    output: int = 0


_single: list[tuple[Value, ...]] = []  # by position


def values_at(position: int, count: int) -> tuple[Value, ...]:
    """The outputs of a node. Nearly all have one, and every pass asks for it: it is kept."""
    global _single
    if count != 1:
        return tuple([Value(position, i) for i in range(count)])
    known = _single
    if position >= len(known):
        # A new list, not a longer one: another thread may do the same.
        _single = known = [(Value(i),) for i in range(2 * position + 256)]
    return known[position]


@quick
@dataclass(frozen=True, slots=True)
class Node:
    """One use of an op. Equality ignores where it came from."""

    op: Op
    attributes: Attributes
    operands: tuple[Value, ...]
    types: Types
    origin: Origin | None = field(default=None, compare=False)

    def over(self, operands: tuple[Value, ...]) -> Node:
        """The node over other operands of the same types."""
        return Node(self.op, self.attributes, operands, self.types, self.origin)


class OutputKind(Enum):
    """Why a value leaves the graph."""

    RESULT = "result"  # what the traced function returned, in order
    GRADIENT = "gradient"  # of the result, with respect to the named leaf
    CAPTURE = "capture"
    METRIC = "metric"
    WEIGHT = "weight"  # of the metric with the same name
    UPDATE = "update"  # the next value of the named state
    PRINT = "print"  # the name is the format


@quick
@dataclass(frozen=True, slots=True)
class Output:
    """A named value that leaves the graph."""

    kind: OutputKind
    name: str
    value: Value


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order and what leaves them. Never changed: passes return new ones."""

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    name: str = field(default="graph", compare=False)

    def __hash__(self) -> int:
        # Bodies are hashed wherever their node is interned, so the hash is kept.
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.nodes, self.outputs))
            self.__dict__["_hash"] = known
        return known

    def type_of(self, value: Value) -> TensorType:
        return self.nodes[value.node].types[value.output]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Positions of the `input` nodes, in order: the graph's interface when it is a body."""
        return tuple(i for i, n in enumerate(self.nodes) if n.op is INPUT)

    @cached_property
    def leaves(self) -> Mapping[str, int]:
        """Positions of all named leaves (inputs, parameters, state) by name."""
        named = enumerate(n.attributes for n in self.nodes)
        return {a.name: i for i, a in named if isinstance(a, Leaf)}

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters."""
        return [name for name, i in self.leaves.items() if self.nodes[i].op.name == "parameter"]

    @property
    def results(self) -> tuple[Value, ...]:
        return tuple(o.value for o in self.outputs if o.kind is OutputKind.RESULT)

    @property
    def output_types(self) -> Types:
        return tuple(self.type_of(o.value) for o in self.outputs)


class GraphBuilder:
    """Grows a graph; equal nodes (op, attributes, operands) are one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._interned: dict[tuple[Op, Attributes, tuple[Value, ...]], int] = {}

    def add(
        self,
        op: Op,
        attributes: Attributes,
        operands: Sequence[Value],
        origin: Origin | None = None,
    ) -> tuple[Value, ...]:
        """The outputs of the node, a new one or the equal one that is there. Checks the types."""
        operands = tuple(operands)
        position = self._interned.get((op, attributes, operands))
        if position is None:
            types = infer_types(op, attributes, tuple([self.type_of(v) for v in operands]))
            position = self._append(Node(op, attributes, operands, types, origin))
        return values_at(position, len(self.nodes[position].types))

    def copy(self, node: Node, operands: Sequence[Value], origin: Origin | None = None) -> int:
        """Position of `node` with other operands of the same types, which are not checked again."""
        operands, new = tuple(operands), len(self.nodes)
        position = self._interned.setdefault((node.op, node.attributes, operands), new)
        if position == new:
            origin = origin or node.origin
            self.nodes.append(Node(node.op, node.attributes, operands, node.types, origin))
        return position

    def _append(self, node: Node) -> int:
        self.nodes.append(node)
        self._interned[node.op, node.attributes, node.operands] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def type_of(self, value: Value) -> TensorType:
        return self.nodes[value.node].types[value.output]

    def build(self, outputs: Iterable[Output], name: str = "graph") -> Graph:
        return Graph(tuple(self.nodes), tuple(outputs), name)
