"""What a region of one input may be: composites whose attributes are read off the region.

A proposal is a guess from types and attributes alone. Whether it is right is judged afterwards, so
that every spelling has the same proposals, and a wrong one costs a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from treadle.base.dtypes import DType, accumulator
from treadle.ir import composites as c
from treadle.ir.graph import Graph, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import NONE, Attributes, Op, Precision
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.ops.reductions import REDUCE_MAX, REDUCE_MIN, REDUCE_SUM, Reduce
from treadle.ir.ops.shaping import Broadcast
from treadle.ir.types import TensorType
from treadle.recognition.regions import numbers_of, ops_of
from treadle.recognition.sketch import Sketch

MOST_EPS = Fraction(1, 8)  # of a norm: chosen, usual ones are below 10⁻³
Shape = tuple[int, ...]
ELEMENTWISE = frozenset(op for op in vars(e).values() if isinstance(op, Op))
REDUCING = frozenset([REDUCE_SUM, REDUCE_MAX, REDUCE_MIN, c.MEAN, c.LOGSUMEXP, c.VAR])


@dataclass(frozen=True)
class Region:
    """A part of a graph by itself: inputs are named 0, 1, …; the first one is followed."""

    graph: Graph

    @cached_property
    def ops(self) -> set[Op]:
        return ops_of(self.graph)

    @cached_property
    def numbers(self) -> list[Fraction]:
        return numbers_of(self.graph)

    @cached_property
    def inputs(self) -> tuple[TensorType, ...]:
        return tuple(self.graph.nodes[i].types[0] for i in self.graph.inputs)

    @property
    def x(self) -> TensorType:
        return self.inputs[0]

    @property
    def type(self) -> TensorType:
        return self.graph.output_types[0]

    @cached_property
    def sums(self) -> list[tuple[Shape, Shape]]:
        """Shapes that are reduced in it, each with the axes."""
        found: dict[tuple[Shape, Shape], None] = {}
        for node in self.graph.nodes:
            axes = _summed_axes(node.op, node.attributes)
            if axes:
                found[self.graph.type_of(node.operands[0]).shape, axes] = None
        return list(found)

    @property
    def reduces(self) -> bool:
        """Whether something is reduced in it."""
        return bool(self.ops & REDUCING)

    @cached_property
    def repeats(self) -> bool:
        """Whether its result is the same all along an axis of several elements, by its views."""
        same: list[set[int]] = []  # axes along which each node's value is the same
        for node in self.graph.nodes:
            rank, operands = node.types[0].rank, [same[v.node] for v in node.operands]
            found: set[int] = set()
            match node.attributes:
                case Broadcast(_, axes):
                    (inner,) = operands
                    found = {i for i in range(rank) if i not in axes or axes.index(i) in inner}
                case Constant(number) if not isinstance(number, ArrayLiteral):
                    found = set(range(rank))
                case _ if node.op in ELEMENTWISE and operands:
                    found = set.intersection(*operands)
            same.append(found)
        result = self.graph.outputs[0].value.node
        return any(self.type.shape[axis] > 1 for axis in same[result])

    @cached_property
    def dtype(self) -> DType:
        """The widest float of what is computed in it."""
        floats = [t.dtype for n in self.graph.nodes for t in n.types if t.is_float]
        return max(floats, key=lambda d: d.bits)

    @property
    def wide(self) -> DType:
        """What a composite that widens its operand computes in: what was written, at least."""
        return max(self.dtype, accumulator(self.x.dtype), key=lambda d: d.bits)


def _summed_axes(op: Op, attributes: Attributes) -> Shape | None:
    match attributes:
        case Reduce(axes) if op is REDUCE_SUM:
            return axes
        case c.Axis(axis):
            return (axis,)
        case c.Axes(axes) | c.Variance(axes):
            return axes
        case _:
            return None


Propose = Callable[[Region], Iterator[Graph]]


def _applied(region: Region, op: Op, attributes: Attributes = NONE) -> Graph:
    """A composite of the region's input, in the dtype that the precision pass would choose."""
    sketch = Sketch(region.inputs)
    value = sketch.add(op, attributes, operand_of(sketch, region, op))
    return sketch.result(sketch.reshaped(value, region.type.shape), region.type)


def operand_of(sketch: Sketch, region: Region, op: Op) -> Value:
    x = sketch.inputs[0]
    if op.precision is Precision.FIRST:
        return x if region.wide is accumulator(region.x.dtype) else sketch.cast(x, region.wide)
    is_wide = op.precision is Precision.WIDEN
    return sketch.cast(x, region.wide if is_wide else region.dtype)


def activations(region: Region) -> Iterator[Graph]:
    """Functions of an element."""
    if region.x.shape != region.type.shape or region.reduces or region.repeats:
        return
    if e.EXP in region.ops or c.SIGMOID in region.ops or e.TANH in region.ops:
        yield _applied(region, c.SILU)
        yield _applied(region, c.SIGMOID)
    if e.TANH in region.ops:
        yield _applied(region, c.GELU, c.Gelu("tanh"))
    if e.ERF in region.ops:
        yield _applied(region, c.GELU, c.Gelu("none"))


def softmaxes(region: Region) -> Iterator[Graph]:
    """Softmax, its logarithm, and the logarithm of a sum of exponentials."""
    has_log = e.LOG in region.ops or c.LOGSUMEXP in region.ops
    if region.repeats:
        return
    for shape, axes in region.sums:
        if shape != region.x.shape:
            continue
        if region.type.shape == shape and len(axes) == 1:
            yield _applied(region, c.LOG_SOFTMAX if has_log else c.SOFTMAX, c.Axis(axes[0]))
        kept = math.prod(n for i, n in enumerate(shape) if i not in axes)
        if has_log and region.type.size == kept:
            yield _applied(region, c.LOGSUMEXP, c.Axes(axes))


def masked_softmaxes(region: Region) -> Iterator[Graph]:
    """The softmax of scores that are −∞ where a flag does not hold, or where it does."""
    conditions = (n.operands[0] for n in region.graph.nodes if n.op is e.WHERE)
    flags = [v for v in conditions if region.graph.type_of(v).shape == region.x.shape]
    for flag in dict.fromkeys(flags):
        for shape, axes in region.sums:
            if shape == region.x.shape == region.type.shape and len(axes) == 1:
                for is_hidden in (False, True):
                    yield _masked_softmax(region, flag, axes[0], is_hidden)


def _masked_softmax(region: Region, flag: Value, axis: int, is_hidden: bool) -> Graph:
    sketch = Sketch(region.inputs)
    x = sketch.cast(sketch.inputs[0], region.wide)
    mask = sketch.copied(region.graph, flag)
    lowest = sketch.add(CONSTANT, Constant(-math.inf, sketch.builder.type_of(x)))
    both = (lowest, x) if is_hidden else (x, lowest)
    masked = sketch.add(e.WHERE, NONE, mask, *both)
    return sketch.result(sketch.add(c.SOFTMAX, c.Axis(axis), masked), region.type)


def norms(region: Region) -> Iterator[Graph]:
    """Layer, RMS, batch, group and instance norms, without weights."""
    shape = region.x.shape
    if region.type.shape != shape or region.repeats:
        return
    eps = [float(n) for n in region.numbers if 0 < n < MOST_EPS] or [0.0]
    for summed, axes in region.sums:
        for value in eps:
            yield from _norms(region, summed, axes, value)


def _norms(region: Region, summed: Shape, axes: Shape, eps: float) -> Iterator[Graph]:
    shape, rank = region.x.shape, len(region.x.shape)
    if summed == shape and axes == tuple(range(rank - len(axes), rank)):
        yield _applied(region, c.RMS_NORM, c.Norm(len(axes), eps))
        yield _applied(region, c.LAYER_NORM, c.Norm(len(axes), eps))
    if summed == shape and len(axes) == rank - 1:
        (channels,) = set(range(rank)) - set(axes)
        yield _batch_norm(region, channels, eps)
    is_inner = rank > 2 and 0 not in axes and 1 not in axes
    if is_inner and summed[:1] == shape[:1] and shape[1] % summed[1] == 0:
        yield _applied(region, c.GROUP_NORM, c.GroupNorm(summed[1], eps))


def _batch_norm(region: Region, channels: int, eps: float) -> Graph:
    """Channels are the second axis of the composite."""
    rank = region.x.rank
    others = [i for i in range(rank) if i != channels]
    order = (others[0], channels, *others[1:])
    sketch = Sketch(region.inputs)
    x = operand_of(sketch, region, c.BATCH_NORM)
    normed = sketch.add(c.BATCH_NORM, c.BatchNorm(eps), sketch.permuted(x, order))
    back = tuple(order.index(i) for i in range(rank))
    return sketch.result(sketch.permuted(normed, back), region.type)


# Nodes below an anchor of a function of an element that are tried as its result: chosen.
FEW_ROOTS = {e.ERF: 6, e.TANH: 6, c.SIGMOID: 4, c.SOFTMAX: 4}
# By what a region must contain: an anchor, below which its root is looked for.
PROPOSALS: dict[Op, tuple[Propose, ...]] = {
    e.ERF: (activations,),
    e.TANH: (activations,),
    e.EXP: (softmaxes, activations, masked_softmaxes),
    c.SIGMOID: (activations,),
    c.SOFTMAX: (softmaxes,),
    c.LOGSUMEXP: (softmaxes,),
    e.SQRT: (norms,),
    e.RSQRT: (norms,),
    e.POW: (norms,),
}
