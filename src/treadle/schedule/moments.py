"""A sum and the sum of squares around its mean, read once: for a GPU's norms over columns.

Each part is summed around its own first row, which is near its mean, so that little is lost where
squares are subtracted; parts are then put together by their means.
"""

from __future__ import annotations

import functools
import math

from treadle.ir.graph import Graph
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import reductions, shaping
from treadle.ir.ops.leaves import Constant


@functools.lru_cache(maxsize=8)
def spreads(graph: Graph) -> dict[TensorValue, tuple[TensorValue, TensorValue]]:
    """Sums of squares around a mean: which sum the mean is of, and the mean."""
    found: dict[TensorValue, tuple[TensorValue, TensorValue]] = {}
    for position, node in enumerate(graph.nodes):
        if node.op is reductions.REDUCE_SUM and graph.type_of(node.operands[0]).dtype.is_float:
            pair = _pair(graph, position)
            if pair is not None:
                found[TensorValue(position)] = pair
    return found


def _pair(graph: Graph, position: int) -> tuple[TensorValue, TensorValue] | None:
    """Σ (x − m)² with m = Σ x / n, both over the same axes."""
    node = graph.nodes[position]
    assert isinstance(node.attributes, reductions.Reduce)
    axes = node.attributes.axes
    square = graph.nodes[node.operands[0].node]
    if square.op is not e.MUL or square.operands[0] != square.operands[1]:
        return None
    gap = graph.nodes[square.operands[0].node]
    if gap.op is not e.SUB:
        return None
    x, spread = gap.operands[0], graph.nodes[gap.operands[1].node]
    kept = tuple(i for i in range(graph.type_of(x).rank) if i not in axes)
    if not isinstance(spread.attributes, shaping.Broadcast) or spread.attributes.axes != kept:
        return None
    mean = spread.operands[0]
    quotient = graph.nodes[mean.node]
    if quotient.op is not e.DIV:
        return None
    total, count = (graph.nodes[v.node] for v in quotient.operands)
    size = math.prod(graph.type_of(x).shape[i] for i in axes)
    is_mean = isinstance(count.attributes, Constant) and count.attributes.value == size
    is_same = total.op is reductions.REDUCE_SUM and total.operands == (x,)
    if not is_mean or not is_same or total.attributes != node.attributes:
        return None
    return quotient.operands[0], mean


@functools.lru_cache(maxsize=8)
def spread_sums(graph: Graph) -> frozenset[TensorValue]:
    """Sums whose parts are wanted with their spread."""
    return frozenset(total for total, _ in spreads(graph).values())
