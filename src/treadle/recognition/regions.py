"""Parts of a graph that lead from few values to one: what may be a composite, written out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from treadle.ir.control import CALL, SCAN
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, OutputKind, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Op
from treadle.ir.ops import indexing, reductions, shaping
from treadle.ir.ops.leaves import INPUT, Constant, Leaf
from treadle.ir.types import TensorType

# What a region never goes through: values that are given, bodies, choices between elements.
_OPAQUE = frozenset(
    [
        CALL,
        SCAN,
        indexing.RANDOM_BITS,
        indexing.SCATTER_ADD,
        reductions.SORT,
        reductions.TOP_K,
        reductions.ARGMAX,
        reductions.ARGMIN,
        shaping.DYNAMIC_SLICE,
        shaping.DYNAMIC_UPDATE,
    ]
)
MOST_NODES = 48  # of a region: chosen, a smoothed cross-entropy with its masks has 30
MOST_ROOTS = 16  # tried below an anchor: chosen, a cross-entropy ends 10 nodes below its exp

IsSide = Callable[[TensorType], bool]


def no_sides(type_: TensorType) -> bool:
    return False


def is_flag(type_: TensorType) -> bool:
    return not type_.is_float and not type_.dtype.is_integer


def is_index(type_: TensorType) -> bool:
    return type_.dtype.is_integer


@dataclass(frozen=True, slots=True)
class Cut:
    """Values that a root needs and nothing else: one that is followed, and others beside it."""

    root: Value
    x: Value
    sides: tuple[Value, ...]
    inside: frozenset[int]  # nodes between them


class Flow:
    """A graph with what leads where."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.known: dict[Value, np.ndarray | None] = {}  # values that nothing decides
        self._cuts: dict[tuple[Value, IsSide], list[Cut]] = {}
        self._by_op: dict[Op, frozenset[int]] = {}

    @cached_property
    def users(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.graph.nodes]
        for position, node in enumerate(self.graph.nodes):
            for source in {v.node for v in node.operands}:
                found[source].append(position)
        return found

    @cached_property
    def closed(self) -> list[bool]:
        """Whether nothing that a program is given decides a node's value."""
        found: list[bool] = []
        for node in self.graph.nodes:
            is_leaf = isinstance(node.attributes, Leaf) or node.op is indexing.RANDOM_BITS
            found.append(not is_leaf and all(found[v.node] for v in node.operands))
        return found

    def node(self, value: Value) -> Node:
        return self.graph.nodes[value.node]

    @cached_property
    def open(self) -> list[bool]:
        """Whether a region may go through what makes a node's value."""
        nodes = self.graph.nodes
        return [
            not isinstance(n.attributes, Leaf) and n.op not in _OPAQUE and len(n.types) == 1
            for n in nodes
        ]

    def below(self, position: int, most: int = MOST_ROOTS) -> list[int]:
        """Nodes that a node leads to, itself first, the nearest ones in order."""
        found, heap, seen = list[int](), [position], {position}
        while heap and len(found) < most:
            at = heapq.heappop(heap)
            if at != position and not self.open[at]:
                continue
            found.append(at)
            for user in self.users[at]:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(heap, user)
        return found

    def cuts(self, root: Value, is_side: IsSide = no_sides) -> list[Cut]:
        """Every value through which all goes that leads to a root, the nearest first.

        Values of which `is_side` holds stand beside it, and are not looked behind.
        """
        key = root, is_side
        if key not in self._cuts:
            self._cuts[key] = self._cuts_of(root, is_side)
        return self._cuts[key]

    def _cuts_of(self, root: Value, is_side: IsSide) -> list[Cut]:
        found, sides, inside = list[Cut](), dict[Value, None](), set[int]()
        heap: list[tuple[int, int]] = [(-root.node, root.output)]
        seen = {root}
        while heap and len(inside) < MOST_NODES:
            node, output = heapq.heappop(heap)
            value = Value(-node, output)
            if not heap and value != root:
                found.append(Cut(root, value, tuple(sides), frozenset(inside)))
            if not self.open[value.node]:
                break
            inside.add(value.node)
            for v in self.graph.nodes[value.node].operands:
                if v in seen or self.closed[v.node]:
                    continue
                seen.add(v)
                if is_side(self.graph.type_of(v)):
                    sides[v] = None
                else:
                    heapq.heappush(heap, (-v.node, v.output))
        return found

    def beside(self, root: Value, core: int) -> list[Value] | None:
        """What leads to a root beside a node above it; None where that is far or opaque."""
        inside = set(self.below(core))
        found, stack, seen = dict[Value, None](), [root], set[Value]()
        if root.node not in inside:
            return None
        while stack:
            value = stack.pop()
            if value.node == core or value in seen or self.closed[value.node]:
                continue
            seen.add(value)
            if value.node not in inside:
                found[value] = None
            elif not self.open[value.node]:
                return None
            else:
                stack.extend(reversed(self.graph.nodes[value.node].operands))
        return list(found)

    def of_op(self, position: int) -> frozenset[int]:
        """Nodes of the op that one has."""
        op = self.graph.nodes[position].op
        if op not in self._by_op:
            nodes = enumerate(self.graph.nodes)
            self._by_op[op] = frozenset(i for i, n in nodes if n.op is op)
        return self._by_op[op]

    def extract(self, root: Value, inputs: Sequence[Value]) -> Graph:
        """What leads from some values to a root, as a graph: inputs are named 0, 1, …"""
        graph, builder = self.graph, GraphBuilder()
        moved: dict[Value, Value] = {}
        for i, value in enumerate(inputs):
            (moved[value],) = builder.add(INPUT, Leaf(str(i), graph.type_of(value)), ())
        for position in self.between(root, set(inputs)):
            node = graph.nodes[position]
            copy = builder.copy(node, [moved[v] for v in node.operands])
            for k in range(len(node.types)):
                moved.setdefault(Value(position, k), Value(copy, k))
        return builder.build([Output(OutputKind.RESULT, "0", moved[root])], "region")

    def between(self, root: Value, inputs: set[Value]) -> list[int]:
        found, stack = set[int](), [root]
        while stack:
            value = stack.pop()
            if value in inputs or value.node in found:
                continue
            found.add(value.node)
            stack.extend(self.graph.nodes[value.node].operands)
        return sorted(found)


def ops_of(graph: Graph) -> set[Op]:
    return {n.op for n in graph.nodes}


def numbers_of(graph: Graph) -> list[Fraction]:
    """The finite numbers in a graph, each once."""
    found: dict[Fraction, None] = {}
    for node in graph.nodes:
        if isinstance(node.attributes, Constant):
            value = node.attributes.value
            if not isinstance(value, ArrayLiteral) and math.isfinite(value):
                found[Fraction(value)] = None
    return list(found)


def of_shape(flow: Flow, value: Value, shape: tuple[int, ...]) -> list[Value]:
    """What alone decides a value and has some shape: itself, or above it, the nearest first."""
    is_float = flow.graph.type_of(value).is_float
    above = [value, *(cut.x for cut in flow.cuts(value))]
    types = ((v, flow.graph.type_of(v)) for v in above)
    return [v for v, t in types if t.shape == shape and t.is_float == is_float]
