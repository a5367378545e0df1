"""Sums of squares around a centre, from the sums and the spreads of parts.

A part of n terms has a sum p and a spread s = Σ (x − p/n)². Around any centre c that is the same
for all terms, Σ (x − c)² over all parts is Σ (s + n (p/n − c)²).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.base.dtypes import DType
from treadle.ir.graph import Graph, Value
from treadle.ir.op import NONE, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.reductions import REDUCE_SUM, Reduce
from treadle.ir.ops.shaping import BROADCAST, Broadcast
from treadle.kernel.bindings import SURE_SPREAD, Binding, Partial
from treadle.verify.extended import Extended, ExtendedField
from treadle.verify.indices import ravel
from treadle.verify.keyed import Source
from treadle.verify.layouts import Parts
from treadle.verify.on_demand import Grid, OnDemand, along

SPREAD = "spread"  # of a part: its terms around their own mean, squared and summed


def spread(field: ExtendedField, terms: Extended, dtype: DType) -> Extended:
    """Of terms along the last axis; what rounding could make negative in long parts is 0."""
    n = field.literal(terms.p.shape[-1], dtype)
    last = (terms.p.ndim - 1,)
    mean = _apply(field, e.DIV, dtype, field.reduced("add", terms, last, dtype), n)
    gap = _apply(field, e.SUB, dtype, terms, mean.map(lambda a: a[..., None]))
    total = field.reduced("add", _apply(field, e.MUL, dtype, gap, gap), last, dtype)
    if terms.p.shape[-1] <= SURE_SPREAD:
        return total
    return _apply(field, e.MAX, dtype, total, field.zero(dtype))


def _apply(field: ExtendedField, op: Op, dtype: DType, *xs: Extended) -> Extended:
    return field.apply(op, NONE, xs, [dtype] * len(xs), dtype)


def around(graph: Graph, total: Value) -> dict[Value, Value]:
    """Sums of squared deviations of the terms of a sum, and the centre of each."""
    found: dict[Value, Value] = {}
    terms, axes = graph.nodes[total.node].operands[0], graph.nodes[total.node].attributes
    for position, node in enumerate(graph.nodes):
        if node.op is not REDUCE_SUM or node.attributes != axes:
            continue
        square = graph.nodes[node.operands[0].node]
        if square.op is not e.MUL or square.operands[0] != square.operands[1]:
            continue
        gap = graph.nodes[square.operands[0].node]
        if gap.op is not e.SUB or gap.operands[0] != terms:
            continue
        centre = graph.nodes[gap.operands[1].node]
        if centre.op is BROADCAST and _is_one_each(graph, terms, axes, centre.attributes):
            found[Value(position)] = centre.operands[0]
    return found


def _is_one_each(graph: Graph, terms: Value, summed: object, placed: object) -> bool:
    """Whether a centre is the same for all terms of a sum."""
    assert isinstance(summed, Reduce)
    assert isinstance(placed, Broadcast)
    rank = graph.type_of(terms).rank
    return placed.axes == tuple(i for i in range(rank) if i not in summed.axes)


def from_moments(
    on: OnDemand, centre: Value, sums: Binding, sums_of: Source, spreads_of: Source
) -> Callable[[Grid], Extended]:
    """Elements of a sum of squares around a centre, whose parts are given."""
    graph, field, content = on.graph, on.field, sums.content
    assert isinstance(content, Partial)
    node = graph.nodes[sums.value.node]
    parts, dtype = Parts(node, content), node.types[0].dtype
    count = field.literal(int(np.prod([v.extent for v in content.summed], dtype=np.int64)), dtype)

    def made(grid: Grid) -> Extended:
        mesh = np.ix_(*map(along, grid)) if grid else ()
        at = parts.of(np.asarray(ravel(mesh, node.types[0].shape)))
        shape = tuple(map(len, grid))
        middle = on.at(centre, grid).map(lambda a: np.broadcast_to(a, shape)[..., None])
        own = _apply(field, e.DIV, dtype, sums_of(at), count)
        gap = _apply(field, e.SUB, dtype, own, middle)
        moved = _apply(field, e.MUL, dtype, _apply(field, e.MUL, dtype, gap, gap), count)
        terms = _apply(field, e.ADD, dtype, spreads_of(at), moved)
        return field.reduced("add", terms, (at.ndim - 1,), dtype)

    return made
