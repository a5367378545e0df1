"""From nodes of a graph to ONNX nodes: the table `EXPORT`, and the walk that calls it.

A composite without an entry is written as its definition. Broadcasts and constants are written
where something reads them that does not broadcast by itself: ONNX's elementwise operators do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.interop.onnx.writer.nodes import Nodes
from treadle.interop.onnx.writer.sizes import FIXED, Batch, Sizes, fixed
from treadle.ir.composites import DEFINITIONS, definition_graph
from treadle.ir.control import Call, Scan
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.literal import ArrayLiteral, to_numpy
from treadle.ir.op import Attributes, Op, RuleTable
from treadle.ir.ops import leaves, linear
from treadle.ir.ops.indexing import RANDOM_BITS, ScatterAdd
from treadle.ir.ops.reductions import SHARD_SUM
from treadle.ir.ops.shaping import BROADCAST, DynamicSlice, Reshape, Slice
from treadle.ir.types import TensorType

REFUSED: dict[Op, str] = {
    RANDOM_BITS: "ONNX's random operators draw other numbers: export a program without them, "
    "with training=False",
    SHARD_SUM: "it is over the shards of a data-parallel step: export a forward of the model",
}
# Attributes that hold sizes of results, which the types of results say too.
SIZED = (leaves.Iota, Reshape, Slice, DynamicSlice, ScatterAdd, Call, Scan, linear.Unwindow)
SMALL = 64  # elements of a constant that are written out rather than expanded


@dataclass(frozen=True)
class Pair:
    """A graph, and the same traced at another size of the batch if that is not fixed."""

    graph: Graph
    other: Graph
    batch: Batch | None = None

    def __post_init__(self) -> None:
        ours, theirs = self.graph, self.other
        same = len(ours.nodes) == len(theirs.nodes) and all(
            a.op is b.op and a.operands == b.operands
            for a, b in zip(ours.nodes, theirs.nodes, strict=True)
        )
        if not same:
            cause = f"{ours.name} is another program for another size of the batch"
            raise ArgumentError("export", cause, FIXED)

    def sizes(self, value: Value) -> Sizes:
        shape = self.graph.type_of(value).shape
        if self.batch is None:
            return shape
        return self.batch.sizes(shape, self.other.type_of(value).shape)

    def of(self, graph: Graph, other: Graph) -> Pair:
        """Graphs inside these."""
        return Pair(graph, other, self.batch)


class Site:
    """One node that is being written: its operands by name, and the nodes to write to."""

    def __init__(self, walk: Walk, position: int):
        self.walk, self.position = walk, position
        self.nodes = walk.nodes
        self.node: Node = walk.pair.graph.nodes[position]
        self.other: Node = walk.pair.other.nodes[position]

    @property
    def attributes(self) -> Attributes:
        return self.node.attributes

    @property
    def types(self) -> list[TensorType]:
        """Of the operands."""
        return [self.walk.pair.graph.type_of(v) for v in self.node.operands]

    @property
    def names(self) -> list[str]:
        """Of the operands, each with its whole shape."""
        return [self.walk.name(v) for v in self.node.operands]

    def sizes(self, operand: int) -> Sizes:
        return self.walk.pair.sizes(self.node.operands[operand])

    def result_sizes(self, output: int = 0) -> Sizes:
        return self.walk.pair.sizes(Value(self.position, output))

    def fixed(self, operand: int, axis: int) -> int:
        """A size that does not depend on the batch."""
        return fixed(str(self.node.op), (self.sizes(operand)[axis],))[0]

    def is_used(self, output: int) -> bool:
        return self.walk.uses[Value(self.position, output)] > 0

    def expanded(self) -> list[str]:
        """The definition of a composite in place of it."""
        ours, theirs = (
            definition_graph(n.op, n.attributes, tuple(g.type_of(v) for v in n.operands))
            for n, g in ((self.node, self.walk.pair.graph), (self.other, self.walk.pair.other))
        )
        return self.inlined(ours, theirs, self.names)

    def inlined(self, body: Graph, other: Graph, operands: Sequence[str]) -> list[str]:
        """The outputs of a body whose inputs are these."""
        inputs = dict(zip(body.inputs, operands, strict=True))
        return Walk(self.nodes, self.walk.pair.of(body, other), inputs).run()

    def broadcasting(self) -> list[str]:
        """Operands that broadcast to the result's shape, as they are before they are expanded."""
        return self.walk.aligned(self.node.operands, self.result_sizes())


Exporter = Callable[[Site], Sequence[str]]
EXPORT: RuleTable[Exporter] = RuleTable("exporter")


class Walk:
    """A graph's nodes, one after the other, as ONNX nodes."""

    def __init__(self, nodes: Nodes, pair: Pair, inputs: Mapping[int, str]):
        self.nodes, self.pair = nodes, pair
        self._names: dict[Value, str] = {Value(i): name for i, name in inputs.items()}
        graph = pair.graph
        self.uses: Counter[Value] = Counter(v for n in graph.nodes for v in n.operands)
        self.uses.update(o.value for o in graph.outputs)

    def run(self) -> list[str]:
        """Names of the graph's outputs."""
        graph = self.pair.graph
        for position, node in enumerate(graph.nodes):
            is_named = Value(position) in self._names
            if not is_named and node.op not in (BROADCAST, leaves.CONSTANT):
                self._write(position)
        return [self.name(o.value) for o in graph.outputs]

    def _write(self, position: int) -> None:
        site = Site(self, position)
        node = site.node
        if node.op in REFUSED:
            raise ArgumentError(
                "export", f"{node.op} cannot be exported", REFUSED[node.op], origin=node.origin
            )
        self._check_attributes(site)
        entry = EXPORT.get(node.op)
        if entry is None:
            assert node.op in DEFINITIONS, node.op
            names: Sequence[str] = site.expanded()
        else:
            names = entry(site)
        for output, name in enumerate(names):
            self._names[Value(position, output)] = name

    def _check_attributes(self, site: Site) -> None:
        ours, theirs = site.node.attributes, site.other.attributes
        if self.pair.batch is None or isinstance(ours, SIZED) or site.node.op.is_composite:
            return
        if ours != theirs:
            cause = f"{site.node.op} depends on the batch: {ours} and {theirs}"
            raise ArgumentError("export", cause, FIXED, origin=site.node.origin)

    def name(self, value: Value) -> str:
        """A tensor with its whole shape."""
        if value not in self._names:
            node = self.pair.graph.nodes[value.node]
            if node.op is leaves.CONSTANT:
                self._names[value] = self._constant(value)
            else:
                assert node.op is BROADCAST, node.op
                sizes = self.pair.sizes(value)
                self._names[value] = self.nodes.expand(self._view(value), sizes)
        return self._names[value]

    def _constant(self, value: Value) -> str:
        type_, sizes = self.pair.graph.type_of(value), self.pair.sizes(value)
        array = self._array(value)
        if sizes == type_.shape and type_.size <= SMALL:
            array = np.broadcast_to(array, type_.shape)
        name = self.nodes.constant(array)
        return name if array.shape == sizes else self.nodes.expand(name, sizes)

    def _array(self, value: Value) -> np.ndarray:
        """The array of a constant, or a scalar for a number that is spread."""
        node = self.pair.graph.nodes[value.node]
        ours, theirs = node.attributes, self.pair.other.nodes[value.node].attributes
        assert isinstance(ours, leaves.Constant)
        assert isinstance(theirs, leaves.Constant)
        if leaves.Constant(ours.value, theirs.type) != theirs:
            cause = f"a constant depends on the batch: {ours.value} and {theirs.value}"
            raise ArgumentError("export", cause, FIXED, origin=node.origin)
        return to_numpy(ours.value, ours.type.dtype.numpy)

    def aligned(self, values: Sequence[Value], sizes: Sizes) -> list[str]:
        """Names that broadcast together to these sizes."""
        lazy = [self._lazy_axes(v) for v in values]
        covered: set[int] = set()
        whole = [axes is None for axes in lazy]
        for axes in lazy:
            covered |= set(range(len(sizes))) if axes is None else axes
        ones = {i for i, n in enumerate(sizes) if n == 1}
        if len(covered | ones) < len(sizes):
            whole[0] = True
        return [
            self.name(v) if is_whole else self._view(v)
            for v, is_whole in zip(values, whole, strict=True)
        ]

    def _lazy_axes(self, value: Value) -> set[int] | None:
        """The axes that a value which can be broadcast has before; None for any other."""
        node = self.pair.graph.nodes[value.node]
        if value in self._names:
            return None
        match node.op, node.attributes:
            case (op, attributes) if op is BROADCAST:
                return set(attributes.axes)  # type: ignore[attr-defined]
            case (_, leaves.Constant(ArrayLiteral())):
                return None
            case (_, leaves.Constant(_, TensorType(shape))) if shape:
                return set()
        return None

    def _view(self, value: Value) -> str:
        """What broadcasts to a value: its axes are the last ones, of one element where repeated."""
        node = self.pair.graph.nodes[value.node]
        attributes = node.attributes
        if isinstance(attributes, leaves.Constant):
            return self.nodes.constant(self._array(value))
        source = node.operands[0]
        name, axes = self.name(source), node.attributes.axes  # type: ignore[attr-defined]
        rank = node.types[0].rank
        if axes == tuple(range(rank - len(axes), rank)):
            return name
        first = axes[0] if axes else rank
        sizes = dict(zip(axes, self.pair.sizes(source), strict=True))
        return self.nodes.reshape(name, tuple(sizes.get(i, 1) for i in range(first, rank)))
