"""Pooling that is written out: maxima or means of parts of one tensor, or of views of its windows.

Chains of maxima or sums of slices are looked for, and reductions of windows, of blocks and of parts
that are joined. Sizes, strides, dilations and paddings are read off the views; whether it is that
pooling is judged afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from treadle.base.shapes import windows
from treadle.ir import composites as c
from treadle.ir.graph import Graph, Value
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.linear import WINDOW, Window
from treadle.ir.ops.reductions import REDUCE_MAX, REDUCE_SUM
from treadle.ir.ops.shaping import CONCAT, SLICE, Slice
from treadle.recognition import convolutions as conv
from treadle.recognition.proposals import Region, operand_of
from treadle.recognition.regions import Flow
from treadle.recognition.sketch import Sketch
from treadle.rules.pattern import number_of

MOST_PARTS = 128  # of a chain: chosen, windows of 11 by 11 have 121
MOST_CHOICES = 4  # of sizes, strides, dilations and padding of an axis: chosen
_CHAINS = frozenset([e.MAX, e.ADD])
_REDUCTIONS = frozenset([REDUCE_MAX, REDUCE_SUM, c.MEAN])
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """What combines parts of one value, and the values that they may be parts of."""

    root: Value
    images: tuple[Value, ...]


def written(flow: Flow) -> Iterator[Parts]:
    """Combinations of parts of one value, each with what may come after it: the last one first."""
    taken: set[int] = set()
    for position, node in enumerate(flow.graph.nodes):
        if position in taken:
            continue
        root, parts = position, list[Value]()
        if node.op in _CHAINS:
            root, parts, nodes = _chain(flow, position)
            taken |= nodes
        elif node.op in _REDUCTIONS and _is_viewed(flow, node.operands[0]):
            parts = list(node.operands)
        if parts:
            images = conv.common_of([conv.sources(flow, v) for v in parts])
            yield from (Parts(r, tuple(images)) for r in _roots(flow, root) if images)


def _chain(flow: Flow, position: int) -> tuple[int, list[Value], set[int]]:
    """The last of some maxima or sums whose terms are all slices, the terms, and the nodes."""
    node = flow.graph.nodes[position]
    parts, nodes, root = _terms(flow, Value(position), node.op), {position}, position
    if not parts:
        return position, [], nodes
    while len(flow.users[root]) == 1 and len(parts) < MOST_PARTS:
        user = flow.graph.nodes[flow.users[root][0]]
        others = [v for v in user.operands if v.node != root]
        if user.op is not node.op or len(others) != 1:
            break
        more = _terms(flow, others[0], user.op)
        if more is None:
            break
        parts += more
        root = flow.users[root][0]
        nodes.add(root)
    return root, parts, nodes


def _terms(flow: Flow, value: Value, op: Op) -> list[Value] | None:
    """The slices that a value is, or is combined of, if it is that; numbers may be among them."""
    if flow.closed[value.node]:
        return []
    if flow.node(conv.unviewed(flow, value)).op is SLICE:
        return [value]
    node, found = flow.node(value), list[Value]()
    if node.op is not op:
        return None
    for operand in node.operands:
        terms = _terms(flow, operand, op)
        if terms is None:
            return None
        found += terms
    return found


def _is_viewed(flow: Flow, value: Value) -> bool:
    """Whether a value has windows, parts that are joined, or more axes than what it is made of."""
    node = flow.node(value)
    while node.op in conv.VIEWS:
        if node.types[0].rank > flow.graph.type_of(node.operands[0]).rank:
            return True
        node = flow.node(node.operands[0])
    return node.op in (WINDOW, CONCAT)


def _roots(flow: Flow, position: int) -> list[Value]:
    """A combination, and views, multiples and reductions of it: the last one first."""
    found = [Value(position)]
    while len(flow.users[position]) == 1:
        position = flow.users[position][0]
        node = flow.graph.nodes[position]
        is_multiple = node.op in (e.MUL, e.DIV) and any(
            number_of(flow.graph, v) is not None for v in node.operands
        )
        if node.op not in conv.VIEWS | _REDUCTIONS and not is_multiple:
            break
        found.append(Value(position))
    return found[::-1]


def may_be(x: Shape, result: Shape) -> bool:
    """Whether pooling of one shape may give another: batch and channels stay."""
    return len(x) == len(result) >= 3 and any(x[i] == result[i] for i in (1, -1))


def proposals(region: Region) -> Iterator[Graph]:
    """Pooling of images, channels first or last, that has the shape of the region's result."""
    rank = region.x.rank
    is_greatest = bool(region.ops & {e.MAX, REDUCE_MAX})
    first, last = tuple(range(rank)), (0, rank - 1, *range(1, rank - 1))
    for order in (first, last):
        x, result = ([t.shape[i] for i in order] for t in (region.x, region.type))
        if x[:2] == result[:2] and any(n > 1 for n in result[2:]):  # a mean of all is no pooling
            for pool in _attributes(region.graph, x[2:], result[2:], order[2:]):
                yield _pooled(region, c.MAX_POOL if is_greatest else c.AVG_POOL, pool, order)


def _pooled(region: Region, op: Op, pool: c.Pool, order: Shape) -> Graph:
    sketch = Sketch(region.inputs)
    x = sketch.permuted(operand_of(sketch, region, op), order)
    back = tuple(order.index(i) for i in range(len(order)))
    return sketch.result(sketch.permuted(sketch.add(op, pool, x), back), region.type)


def _attributes(
    region: Graph, images: Sequence[int], wanted: Sequence[int], axes: Sequence[int]
) -> Iterator[c.Pool]:
    """What views of the region have, and gives the shape: the largest windows first."""
    paddings = [low for low, high in conv.paddings_of(region) if low == high]
    dilations = conv.dilations_of(region)
    choices = []
    for n, m, axis in zip(images, wanted, axes, strict=True):
        strides = {*conv.strides_of(region), *([n // m] if m else [])}
        found = [
            (size, stride, padding, dilation)
            for size in sorted(_sizes(region, axis, n, m), reverse=True)
            for stride in sorted(strides)
            for padding in paddings
            for dilation in dilations
            if size > 0 < stride
            and n + 2 * padding >= dilation * (size - 1) + 1
            and (size > 1 or (stride, padding, dilation) == (1, 0, 1))
            and windows(n + 2 * padding, size, stride, dilation) == m
        ]
        choices.append(found[:MOST_CHOICES])
    for chosen in product(*choices):
        sizes, strides_, pads, apart = zip(*chosen, strict=True)
        yield c.Pool(sizes, strides_, pads, apart)


def _sizes(region: Graph, axis: int, n: int, m: int) -> set[int]:
    """Elements of a window along an axis: as windows, blocks or the places of slices have it."""
    found, starts = {1}, dict[Shape, set[int]]()
    if m and n % m == 0:
        found.add(n // m)
    for node in region.nodes:
        match node.attributes:
            case Window(axes, sizes, _, _) if axis in axes:
                found.add(sizes[axes.index(axis)])
            case Slice(begins, _, _) if node.op is SLICE and axis < len(begins):
                shape = region.type_of(node.operands[0]).shape
                starts.setdefault(shape, set()).add(begins[axis])
    return found | {len(places) for places in starts.values()}
