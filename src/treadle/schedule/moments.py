"""Sums of squares around a mean that can be computed with the sum itself, in one read.

An analysis: it finds pairs of reductions in a graph, and `sums` lowers a pair as one kernel on a
GPU, where norms over columns read a large tensor twice otherwise. Each part of the tensor is summed
around its own first row, which is close to its mean, so that little is lost where squares are
subtracted; parts are then combined by their means.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import reductions, shaping
from treadle.kernel.target import CPU
from treadle.rules.pattern import Anything, Number, apply, captures
from treadle.rules.rule import Match

X = Anything("x")
_TOTAL = apply(reductions.REDUCE_SUM, X, name="total")
_MEAN = apply(e.DIV, _TOTAL, Number(name="count"), name="mean")
_DEVIATION = apply(e.SUB, X, apply(shaping.BROADCAST, _MEAN, name="spread"), name="deviation")
# Σ (x − m)² with m = Σ x / n
SQUARED_DEVIATIONS = apply(reductions.REDUCE_SUM, apply(e.MUL, _DEVIATION, _DEVIATION))


@functools.lru_cache(maxsize=8)
def spreads(graph: Graph) -> dict[TensorValue, tuple[TensorValue, TensorValue]]:
    """Sums of squares around a mean: which sum the mean is of, and the mean."""
    found: dict[TensorValue, tuple[TensorValue, TensorValue]] = {}
    for position, node in enumerate(graph.nodes):
        match = _match(graph, node)
        if match is not None and _is_around_mean(match):
            found[TensorValue(position)] = match["total"], match["mean"]
    return found


def _match(graph: Graph, node: Node) -> Match | None:
    values = captures(graph, SQUARED_DEVIATIONS, node, Counter())
    return None if values is None else Match(graph, node, values, CPU)


def _is_around_mean(match: Match) -> bool:
    """Whether both sums are of floats over the same axes, and the count is theirs."""
    x = match.type_of("x")
    summed = match.root.attributes
    spread = match.node("spread").attributes
    assert isinstance(summed, reductions.Reduce)
    assert isinstance(spread, shaping.Broadcast)
    others = tuple(i for i in range(x.rank) if i not in summed.axes)
    count = math.prod(x.shape[i] for i in summed.axes)
    return (
        x.dtype.is_float
        and match.node("total").attributes == summed
        and match.number("count") == count
        and spread.axes == others
    )


@functools.lru_cache(maxsize=8)
def spread_sums(graph: Graph) -> frozenset[TensorValue]:
    """Sums whose parts are wanted with their squared deviations."""
    return frozenset(total for total, _ in spreads(graph).values())
