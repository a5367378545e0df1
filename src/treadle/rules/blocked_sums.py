"""Running sums by blocks: sums of blocks, what comes before each, and running sums inside.

A running sum along an axis is one thread's, or one group's. Blocks of the axis are as many more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.base.dtypes import DType, accumulator, int32
from treadle.ir.graph import GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import NONE, Attributes, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, INPUT, IOTA, Constant, Iota, Leaf
from treadle.ir.ops.reductions import CUMSUM, REDUCE_SUM, Cumulate, Reduce
from treadle.ir.ops.shaping import BROADCAST, PAD, RESHAPE, SLICE, Broadcast, Pad, Reshape, Slice
from treadle.ir.types import TensorType
from treadle.kernel.target import Target
from treadle.rules.pattern import X, apply
from treadle.rules.rule import Body, Exactness, Match, Rule

Add = Callable[..., Value]
LITTLE = 4  # elements for each pair of blocks, from which pairs are no work: chosen


def block_of(shape: tuple[int, ...], axis: int, target: Target) -> int:
    """Elements of a block; 0 where an axis is one block."""
    sizes, count = target.rewriting, shape[axis]
    if not sizes.scan_parts or not math.prod(shape):
        return 0
    if math.prod(shape[axis + 1 :]) == 1 and sizes.scanned_row:
        return sizes.scanned_row if count > sizes.scanned_row else 0
    each = math.prod(shape) // sizes.scan_parts
    block = max(sizes.least_scan_block, 1 << max(0, each - 1).bit_length())
    return block if count >= 2 * block else 0


def is_long_scan(match: Match) -> bool:
    """a thread, or a group of them, would go through many elements while others have none"""
    given = match.root.attributes
    assert isinstance(given, Cumulate)
    return block_of(match.type.shape, given.axis, match.target) > 0


def _by_blocks(match: Match, builder: GraphBuilder) -> Body:
    given, type_ = match.root.attributes, match.type_of("x")
    assert isinstance(given, Cumulate)
    axis, inside = given.axis, GraphBuilder()
    block = block_of(type_.shape, axis, match.target)
    count = type_.shape[axis]
    blocks = -(-count // block)

    def add(op: Op, attributes: Attributes, *operands: Value) -> Value:
        return inside.add(op, attributes, operands, match.root.origin)[0]

    x = add(INPUT, Leaf("x", type_))
    if accumulator(type_.dtype) is not type_.dtype:
        x = add(e.CAST, e.Cast(accumulator(type_.dtype)), x)
    whole = _padded(add, x, type_.shape, axis, 0, blocks * block - count)
    cut = (*type_.shape[:axis], blocks, block, *type_.shape[axis + 1 :])
    rows = add(RESHAPE, Reshape(cut), whole)
    sums = add(REDUCE_SUM, Reduce((axis + 1,)), rows)
    shape = (*cut[: axis + 1], *cut[axis + 2 :])
    is_little = blocks * math.prod(shape) * LITTLE <= type_.size
    before = (
        _sum_before(add, sums, shape, given, accumulator(type_.dtype))
        if is_little
        else _before(add, sums, shape, given)
    )
    # The first element of a block begins from what comes before the block.
    before = add(RESHAPE, Reshape((*shape[: axis + 1], 1, *shape[axis + 1 :])), before)
    one = (*cut[: axis + 1], 1, *cut[axis + 2 :])
    places = (block - 1, 0) if given.reverse else (0, block - 1)
    begun = add(e.ADD, NONE, rows, _padded(add, before, one, axis + 1, *places))
    found = add(CUMSUM, Cumulate(axis + 1, given.reverse), begun)
    long = (*type_.shape[:axis], blocks * block, *type_.shape[axis + 1 :])
    found = add(RESHAPE, Reshape(long), found)
    found = _part(add, found, long, axis, 0, count)
    if accumulator(type_.dtype) is not type_.dtype:
        found = add(e.CAST, e.Cast(type_.dtype), found)
    graph = inside.build([Output(OutputKind.RESULT, "0", found)], "blocks")
    return Body(graph, (match["x"],))


def _sum_before(
    add: Add, sums: Value, shape: tuple[int, ...], given: Cumulate, dtype: DType
) -> Value:
    """The same by a sum for each block, where blocks are few: nothing waits for a scan of them."""
    axis = given.axis
    pairs = (*shape[: axis + 1], shape[axis], *shape[axis + 1 :])
    kept = tuple(i for i in range(len(pairs)) if i != axis)
    here, other = (add(IOTA, Iota(i, pairs, int32)) for i in (axis, axis + 1))
    if given.reverse:
        here, other = other, here
    every = add(BROADCAST, Broadcast(pairs, kept), sums)
    nothing = add(CONSTANT, Constant(0, TensorType(pairs, dtype)))
    own = add(e.WHERE, NONE, add(e.LT, NONE, other, here), every, nothing)
    return add(REDUCE_SUM, Reduce((axis + 1,)), own)


def _before(add: Add, sums: Value, shape: tuple[int, ...], given: Cumulate) -> Value:
    """The sum of all blocks that come before each."""
    axis, blocks = given.axis, shape[given.axis]
    running = add(CUMSUM, given, sums)
    if given.reverse:
        return _padded(add, _part(add, running, shape, axis, 1, blocks), shape, axis, 0, 1)
    return _padded(add, _part(add, running, shape, axis, 0, blocks - 1), shape, axis, 1, 0)


def _part(add: Add, x: Value, shape: tuple[int, ...], axis: int, start: int, stop: int) -> Value:
    if (start, stop) == (0, shape[axis]):
        return x
    starts, stops = [0] * len(shape), list(shape)
    starts[axis], stops[axis] = start, stop
    return add(SLICE, Slice(tuple(starts), tuple(stops), (1,) * len(shape)), x)


def _padded(add: Add, x: Value, shape: tuple[int, ...], axis: int, low: int, high: int) -> Value:
    """With zeros before and behind."""
    if not low and not high:
        return x
    lows, highs = [0] * len(shape), [0] * len(shape)
    lows[axis], highs[axis] = low, high
    return add(PAD, Pad(tuple(lows), tuple(highs), (0,) * len(shape), 0), x)


LONG_SCAN = Rule(
    "running_sum_by_blocks",
    "A running sum is what comes before each block, and the running sum inside it.",
    apply(CUMSUM, X),
    _by_blocks,
    is_long_scan,
    Exactness.ROUNDING,
)
