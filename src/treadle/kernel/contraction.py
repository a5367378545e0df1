"""One description of a contraction: its axes by what they do, its operands and where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Generic, Protocol, TypeVar

from treadle.base.dtypes import float8_e5m2
from treadle.ir.composites import CONV, CONV_GRAD_W, CONV_GRAD_X
from treadle.ir.control import SCAN
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.types import TensorType
from treadle.kernel.index import Index, Var
from treadle.kernel.nodes import Load, StridedAxis, strided_axis
from treadle.kernel.target import Matmuls

Axes = tuple[Var, ...]
T = TypeVar("T")  # what an operand is: a tensor of a graph, or a value inside a kernel


@dataclass(frozen=True, slots=True)
class Operand(Generic[T]):
    """One factor: the axes it varies along, and the load that gives an element if it has one."""

    value: T
    axes: Axes
    load: Load | None = None

    @property
    def size(self) -> int:
        return size(self.axes)

    def stride(self, axis: Var) -> int | None:
        """Elements between neighbours along an axis; None where the operand is not affine in it."""
        return None if self.load is None else self.load.index.factor_of(axis)


@dataclass(frozen=True, slots=True)
class Contraction(Generic[T]):
    """result[batch, rows, columns] = Σ over the depth of left[rows, depth] · right[depth, columns].

    Columns are axes of the right operand alone. `tiled` are those of them that stand next to each
    other at the end of the result: matmul tiles run along these. Operands are tensors where a node
    of a graph is described, values where a kernel is.
    """

    left: Operand[T]
    right: Operand[T]
    result: Axes
    tiled: Axes

    @property
    def batch(self) -> Axes:
        """Axes of both operands; loops of a kernel may also be of neither."""
        left, right = self.left.axes, self.right.axes
        return tuple(v for v in self.result if (v in left) == (v in right))

    @property
    def rows(self) -> Axes:
        return self._alone(self.left, self.right)

    @property
    def columns(self) -> Axes:
        return self._alone(self.right, self.left)

    def _alone(self, operand: Operand[T], other: Operand[T]) -> Axes:
        return tuple(v for v in self.result if v in operand.axes and v not in other.axes)

    @property
    def depth(self) -> Axes:
        """What is summed, in the order of the left operand."""
        every = dict.fromkeys(self.left.axes + self.right.axes)
        return tuple(v for v in every if v not in self.result)

    @property
    def outer(self) -> Axes:
        """The right operand's axes that tiles do not run along: batch axes and other columns."""
        return tuple(v for v in self.result if v in self.right.axes and v not in self.tiled)

    @property
    def flops(self) -> int:
        return 2 * size(self.result) * size(self.depth)

    def is_for_library(self, limits: Matmuls) -> bool:
        """Whether a library's matmul is worth a launch of its own."""
        is_deep = size(self.depth) >= limits.depth_for_library
        return self.flops >= limits.flops_for_library and is_deep

    def is_of_few_rows(self, limits: Matmuls) -> bool:
        """Whether one operand, a token's or two, is multiplied by many weights in their order.

        All there is to do is to read them: loops do that, and what is around can be fused. So do
        the heads of a token that share keys and values, whose axes may be in any order.
        """
        (rows, _), (_, many) = sorted(
            ((size(self.rows), self.left), (size(self.columns), self.right)), key=lambda s: s[0]
        )
        is_along = bool(many.axes) and bool(self.depth) and many.axes[-1] == self.depth[-1]
        batch = size(self.batch)
        is_read_well = many.size <= limits.summed_batch if batch > 1 else is_along
        return rows <= limits.most_summed(batch) and is_read_well

    @property
    def columns_last(self) -> Contraction[T]:
        """The operand that has the last axis of the result on the right."""
        is_left = bool(self.result) and self.result[-1] not in self.right.axes
        return oriented(self.right, self.left, self.result) if is_left else self

    def for_tiles(self, limits: Matmuls) -> Contraction[T]:
        """Columns at the end; batch axes there go to the front, if each matmul is worth it."""
        found = self.columns_last
        if found.tiled or size(found.columns) < limits.least_columns:
            return found
        if found.flops < limits.moved_flops * size(found.batch):
            return found
        return oriented(found.left, found.right, found.batch + found.rows + found.columns)

    @property
    def transposed(self) -> Contraction[T] | None:
        """Columns along the last rows that lie together; None where there are no rows."""
        rows: Axes = ()
        for axis in reversed(self.rows):
            if rows and self.result.index(axis) + 1 != self.result.index(rows[0]):
                break
            rows = (axis, *rows)
        others = tuple(v for v in self.result if v not in rows)
        return oriented(self.right, self.left, others + rows) if rows else None


def oriented(left: Operand[T], right: Operand[T], result: Axes) -> Contraction[T]:
    """A contraction whose tiles run along all columns at the end of the result."""
    count = 0
    while count < len(result) and result[-1 - count] not in left.axes:
        count += 1
    return Contraction(left, right, result, result[len(result) - count :])


class Typed(Protocol):
    """A graph, or one that is being built."""

    def type_of(self, value: TensorValue) -> TensorType: ...


def contraction_of(graph: Typed, node: Node) -> Contraction[TensorValue]:
    """The contraction that a node of a graph is, its operands in their order."""
    attributes: Any = node.attributes
    axes: dict[str, Var] = {}
    operands: list[Operand[TensorValue]] = []
    for value, labels in zip(node.operands, attributes.labels, strict=False):
        for label, extent in zip(labels, graph.type_of(value).shape, strict=True):
            axes[label] = Var(f"x{label}", extent)
        operands.append(Operand(value, tuple(axes[c] for c in labels)))
    left, right = operands
    return oriented(left, right, tuple(axes[c] for c in attributes.labels[2]))


def size(axes: Sequence[Var]) -> int:
    return math.prod(v.extent for v in axes)


def named(stem: str, axis: Var) -> Var:
    """A loop over an axis, or over a part of it, by a name of its own."""
    return replace(axis, name=stem + axis.name[1:])


def stride_of(index: Index, axes: Sequence[Var]) -> int | None:
    """The one stride at which axes together, the last the fastest, move an index, if there is."""
    found, reach = 0, 1
    for axis in reversed(axes):
        if axis.extent == 1:
            continue
        factor = index.factor_of(axis)
        if factor is None or (reach > 1 and factor != found * reach):
            return None
        found = factor if reach == 1 else found
        reach *= axis.extent
    return found


def strided_axis_of(index: Index, axes: Sequence[Var]) -> StridedAxis | None:
    """Where axes together, the last the fastest, take an index; None if that is not affine."""
    factors = [index.factor_of(v) for v in axes]
    if any(f is None for f in factors):
        return None
    if len(axes) == 1:
        return StridedAxis(axes[0].extent, factors[0] or 0)
    steps = product(*(range(v.extent) for v in axes))
    return strided_axis([sum((f or 0) * i for f, i in zip(factors, s, strict=True)) for s in steps])


def is_float8_for_library(
    contraction: Contraction[Any], types: Sequence[TensorType], limits: Matmuls
) -> bool:
    """Whether a library multiplies 8-bit floats as they are: whole matrices, not two gradients."""
    is_gradient = all(t.dtype is float8_e5m2 for t in types)
    sizes = size(contraction.rows), size(contraction.columns), size(contraction.depth)
    is_whole = all(n and n % limits.float8_pack == 0 for n in sizes) and not contraction.batch
    is_large = contraction.is_for_library(limits) and not contraction.is_of_few_rows(limits)
    return limits.has_float8 and is_whole and is_large and not is_gradient


CONVOLUTIONS = frozenset([CONV, CONV_GRAD_X, CONV_GRAD_W])


def launches_dominate(graph: Graph, limits: Matmuls) -> bool:
    """Whether launches would cost more than a graph's matmuls, which loops then compute.

    What is around a loop can be fused into it, what is around a library's matmul cannot. Only wide
    floats are counted: narrow ones are for units that a library drives better.
    """
    return _wide_flops(graph, limits) <= limits.launch_flops_of_graph


def _wide_flops(graph: Graph, limits: Matmuls) -> float:
    """Operations of all matmuls, of loops' bodies too; infinite if one matmul is large."""
    total = 0.0
    for node in graph.nodes:
        if node.op is SCAN:
            attributes: Any = node.attributes
            total += attributes.length * _wide_flops(attributes.body, limits)
        elif node.op in CONVOLUTIONS:
            return math.inf  # a library call in any case
        elif node.op is CONTRACT and node.types[0].is_float:
            contraction = contraction_of(graph, node)
            if contraction.is_of_few_rows(limits):
                continue  # loops in any case
            flops = contraction.flops
            if node.types[0].dtype.is_narrow or flops > limits.launch_flops:
                return math.inf
            total += flops
    return total
