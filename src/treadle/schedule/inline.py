"""Elements of tensors as expressions of an index: how elementwise and shape ops fold into loops.

A source gives the element of a tensor at some indices, either from a buffer or by computing it from
its operands' elements. Rules are entries of a table, one for each op that can be computed so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Op, RuleTable
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves, linear, reductions, shaping
from treadle.ir.types import TensorType
from treadle.kernel.index import Index, bounded, constant, data, divide, flatten, unflatten
from treadle.kernel.nodes import (
    Apply,
    Buffer,
    Convert,
    Guarded,
    Literal,
    Load,
    Local,
    Position,
    Statement,
    Value,
    Within,
)
from treadle.schedule.nests import apply, compare, let, pitched

Indices = tuple[Index, ...]


@dataclass
class Reader:
    """Computes elements inside one kernel; `lets` are statements that must come before."""

    graph: Graph
    buffer_of: Callable[[TensorValue], str | None]  # the buffer a tensor is in, if it is in one
    used: dict[str, Buffer] = field(default_factory=dict)  # by name
    lets: list[Statement] = field(default_factory=list)
    guards: list[Within] = field(default_factory=list)  # that hold where elements are read now
    count: int = 0
    uses: Mapping[TensorValue, int] = field(default_factory=dict)
    layouts: Mapping[TensorValue, tuple[int, ...]] = field(default_factory=dict)
    wider: Mapping[TensorValue, DType] = field(default_factory=dict)  # in memory than they are
    pitches: Mapping[TensorValue, int] = field(default_factory=dict)  # from row to row
    known: dict[tuple[TensorValue, Indices, tuple[Within, ...]], Local] = field(
        default_factory=dict
    )

    def at(self, value: TensorValue, indices: Indices) -> Value:
        """The element of a tensor at some indices."""
        name = self.buffer_of(value)
        type_ = self.graph.type_of(value)
        if type_.size == 0:
            return Literal(0, type_.dtype)  # there is no element that could be read
        if name is not None:
            held = self.wider.get(value, type_.dtype)
            shape = pitched(type_.shape, self.pitches.get(value))
            self.used[name] = Buffer(name, held, math.prod(shape))
            load = Load(name, laid_out(indices, shape, self.layouts.get(value)), held)
            return load if held is type_.dtype else Convert(load, type_.dtype)
        node = self.graph.nodes[value.node]
        if self.uses.get(value, 0) < 2 or not node.operands:
            return INLINE[node.op](self, node, indices)
        # What is used more than once is named, so that an expression never grows beyond its graph.
        key = (value, indices, tuple(self.guards))
        if key not in self.known:
            found = INLINE[node.op](self, node, indices)
            if isinstance(found, (Load, Literal, Position, Local)):
                return found  # it costs nothing to read twice
            self.known[key] = self.named(found)
        return self.known[key]

    def operand(self, node: Node, i: int, indices: Indices) -> Value:
        return self.at(node.operands[i], indices)

    def operand_type(self, node: Node, i: int) -> TensorType:
        return self.graph.type_of(node.operands[i])

    def named(self, value: Value) -> Local:
        """A value computed once and named; 0 where the guards around its use do not hold."""
        for guard in reversed(self.guards):
            value = Guarded(guard, value, Literal(0, value.dtype), value.dtype)
        self.count += 1
        statement, local = let(f"t{self.count}", value)
        self.lets.append(statement)
        return local

    def under(self, guards: Sequence[Within], inner: Callable[[], Value], other: Value) -> Value:
        """The inner value where all guards hold, else the other."""
        if any(g.index.range[1] < g.low or g.index.range[0] >= g.high for g in guards):
            return other
        self.guards += guards
        value = inner()
        del self.guards[len(self.guards) - len(guards) :]
        # Nested, so that what a later guard divides is held by the earlier ones.
        for guard in reversed(guards):
            value = Guarded(guard, value, other, other.dtype)
        return value


def laid_out(indices: Indices, shape: Sequence[int], order: Sequence[int] | None) -> Index:
    """The index of an element of a tensor whose axes lie in memory in some order."""
    if order is None:
        return flatten(indices, shape)
    return flatten([indices[i] for i in order], [shape[i] for i in order])


Rule = Callable[[Reader, Node, Indices], Value]
INLINE: RuleTable[Rule] = RuleTable("inline")

ELEMENTWISE = frozenset(op for op in vars(e).values() if isinstance(op, Op)) - {e.STOP_GRADIENT}


@INLINE(*ELEMENTWISE - {e.CAST})
def _elementwise(reader: Reader, node: Node, indices: Indices) -> Value:
    operands = tuple(reader.operand(node, i, indices) for i in range(len(node.operands)))
    return Apply(node.op.name, operands, node.types[0].dtype)


@INLINE(e.STOP_GRADIENT, reductions.SHARD_SUM)
def _same(reader: Reader, node: Node, indices: Indices) -> Value:
    return reader.operand(node, 0, indices)


@INLINE(e.CAST)
def _cast(reader: Reader, node: Node, indices: Indices) -> Value:
    return Convert(reader.operand(node, 0, indices), node.types[0].dtype)


@INLINE(leaves.CONSTANT)
def _constant(reader: Reader, node: Node, indices: Indices) -> Value:
    attributes: leaves.Constant = attributes_of(node)
    assert not isinstance(attributes.value, ArrayLiteral), "arrays are in buffers"
    return Literal(attributes.value, attributes.type.dtype)


@INLINE(leaves.IOTA)
def _iota(reader: Reader, node: Node, indices: Indices) -> Value:
    attributes: leaves.Iota = attributes_of(node)
    return Position(indices[attributes.axis], attributes.dtype)


@INLINE(shaping.RESHAPE)
def _reshape(reader: Reader, node: Node, indices: Indices) -> Value:
    flat = flatten(indices, node.types[0].shape)
    return reader.operand(node, 0, unflatten(flat, reader.operand_type(node, 0).shape))


@INLINE(shaping.PERMUTE)
def _permute(reader: Reader, node: Node, indices: Indices) -> Value:
    axes = attributes_of(node).axes
    return reader.operand(node, 0, tuple(indices[axes.index(i)] for i in range(len(axes))))


@INLINE(shaping.BROADCAST)
def _broadcast(reader: Reader, node: Node, indices: Indices) -> Value:
    return reader.operand(node, 0, tuple(indices[a] for a in attributes_of(node).axes))


@INLINE(shaping.SLICE)
def _slice(reader: Reader, node: Node, indices: Indices) -> Value:
    a: shaping.Slice = attributes_of(node)
    parts = zip(indices, a.starts, a.strides, strict=True)
    return reader.operand(node, 0, tuple(i * stride + start for i, start, stride in parts))


@INLINE(shaping.FLIP)
def _flip(reader: Reader, node: Node, indices: Indices) -> Value:
    axes, shape = attributes_of(node).axes, node.types[0].shape
    flipped = (constant(shape[i] - 1) - x if i in axes else x for i, x in enumerate(indices))
    return reader.operand(node, 0, tuple(flipped))


@INLINE(shaping.PAD)
def _pad(reader: Reader, node: Node, indices: Indices) -> Value:
    """The operand's element where the index hits one, else the fill."""
    a: shaping.Pad = attributes_of(node)
    guards: list[Within] = []
    inner: list[Index] = []
    parts = zip(indices, a.low, a.interior, reader.operand_type(node, 0).shape, strict=True)
    for index, low, gap, n in parts:
        at, guard = _unpadded(index - low, gap, n)
        inner.append(at)
        guards += guard
    fill = Literal(a.value, node.types[0].dtype)
    return reader.under(guards, lambda: reader.operand(node, 0, tuple(inner)), fill)


def _unpadded(index: Index, gap: int, n: int) -> tuple[Index, list[Within]]:
    """Where an index of the padded axis lies in the operand, and when it does."""
    held, guards = _held(index, n + max(n - 1, 0) * gap)
    if gap == 0:
        return held, guards
    quotient, rest = divide(held, gap + 1)
    return quotient, [*guards, Within(rest, 0, 1)]


def _held(index: Index, extent: int) -> tuple[Index, list[Within]]:
    """An index below an extent, and the guard that holds it there if its range does not."""
    low, high = index.range
    is_inside = low >= 0 and high < extent
    return bounded(index, extent), [] if is_inside else [Within(index, 0, extent)]


@INLINE(shaping.CONCAT)
def _concat(reader: Reader, node: Node, indices: Indices) -> Value:
    """Operand i where the index lies in its part, else those before it."""
    axis = attributes_of(node).axis
    value: Value = Literal(0, node.types[0].dtype)
    start = node.types[0].shape[axis]
    for i in reversed(range(len(node.operands))):
        size = reader.operand_type(node, i).shape[axis]
        start -= size
        if size:
            held, guards = _held(indices[axis] - start, size)
            at = (*indices[:axis], held, *indices[axis + 1 :])
            value = reader.under(guards, partial(reader.operand, node, i, at), value)
    return value


@INLINE(linear.WINDOW)
def _window(reader: Reader, node: Node, indices: Indices) -> Value:
    a: linear.Window = attributes_of(node)
    rank = reader.operand_type(node, 0).rank
    moved = list(indices[:rank])
    for i, axis in enumerate(a.axes):
        moved[axis] = moved[axis] * a.strides[i] + indices[rank + i] * a.dilations[i]
    return reader.operand(node, 0, tuple(moved))


def is_apart(node: Node) -> bool:
    """Whether the windows that a node adds up do not overlap: it only moves elements."""
    if not isinstance(node.attributes, linear.Unwindow):
        return False
    window = node.attributes.window
    parts = zip(window.sizes, window.strides, window.dilations, strict=True)
    return all(size <= stride and (d == 1 or size == 1) for size, stride, d in parts)


@INLINE(linear.UNWINDOW)
def _unwindow(reader: Reader, node: Node, indices: Indices) -> Value:
    """The element of the one window that an element lies in, if it lies in one."""
    a: linear.Unwindow = attributes_of(node)
    moved, offsets, guards = list(indices), list[Index](), list[Within]()
    counts = a.window.starts(a.shape)
    for i, axis in enumerate(a.window.axes):
        quotient, rest = divide(indices[axis], a.window.strides[i])
        moved[axis], of_window = _held(quotient, counts[i])
        offset, of_element = _held(rest, a.window.sizes[i])
        offsets.append(offset)
        guards += of_window + of_element
    zero = Literal(0, node.types[0].dtype)
    return reader.under(guards, lambda: reader.operand(node, 0, (*moved, *offsets)), zero)


def is_single(node: Node, indices: TensorType) -> bool:
    """Whether a scatter moves one element each: a choice, not a sum."""
    if not isinstance(node.attributes, indexing.ScatterAdd):
        return False
    return math.prod(indices.shape[node.attributes.batch :]) == 1


@INLINE(indexing.SCATTER_ADD)
def _scatter_single(reader: Reader, node: Node, indices: Indices) -> Value:
    """The update where the index points here, else 0."""
    a: indexing.ScatterAdd = attributes_of(node)
    chosen = reader.operand_type(node, 1).rank - a.batch
    zeros = (constant(0),) * chosen
    index = Convert(reader.operand(node, 1, (*indices[: a.batch], *zeros)), dtypes.int64)
    here = compare("eq", Position(indices[a.axis], dtypes.int64), index)
    at = (*indices[: a.axis], *zeros, *indices[a.axis + 1 :])
    update = reader.operand(node, 0, at)
    return apply("where", here, update, Literal(0, node.types[0].dtype))


@INLINE(indexing.GATHER)
def _gather(reader: Reader, node: Node, indices: Indices) -> Value:
    """Indices are held inside the axis: a wrong one reads a wrong element, never outside."""
    a: indexing.Gather = attributes_of(node)
    type_ = reader.operand_type(node, 0)
    chosen = reader.operand_type(node, 1).rank - a.batch
    where = (*indices[: a.batch], *indices[a.axis : a.axis + chosen])
    index = reader.named(Convert(reader.operand(node, 1, where), dtypes.int64))
    at = data(index.name, type_.shape[a.axis])
    return reader.operand(node, 0, (*indices[: a.axis], at, *indices[a.axis + chosen :]))


@INLINE(shaping.DYNAMIC_SLICE)
def _dynamic_slice(reader: Reader, node: Node, indices: Indices) -> Value:
    starts = _starts(reader, node, 1, node.types[0].shape, reader.operand_type(node, 0).shape)
    moved = tuple(i + s for i, s in zip(indices, starts, strict=True))
    return reader.operand(node, 0, moved)


@INLINE(shaping.DYNAMIC_UPDATE)
def _dynamic_update(reader: Reader, node: Node, indices: Indices) -> Value:
    shape, window = node.types[0].shape, reader.operand_type(node, 1).shape
    starts = _starts(reader, node, 2, window, shape)
    moved = [i - s for i, s in zip(indices, starts, strict=True)]
    guards = [Within(m, 0, n) for m, n in zip(moved, window, strict=True)]
    inside = tuple(bounded(m, n) for m, n in zip(moved, window, strict=True))
    old = reader.operand(node, 0, indices)
    return reader.under(guards, lambda: reader.operand(node, 1, inside), old)


def updated_element(reader: Reader, node: Node, indices: Indices) -> tuple[Indices, Value]:
    """Where an element of a window that replaces a part of a tensor goes, and the element."""
    window = reader.operand_type(node, 1).shape
    starts = _starts(reader, node, 2, window, node.types[0].shape)
    at = tuple(i + s for i, s in zip(indices, starts, strict=True))
    return at, reader.operand(node, 1, indices)


def _starts(
    reader: Reader, node: Node, operand: int, window: tuple[int, ...], shape: tuple[int, ...]
) -> list[Index]:
    """Start indices that are data, held so that the window lies inside."""
    found = []
    for axis, (size, n) in enumerate(zip(window, shape, strict=True)):
        given = reader.operand(node, operand, (constant(axis),))
        start = reader.named(Convert(given, dtypes.int64))
        found.append(data(start.name, n - size + 1))
    return found


def attributes_of(node: Node) -> Any:
    return node.attributes


MOST_OF_POSITIONS = 4  # operations on a place, after which what they make is read from memory


def of_positions(graph: Graph) -> set[int]:
    """Nodes of few operations on where an element is: masks, which take no memory to be known."""
    depths: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        is_start = node.op is leaves.IOTA or is_number(node)
        is_whole = node.op in INLINE and not node.types[0].dtype.is_float
        known = [depths.get(v.node, MOST_OF_POSITIONS) for v in node.operands]
        if is_start or (is_whole and known and max(known) < MOST_OF_POSITIONS):
            depths[position] = max(known, default=0) + (node.op in ELEMENTWISE)
    return set(depths)


def is_number(node: Node) -> bool:
    """Whether a node is a constant that is one number."""
    value = node.attributes.value if isinstance(node.attributes, leaves.Constant) else None
    return value is not None and not isinstance(value, ArrayLiteral)
