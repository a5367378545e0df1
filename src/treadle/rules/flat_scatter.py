"""Scatter-adds of any indices as one of a flat table: rows, and one index for each.

Where sums have a fixed order, rows that are sorted and added run by run are the fast form, and it
needs one list of indices along the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.base import dtypes
from treadle.ir.graph import GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import NONE, Attributes, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.indexing import SCATTER_ADD, ScatterAdd
from treadle.ir.ops.leaves import CONSTANT, INPUT, IOTA, Constant, Iota, Leaf
from treadle.ir.ops.shaping import PERMUTE, RESHAPE, Permute, Reshape
from treadle.ir.types import TensorType
from treadle.rules.pattern import Anything, X, apply
from treadle.rules.rule import Body, Exactness, Match, Rule

Add = Callable[..., Value]

# Updates of one element of a batch, one after the other, from which the table is flat: chosen. A
# thread adds to memory and waits, some 0.4 µs each; fewer take less than sorting them.
MOST_IN_TURN = 1024


def is_scatter_of_table(match: Match) -> bool:
    """sums have a fixed order, and rows are added along a later axis, by batches, or at indices of
    several axes, so many that sorting them costs less than looking, or waiting for each other"""
    given, indices = match.root.attributes, match.type_of("indices")
    assert isinstance(given, ScatterAdd)
    target, is_flat = match.target, given.axis == 0 and given.batch == 0 and indices.rank == 1
    if is_flat or not target.is_spmd or target.adds_together(match.type.dtype):
        return False
    in_turn = math.prod(indices.shape[given.batch :])
    looks, least = indices.size * given.size, target.rewriting.least_sorted
    return looks >= least > 0 or (given.batch > 0 and in_turn > MOST_IN_TURN)


def _as_table(match: Match, builder: GraphBuilder) -> Body:
    given, x, indices = match.root.attributes, match.type_of("x"), match.type_of("indices")
    assert isinstance(given, ScatterAdd)
    inside = GraphBuilder()

    def add(op: Op, attributes: Attributes, *operands: Value) -> Value:
        return inside.add(op, attributes, operands, match.root.origin)[0]

    def leaf(name: str, type_: TensorType) -> Value:
        return add(INPUT, Leaf(name, type_))

    axis, batch, chosen = given.axis, given.batch, indices.rank - given.batch
    batches, middle = range(batch), range(batch, axis)
    rest = range(axis + chosen, x.rank)
    order = (*batches, *range(axis, axis + chosen), *middle, *rest)
    width = math.prod(x.shape[i] for i in (*middle, *rest))
    rows = add(PERMUTE, Permute(order), leaf("x", x))
    rows = add(RESHAPE, Reshape((indices.size, width)), rows)
    at = leaf("indices", indices)
    count = math.prod(x.shape[i] for i in batches)
    if batch:
        at = _in_table(add, at, indices, given)
    at = add(RESHAPE, Reshape((indices.size,)), at)
    sums = add(SCATTER_ADD, ScatterAdd(0, count * given.size), rows, at)
    shape = [*(x.shape[i] for i in batches), given.size, *(x.shape[i] for i in (*middle, *rest))]
    sums = add(RESHAPE, Reshape(tuple(shape)), sums)
    back = (*batches, *range(batch + 1, axis + 1), batch, *range(axis + 1, len(shape)))
    sums = add(PERMUTE, Permute(back), sums)
    graph = inside.build([Output(OutputKind.RESULT, "0", sums)], "table")
    return Body(graph, (match["x"], match["indices"]))


def _in_table(add: Add, at: Value, indices: TensorType, given: ScatterAdd) -> Value:
    """Indices of a batch's elements counted on; those outside are behind the table."""
    count = math.prod(indices.shape[: given.batch])
    is_short = count * given.size < 2**31
    type_ = indices.with_dtype(dtypes.int32 if is_short else dtypes.int64)

    def number(value: int) -> Value:
        return add(CONSTANT, Constant(value, type_))

    wide = add(e.CAST, e.Cast(dtypes.int64), at)
    low, high = (
        add(CONSTANT, Constant(n, indices.with_dtype(dtypes.int64))) for n in (0, given.size)
    )
    inside = add(e.AND, NONE, add(e.LE, NONE, low, wide), add(e.LT, NONE, wide, high))
    at = add(e.CAST, e.Cast(type_.dtype), at)
    step = given.size
    for axis in reversed(range(given.batch)):
        place = add(IOTA, Iota(axis, indices.shape, type_.dtype))
        at = add(e.ADD, NONE, at, add(e.MUL, NONE, place, number(step)))
        step *= indices.shape[axis]
    return add(e.WHERE, NONE, inside, at, number(count * given.size))


SCATTER_TO_TABLE = Rule(
    "scatter_to_table",
    "Rows added at indices of any axes are rows of one table, added at one list of indices.",
    apply(SCATTER_ADD, X, Anything("indices")),
    _as_table,
    is_scatter_of_table,
    Exactness.ROUNDING,
)
