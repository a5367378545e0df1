"""Rows that are added at indices of few: parts of them are added apart, then the parts.

A scatter-add onto few rows has few places that threads could own, however many rows are added: the
buckets of a relative bias, whose gradient is one row for each pair of positions.
"""

from __future__ import annotations

from treadle.base.dtypes import accumulator
from treadle.ir.graph import GraphBuilder, Value
from treadle.ir.ops.elementwise import CAST, Cast
from treadle.ir.ops.indexing import SCATTER_ADD, ScatterAdd
from treadle.ir.ops.reductions import REDUCE_SUM, Reduce
from treadle.ir.ops.shaping import RESHAPE, Reshape
from treadle.kernel.target import Rewriting
from treadle.rules.flat_scatter import MOST_IN_TURN
from treadle.rules.pattern import Anything, X, apply
from treadle.rules.rule import Exactness, Match, Rule


def is_scatter_to_few(match: Match) -> bool:
    """many rows of floats are added along the first axis, at indices of few, and threads that wait
    for each other add few each"""
    attributes, indices = match.root.attributes, match.type_of("indices")
    assert isinstance(attributes, ScatterAdd)
    is_first_axis = attributes.axis == 0 and attributes.batch == 0
    limits = match.target.rewriting
    is_few = 0 < attributes.size <= limits.few_scattered and indices.size >= limits.many_scattered
    if not (is_first_axis and is_few and match.type.is_float):
        return False
    parts = _parts(indices.size, attributes.size, limits)
    is_short = indices.size // parts <= MOST_IN_TURN
    return parts > 1 and (is_short or match.target.adds_together(match.type.dtype))


def _parts(rows: int, size: int, limits: Rewriting) -> int:
    """How many equal parts rows are cut into: their sums are no more rows than there were."""
    most = min(limits.most_scattered, rows) // size
    return max((n for n in range(1, most + 1) if rows % n == 0), default=1)


def _in_parts(match: Match, builder: GraphBuilder) -> Value:
    attributes, origin = match.root.attributes, match.root.origin
    type_, indices = match.type_of("x"), match.type_of("indices")
    assert isinstance(attributes, ScatterAdd)
    parts = _parts(indices.size, attributes.size, match.target.rewriting)
    cut = (parts, indices.size // parts)
    # Sums of parts are as wide as one sum of all would be.
    (x,) = builder.add(CAST, Cast(accumulator(type_.dtype)), (match["x"],), origin)
    (x,) = builder.add(RESHAPE, Reshape((*cut, *type_.shape[indices.rank :])), (x,), origin)
    (at,) = builder.add(RESHAPE, Reshape(cut), (match["indices"],), origin)
    apart = ScatterAdd(1, attributes.size, batch=1)
    (sums,) = builder.add(SCATTER_ADD, apart, (x, at), origin)
    (rows,) = builder.add(REDUCE_SUM, Reduce((0,)), (sums,), origin)
    return builder.add(CAST, Cast(type_.dtype), (rows,), origin)[0]


SCATTER_TO_FEW = Rule(
    "scatter_to_few",
    "Rows added at indices of few are added part by part, and the parts then.",
    apply(SCATTER_ADD, X, Anything("indices")),
    _in_parts,
    is_scatter_to_few,
    Exactness.ROUNDING,
)
