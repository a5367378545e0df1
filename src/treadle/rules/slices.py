"""Slices of a scan that are computed from far less are computed inside it, one at a time.

A rate for every state of every iteration that is made of one number for each of both need not be
in memory: where arithmetic is nearly free, reading it would cost more than computing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treadle.ir.control import SCAN, Scan, body_input_types
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, OutputKind, Value
from treadle.ir.leading import ANY_RANK
from treadle.ir.op import Attributes
from treadle.ir.ops.leaves import INPUT, Constant, Leaf
from treadle.ir.ops.shaping import (
    BROADCAST,
    PERMUTE,
    RESHAPE,
    SLICE,
    Broadcast,
    Permute,
    Reshape,
    Slice,
)
from treadle.ir.rewrite import inline_into
from treadle.ir.types import TensorType
from treadle.kernel.target import Target
from treadle.rules.driver import rewrite
from treadle.rules.pattern import Nodes, apply, number_of
from treadle.rules.rule import Body, Match, Rule, RuleSet

_VIEWS = frozenset([BROADCAST, RESHAPE, PERMUTE, SLICE])


def _within(node: Node, operand: TensorType | None, length: int) -> Attributes | None:
    """The attributes of a node of one iteration; None if iterations are not apart in it."""
    a, whole = node.attributes, operand is not None and operand.shape[:1] == (length,)
    match a:
        case Constant(value, type_):
            return Constant(value, type_.with_shape(type_.shape[1:]))
        case Broadcast(shape, axes) if 0 not in axes:
            return Broadcast(shape[1:], tuple(i - 1 for i in axes))
        case Broadcast(shape, axes) if whole and axes[0] == 0:
            return Broadcast(shape[1:], tuple(i - 1 for i in axes[1:]))
        case Reshape(shape) if whole and shape[:1] == (length,):
            return Reshape(shape[1:])
        case Permute(axes) if whole and axes[0] == 0:
            return Permute(tuple(i - 1 for i in axes[1:]))
        case Slice(starts, stops, strides) if whole and (starts[0], strides[0]) == (0, 1):
            is_whole = stops[0] == length
            return Slice(starts[1:], stops[1:], strides[1:]) if is_whole else None
        case _:
            return a if node.op in ANY_RANK else None


@dataclass
class _Inside:
    """What is computed inside a scan for one of its slices, and what from."""

    graph: Nodes
    length: int
    slices: dict[Value, None] = field(default_factory=dict)
    constants: dict[Value, None] = field(default_factory=dict)
    nodes: dict[Value, Attributes] = field(default_factory=dict)  # of one iteration

    def visit(self, value: Value, size: int) -> None:
        """A value of all iterations, of at most that many elements."""
        if value in self.nodes or value in self.slices:
            return
        node = self.graph.nodes[value.node]
        operand = self.graph.type_of(node.operands[0]) if node.operands else None
        is_number = number_of(self.graph, value) is not None
        is_large = node.op in ANY_RANK and node.types[0].size == size
        found = None
        if is_number or is_large or node.op in _VIEWS:
            found = _within(node, operand, self.length)
        if found is None:
            self.slices[value] = None
            return
        self.nodes[value] = found
        if isinstance(node.attributes, Broadcast) and 0 not in node.attributes.axes:
            self.constants[node.operands[0]] = None
            return
        for v in node.operands:
            self.visit(v, size)


def _moved(match: Match) -> dict[int, _Inside]:
    """Slices that are computed inside, by their position among the operands."""
    scan = match.root.attributes
    assert isinstance(scan, Scan)
    found: dict[int, _Inside] = {}
    for i in range(scan.constants + scan.carries, len(match.root.operands)):
        value = match.root.operands[i]
        inside, type_ = _Inside(match.graph, scan.length), match.graph.type_of(value)
        inside.visit(value, type_.size)
        read = sum(match.graph.type_of(v).nbytes for v in inside.slices)
        if (
            value not in inside.slices
            and read * match.target.rewriting.least_spread <= type_.nbytes
        ):
            found[i] = inside
    return found


def is_made_of_less(match: Match) -> bool:
    """a slice is elementwise of values that are much smaller, and arithmetic is nearly free"""
    return match.target.rematerializes and bool(_moved(match))


def _computed_inside(match: Match, builder: GraphBuilder) -> Body:
    scan, moved = match.root.attributes, _moved(match)
    assert isinstance(scan, Scan)
    given, split = match.root.operands, scan.constants + scan.carries
    constants = list(dict.fromkeys(v for m in moved.values() for v in m.constants))
    slices = list(dict.fromkeys(v for m in moved.values() for v in m.slices))
    kept = [i for i in range(split, len(given)) if i not in moved]
    inner, types = _Inner(), body_input_types(scan.body)
    first = inner.inputs(types[: scan.constants])
    inner.bind(constants, [match.graph.type_of(v) for v in constants])
    carries = inner.inputs(types[scan.constants : split])
    rows = dict(zip(kept, inner.inputs([types[i] for i in kept]), strict=True))
    inner.bind(slices, [_of_row(match.graph.type_of(v)) for v in slices])
    rows |= {i: inner.value(m, given[i]) for i, m in moved.items()}
    body = inner.body(scan.body, [*first, *carries, *(rows[i] for i in sorted(rows))])
    attributes = replace(scan, body=body, constants=scan.constants + len(constants))
    operands = [*given[: scan.constants], *constants, *given[scan.constants : split]]
    operands += [*(given[i] for i in kept), *slices]
    return _scanned(match, attributes, operands)


def _of_row(type_: TensorType) -> TensorType:
    return type_.with_shape(type_.shape[1:])


class _Inner:
    """A scan's body in the making, beside values of the graph around that are its inputs."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.known: dict[Value, Value] = {}  # by the value around

    def inputs(self, types: Sequence[TensorType]) -> list[Value]:
        count = len(self.builder.nodes)
        named = (Leaf(f"in{count + i}", t) for i, t in enumerate(types))
        return [self.builder.add(INPUT, leaf, ())[0] for leaf in named]

    def bind(self, values: Sequence[Value], types: Sequence[TensorType]) -> None:
        self.known |= dict(zip(values, self.inputs(types), strict=True))

    def value(self, inside: _Inside, value: Value) -> Value:
        """A slice as it is computed in an iteration."""
        for v in sorted(inside.nodes):
            node = inside.graph.nodes[v.node]
            operands = [self.known[o] for o in node.operands]
            (self.known[v],) = self.builder.add(node.op, inside.nodes[v], operands, node.origin)
        return self.known[value]

    def body(self, graph: Graph, inputs: Sequence[Value]) -> Graph:
        """The body over values that stand for its inputs."""
        names = (n.attributes for n in graph.nodes if n.op is INPUT)
        leaves = {a.name: v for a, v in zip(names, inputs, strict=True) if isinstance(a, Leaf)}
        outputs = inline_into(self.builder, graph, leaves)
        return self.builder.build(_results(outputs), graph.name)


def _results(values: Sequence[Value]) -> list[Output]:
    return [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(values)]


def _scanned(match: Match, attributes: Scan, operands: Sequence[Value]) -> Body:
    builder = GraphBuilder()
    leaves = (Leaf(f"given{i}", match.graph.type_of(v)) for i, v in enumerate(operands))
    given = [builder.add(INPUT, leaf, ())[0] for leaf in leaves]
    values = builder.add(SCAN, attributes, given)
    return Body(builder.build(_results(values), attributes.body.name), tuple(operands))


INSIDE = Rule(
    "computed_in_scan",
    "A slice that is made of much less is computed in each iteration.",
    apply(SCAN),
    _computed_inside,
    is_made_of_less,
)

SLICES = RuleSet("slices", (INSIDE,))


def compute_slices(graph: Graph, target: Target) -> Graph:
    """The graph with scans that compute what would be dearer to read."""
    if not any(n.op is SCAN for n in graph.nodes):
        return graph
    return rewrite(graph, SLICES, target)
