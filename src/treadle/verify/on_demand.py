"""A graph's values at some elements, computed from those that are given: the other side of a check.

Elements are asked for as a grid: some indices along each axis. An op asks for the grids that it
needs of its operands. Arrays have the axes of the grid, of length 1 where all elements are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from treadle.domains.domain import Typed, apply, input_names
from treadle.domains.float64 import Array
from treadle.ir.composites import definition_graph
from treadle.ir.control import CALL, Call
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import OPS, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import Constant, Leaf
from treadle.ir.types import TensorType
from treadle.verify.extended import Extended, ExtendedField, of
from treadle.verify.indices import ravel
from treadle.verify.keyed import Source
from treadle.verify.machine import NotEstablishedError

Axis = range | tuple[int, ...]  # indices along an axis
Grid = tuple[Axis, ...]
MOST = 2**23  # elements of one grid
LARGE = 2**18

ELEMENTWISE = frozenset(op for op in vars(e).values() if isinstance(op, Op))


def along(axis: Axis) -> Array:
    if isinstance(axis, range):
        return np.arange(axis.start, axis.stop, axis.step)
    return np.array(axis, np.int64)


def as_axis(indices: Array) -> Axis:
    return tuple(indices.tolist())


def whole(shape: Sequence[int]) -> Grid:
    return tuple(range(n) for n in shape)


def lengths(grid: Grid) -> tuple[int, ...]:
    return tuple(map(len, grid))


class OnDemand:
    """The values of one graph. `given` are sources of elements by their flat index."""

    def __init__(
        self,
        graph: Graph,
        field: ExtendedField,
        given: Callable[[Value], Source | None],
        leaf: Callable[[str, Grid], Extended] | None = None,
    ):
        self.graph, self.field, self.given, self.leaf = graph, field, given, leaf
        self.special: dict[Value, Callable[[Grid], Extended]] = {}  # values made in another way
        self.known: dict[tuple[Value, Grid], Extended] = {}
        self.bodies: dict[int, OnDemand] = {}
        self.scans: dict[int, object] = {}  # what was evaluated as a whole

    def at(self, value: Value, grid: Grid) -> Extended:
        """Elements of a value."""
        key = value, grid
        if key not in self.known:
            if math.prod(lengths(grid)) > MOST:
                raise NotEstablishedError("too many elements of the graph are needed")
            found = self._made(value, grid)
            if found.p.size > LARGE and self.given(value) is not None:
                return found  # made anew as fast as it is kept
            self.known[key] = found
        return self.known[key]

    def points(self, value: Value, at: Sequence[Array]) -> Extended:
        """Elements one by one: indices along each axis, of one shape."""
        if not at:
            return self.at(value, ())
        shape = np.broadcast_shapes(*(a.shape for a in at))
        unique = [np.unique(a, return_inverse=True) for a in at]
        found = self.at(value, tuple(as_axis(u) for u, _ in unique))
        full = tuple(len(u) for u, _ in unique)
        places = tuple(
            np.broadcast_to(i.reshape(a.shape), shape) for (_, i), a in zip(unique, at, strict=True)
        )
        return found.map(lambda a: np.broadcast_to(a, full)[places])

    def _made(self, value: Value, grid: Grid) -> Extended:
        if value in self.special:
            return self.special[value](grid)
        source, type_ = self.given(value), self.graph.type_of(value)
        if source is not None:
            mesh = np.ix_(*map(along, grid)) if grid else ()
            return source(np.asarray(ravel(mesh, type_.shape)))
        node = self.graph.nodes[value.node]
        if isinstance(node.attributes, Leaf):
            assert self.leaf is not None, f"nothing gives the leaf {node.attributes.name}"
            return self.leaf(node.attributes.name, grid)
        if node.op in ELEMENTWISE:
            return self._elementwise(node, grid)
        if isinstance(node.attributes, Constant):
            return self._constant(node.attributes, grid)
        rule = RULES.get(node.op)
        if rule is not None:
            return rule(self, node, grid)
        if node.op in BY_OUTPUT:
            return BY_OUTPUT[node.op](self, value, node, grid)
        if node.op.is_composite or node.op is CALL:
            return self._body(value, node).at_output(value.output, grid)
        return self._all(value, node, grid)

    def at_output(self, output: int, grid: Grid) -> Extended:
        return self.at(self.graph.outputs[output].value, grid)

    def type_of(self, node: Node, operand: int) -> TensorType:
        return self.graph.type_of(node.operands[operand])

    def operand(self, node: Node, operand: int, grid: Grid) -> Extended:
        return self.at(node.operands[operand], grid)

    def full(self, node: Node, operand: int, grid: Grid) -> Extended:
        """With every axis as long as the grid's."""
        shape = lengths(grid)
        return self.operand(node, operand, grid).map(lambda a: np.broadcast_to(a, shape))

    def _elementwise(self, node: Node, grid: Grid) -> Extended:
        xs = [self.at(v, grid) for v in node.operands]
        given = [self.graph.type_of(v).dtype for v in node.operands]
        if isinstance(node.attributes, e.Cast):
            return self.field.cast(xs[0], given[0], node.attributes.dtype)
        return self.field.apply(node.op, node.attributes, xs, given, node.types[0].dtype)

    def _constant(self, attributes: Constant, grid: Grid) -> Extended:
        found = self.field.literal(attributes.value, attributes.type.dtype)
        if isinstance(attributes.value, ArrayLiteral):
            return found.map(lambda a: a[np.ix_(*map(along, grid))] if grid else a)
        return found.map(lambda a: a.reshape((1,) * len(grid)))

    def _body(self, value: Value, node: Node) -> OnDemand:
        """A composite's definition, its operands asked for here."""
        if value.node not in self.bodies:
            if isinstance(node.attributes, Call):
                body = node.attributes.body
            else:
                types = tuple(self.graph.type_of(v) for v in node.operands)
                body = definition_graph(node.op, node.attributes, types)
            operands = dict(zip(input_names(body), node.operands, strict=True))
            self.bodies[value.node] = OnDemand(
                body, self.field, lambda _: None, lambda name, grid: self.at(operands[name], grid)
            )
        return self.bodies[value.node]

    def _all(self, value: Value, node: Node, grid: Grid) -> Extended:
        """An op that needs all of its operands."""
        total = sum(self.graph.type_of(v).size for v in node.operands)
        if total > MOST // 8:
            raise NotEstablishedError(f"{node.op.name} of {total} elements is too large")
        operands = []
        for i, v in enumerate(node.operands):
            found = self.full(node, i, whole(self.graph.type_of(v).shape))
            operands.append(Typed(self.graph.type_of(v), found.residues))
        results = apply(self.field.field, node.op, node.attributes, operands, node.types)
        for output, result in enumerate(results):
            other, shape = Value(value.node, output), node.types[output].shape
            if self.given(other) is None:  # else it has elements of its own
                self.known[other, whole(shape)] = of(result)
        found = self.known[value, whole(node.types[value.output].shape)]
        return found.map(lambda a: a[np.ix_(*map(along, grid))] if grid else a)


Rule = Callable[[OnDemand, Node, Grid], Extended]
RULES: dict[Op, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        RULES.update({OPS[name]: function for name in names})
        return function

    return enter


OutputRule = Callable[[OnDemand, Value, Node, Grid], Extended]
BY_OUTPUT: dict[Op, OutputRule] = {}


def by_output(op: Op) -> Callable[[OutputRule], OutputRule]:
    """A rule of an op with several results: it is told which one is asked for."""

    def enter(function: OutputRule) -> OutputRule:
        BY_OUTPUT[op] = function
        return function

    return enter
