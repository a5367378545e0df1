"""Convolutions that are written out: sums of products of shifted parts, or a product of windows.

Products of two families of views are looked for, one of images, one of weights, and what adds them
up. Paddings, strides and dilations are read off the views; whether it is that convolution is judged
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from treadle.base.dtypes import DType
from treadle.base.shapes import windows
from treadle.ir import composites as c
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.ops.elementwise import ADD, CAST, MUL
from treadle.ir.ops.linear import CONTRACT, WINDOW, Window
from treadle.ir.ops.shaping import CONCAT, PAD, PERMUTE, RESHAPE, SLICE, Pad, Slice
from treadle.ir.types import TensorType
from treadle.recognition.regions import Flow
from treadle.recognition.sketch import Sketch

MOST_SOURCES = 3  # candidates of images, and of weights: chosen, the others are views of views
MOST_PRODUCTS = 128  # of a sum: chosen, a kernel of 11 by 11 has 121
VIEWS = frozenset([RESHAPE, PERMUTE, CAST])  # a cast changes no element over the reals
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A sum of products by the values that may be its images and its weights."""

    root: Value
    images: tuple[Value, ...]
    weights: tuple[Value, ...]


def written(flow: Flow) -> Iterator[Written]:
    """Sums of products of parts of the same two values; each product is in one of them."""
    taken: set[int] = set()
    for position, node in enumerate(flow.graph.nodes):
        if node.op in (CONTRACT, MUL) and position not in taken:
            root, products = _sum_of(flow, position)
            if len(products) == 1 and not _is_windowed(flow, node):
                continue
            taken |= set(products)
            for pairs in _families(flow, products):
                yield from (Written(r, *pairs) for r in _roots(flow, root))


def _sum_of(flow: Flow, position: int) -> tuple[int, list[int]]:
    """The last sum that a product is a term of, where every term is a product, and those."""
    op, root, products, at = flow.graph.nodes[position].op, position, [position], position
    while len(flow.users[at]) == 1 and len(products) < MOST_PRODUCTS:
        before, at = at, flow.users[at][0]
        user = flow.graph.nodes[at]
        if user.op in VIEWS:
            continue
        others = [v for v in user.operands if v.node != before]
        if user.op is not ADD or len(others) != 1:
            break
        term = unviewed(flow, others[0])
        if flow.node(term).op is not op:
            break
        products.append(term.node)
        root = at
    return root, products


def unviewed(flow: Flow, value: Value) -> Value:
    while flow.node(value).op in VIEWS:
        value = flow.node(value).operands[0]
    return value


def _is_windowed(flow: Flow, node: Node) -> bool:
    """Whether an operand of a product is made of windows, or of parts that are joined."""
    if node.op is not CONTRACT:
        return False
    made = (flow.node(unviewed(flow, v)).op for v in node.operands)
    return any(op in (WINDOW, CONCAT) for op in made)


def _families(
    flow: Flow, products: Sequence[int]
) -> Iterator[tuple[tuple[Value, ...], tuple[Value, ...]]]:
    """Values that all first operands of products are parts of, and all second ones; or reversed."""
    above = [[sources(flow, v) for v in flow.graph.nodes[p].operands] for p in products]
    for sides in ((0, 1), (1, 0)):
        x, w = (common_of([pair[i] for pair in above]) for i in sides)
        if x and w:
            yield tuple(x), tuple(w)


def sources(flow: Flow, value: Value) -> list[Value]:
    """A value and what alone decides it, the nearest first."""
    return [value, *(cut.x for cut in flow.cuts(value))]


def common_of(chains: Sequence[list[Value]]) -> list[Value]:
    others = [set(chain) for chain in chains[1:]]
    return [v for v in chains[0] if all(v in other for other in others)]


def _roots(flow: Flow, position: int) -> list[Value]:
    """A sum, and views of it that nothing else is made of: the last ones first."""
    found = [Value(position)]
    while len(flow.users[position]) == 1:
        position = flow.users[position][0]
        if flow.graph.nodes[position].op not in VIEWS:
            break
        found.append(Value(position))
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Layout:
    """Axes of images, weights and results, in the order (N, C, …), (O, I, …) and (N, O, …)."""

    images: Shape
    weights: Shape
    result: Shape


def _layouts(rank: int) -> list[Layout]:
    spatial = tuple(range(2, rank))
    first = Layout((0, 1, *spatial), (0, 1, *spatial), (0, 1, *spatial))
    last, inner = (0, rank - 1, *range(1, rank - 1)), (rank - 1, rank - 2, *range(rank - 2))
    back = (0, *spatial, 1)
    return [first, Layout(last, inner, back)]


def proposals(region: Graph, types: tuple[TensorType, TensorType]) -> Iterator[Graph]:
    """Convolutions of images and weights that have the shape of a region's result."""
    x, w = types
    rank, result = x.rank, region.output_types[0]
    if rank < 3 or w.rank not in (rank, rank - 1) or result.rank != rank:
        return
    for layout in _layouts(rank):
        yield from _laid(region, types, layout, result)


def _laid(
    region: Graph, types: tuple[TensorType, TensorType], layout: Layout, result: TensorType
) -> Iterator[Graph]:
    x, w = types
    images = tuple(x.shape[i] for i in layout.images)
    is_depthwise = w.rank == x.rank - 1  # one channel each, an axis that is left out
    if is_depthwise:
        order = tuple(range(w.rank)) if layout.images[1] == 1 else (w.rank - 1, *range(w.rank - 1))
        weights = (w.shape[order[0]], 1, *(w.shape[i] for i in order[1:]))
    else:
        order, weights = layout.weights, tuple(w.shape[i] for i in layout.weights)
    turned = {axis: i for i, axis in enumerate(layout.result)}
    wanted = tuple(result.shape[turned[i]] for i in range(x.rank))
    if images[1] % weights[1] or wanted[:2] != (images[0], weights[0]):
        return
    groups = images[1] // weights[1]
    if weights[0] % groups:
        return
    for conv in _attributes(region, images, weights, wanted, groups):
        sketch = Sketch(types)
        both = [sketch.cast(v, _multiplied(region)) for v in sketch.inputs]
        given = sketch.permuted(both[0], layout.images)
        kernel = sketch.reshaped(sketch.permuted(both[1], order), weights)
        value = sketch.add(c.CONV, conv, given, kernel)
        yield sketch.result(sketch.permuted(value, layout.result), result)


def _multiplied(region: Graph) -> DType:
    """The dtype of what is multiplied."""
    product = next(n for n in region.nodes if n.op in (CONTRACT, MUL))
    return region.type_of(product.operands[0]).dtype


def _attributes(
    region: Graph, images: Shape, weights: Shape, wanted: Shape, groups: int
) -> Iterator[c.Conv]:
    """Paddings, strides and dilations that views of the region have, and that give the shape."""
    choices = [
        [
            (pad, stride, dilation)
            for pad in paddings_of(region)
            for stride in strides_of(region)
            for dilation in dilations_of(region)
            if n + sum(pad) >= dilation * (k - 1) + 1
            and windows(n + sum(pad), k, stride, dilation) == m
        ]
        for n, k, m in zip(images[2:], weights[2:], wanted[2:], strict=True)
    ]
    for chosen in product(*(found[:4] for found in choices)):
        pads, strides, dilations = zip(*chosen, strict=True)
        yield c.Conv(strides, pads, dilations, groups)


def paddings_of(region: Graph) -> list[tuple[int, int]]:
    found: dict[tuple[int, int], None] = {}
    for node in region.nodes:
        if node.op is PAD and isinstance(node.attributes, Pad):
            amounts = zip(node.attributes.low, node.attributes.high, strict=True)
            found |= {pair: None for pair in amounts if any(pair)}
    return [*found, (0, 0)]


def strides_of(region: Graph) -> list[int]:
    found = {1}
    for node in region.nodes:
        match node.attributes:
            case Slice(_, _, strides) | Window(_, _, strides, _):
                found |= set(strides)
    return sorted(found)


def dilations_of(region: Graph) -> list[int]:
    """Those of windows, and the least distance between parts along an axis."""
    found, starts = {1}, dict[tuple[Shape, int], set[int]]()
    for node in region.nodes:
        match node.attributes:
            case Window(_, _, _, dilations):
                found |= set(dilations)
            case Slice(begins, _, _) if node.op is SLICE:
                shape = region.type_of(node.operands[0]).shape
                for axis, start in enumerate(begins):
                    starts.setdefault((shape, axis), set()).add(start)
    for places in starts.values():
        steps = math.gcd(*(p - min(places) for p in places))
        found |= {steps} if steps else set()
    return sorted(found)
