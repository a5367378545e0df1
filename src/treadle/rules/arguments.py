"""Where the best of many elements is: the best first, then the least index that has it.

Reductions are shared out among threads and lanes; to go along an axis and remember is not.
"""

from __future__ import annotations

from treadle.base.dtypes import bool_, int32
from treadle.ir.graph import GraphBuilder, Value
from treadle.ir.op import NONE, Op
from treadle.ir.ops.elementwise import EQ, NOT, OR, WHERE
from treadle.ir.ops.leaves import CONSTANT, IOTA, Constant, Iota
from treadle.ir.ops.reductions import ARGMAX, ARGMIN, REDUCE_MAX, REDUCE_MIN, ArgReduce, Reduce
from treadle.ir.ops.shaping import BROADCAST, Broadcast
from treadle.ir.types import TensorType
from treadle.rules.pattern import X, apply
from treadle.rules.rule import Match, Rule


def is_along_many(match: Match) -> bool:
    """the axis has as many elements as pay, and they are numbers"""
    attributes, x = match.root.attributes, match.type_of("x")
    assert isinstance(attributes, ArgReduce)
    return x.shape[attributes.axis] >= match.target.rewriting.least_arg and x.dtype is not bool_


def _by_reductions(match: Match, builder: GraphBuilder) -> Value:
    attributes, origin = match.root.attributes, match.root.origin
    assert isinstance(attributes, ArgReduce)
    x, axis = match["x"], attributes.axis
    shape = match.type_of("x").shape
    others = tuple(i for i in range(len(shape)) if i != axis)

    def add(op: Op, given: object, *operands: Value) -> Value:
        return builder.add(op, given, operands, origin)[0]  # type: ignore[arg-type]

    best = add(REDUCE_MAX if match.root.op is ARGMAX else REDUCE_MIN, Reduce((axis,)), x)
    is_best = add(EQ, NONE, x, add(BROADCAST, Broadcast(shape, others), best))
    if match.type_of("x").is_float:  # the best of numbers and NaN is NaN, which equals nothing
        is_best = add(OR, NONE, is_best, add(NOT, NONE, add(EQ, NONE, x, x)))
    beyond = add(CONSTANT, Constant(shape[axis] - 1, TensorType(shape, int32)))
    at = add(WHERE, NONE, is_best, add(IOTA, Iota(axis, shape, int32)), beyond)
    return add(REDUCE_MIN, Reduce((axis,)), at)


ARGMAX_OF_MANY = Rule(
    "argmax_of_many",
    "The first greatest of many elements is the least index that has the maximum.",
    apply(ARGMAX, X),
    _by_reductions,
    is_along_many,
)

ARGMIN_OF_MANY = Rule(
    "argmin_of_many",
    "The first least of many elements is the least index that has the minimum.",
    apply(ARGMIN, X),
    _by_reductions,
    is_along_many,
)
