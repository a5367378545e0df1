"""The batching rule of each primitive without a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from treadle.base.dtypes import bool_, int32, promote
from treadle.batching.walk import BATCHING, Batch, repeated
from treadle.frontend.coerce import cast, constant
from treadle.frontend.functions.arithmetic import logical_and, maximum, minimum, where
from treadle.frontend.functions.shaping import concat, iota, moveaxis, reshape, slice_along
from treadle.frontend.scopes import bind, bind1, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir.control import SCAN, Scan
from treadle.ir.leading import LEADING, Shift, contraction_along
from treadle.ir.leading import shift_axes as shift_axes
from treadle.ir.op import NONE, Attributes, Op
from treadle.ir.ops import indexing, leaves, linear, shaping

batching = BATCHING
Results = Sequence[Tensor]


def no_operands(attributes: Attributes, batch: Batch) -> Results:
    """The entry of ops without operands, which are the same for every element."""
    raise AssertionError("an op without operands has no batched one")


batching(leaves.CONSTANT, leaves.IOTA)(no_operands)


def shifted(op: Op) -> Callable[[Shift], Shift]:
    """Enter an op by its attributes for one axis more in front: a function of them and the size."""

    def add(shift: Shift) -> Shift:
        def rule(attributes: Attributes, batch: Batch, *operands: Tensor) -> Results:
            return bind(op, shift(attributes, batch.size), *batch.spread(operands))

        def plain(batch: Batch, *operands: Tensor) -> Results:
            return rule(NONE, batch, *operands)

        batching(op)(rule if op.has_attributes else plain)
        return shift

    return add


def any_rank(op: Op) -> None:
    """Enter an op for which an axis in front is one more of those that it has anyway."""
    shifted(op)(lambda attributes, size: attributes)


for _op, _shift in LEADING.items():
    shifted(_op)(_shift)


@batching(linear.CONTRACT)
def contract_batch(attributes: linear.Contraction, batch: Batch, x: Tensor, y: Tensor) -> Results:
    return bind(linear.CONTRACT, contraction_along(attributes, batch.batched), x, y)


@batching(indexing.GATHER)
def gather_batch(attributes: indexing.Gather, batch: Batch, x: Tensor, indices: Tensor) -> Results:
    """The axis is a batch axis of both, or stays where its operand has it."""
    axis, together = attributes.axis, attributes.batch
    if batch.batched == (False, True):
        # It stands among the axes that the indices put in the place of `axis`, first of them.
        inner = moveaxis(indices, 0, together)
        return (moveaxis(bind1(indexing.GATHER, attributes, x, inner), axis, 0),)
    if batch.batched == (True, False) and together == 0:
        return bind(indexing.GATHER, indexing.Gather(axis + 1), x, indices)
    both = batch.spread((x, indices))
    return bind(indexing.GATHER, indexing.Gather(axis + 1, together + 1), *both)


@batching(indexing.SCATTER_ADD)
def scatter_add_batch(
    attributes: indexing.ScatterAdd, batch: Batch, updates: Tensor, indices: Tensor
) -> Results:
    axis, size, together = attributes.axis, attributes.size, attributes.batch
    if batch.batched == (True, False) and together == 0:
        moved = indexing.ScatterAdd(axis + 1, size)
        return bind(indexing.SCATTER_ADD, moved, updates, indices)
    both = batch.spread((updates, indices))
    moved = indexing.ScatterAdd(axis + 1, size, together + 1)
    return bind(indexing.SCATTER_ADD, moved, *both)


@batching(indexing.RANDOM_BITS)
def random_bits_batch(attributes: indexing.RandomBits, batch: Batch, key: Tensor) -> Results:
    """More bits of the same call, so that each element has its own; or a key for each."""
    if not batch.batched[0]:
        wider = replace(attributes, shape=(batch.size, *attributes.shape))
        return bind(indexing.RANDOM_BITS, wider, key)
    with isolated_tracing("random_bits") as trace:
        inner = trace.input("key", indexing.KEY_TYPE)
        body = trace.finish(bind(indexing.RANDOM_BITS, attributes, inner))
    return bind(SCAN, Scan(body, 0, 0, batch.size), key)


def _at_zero(starts: Tensor) -> Tensor:
    """The same start indices, and 0 for the axis in front of them."""
    return concat([constant(0, (1,), starts.dtype), starts])


def _starts_along(starts: Tensor, axis: int, last: int) -> Tensor:
    """The start index of each element along one axis (B, 1), no further than `last`."""
    column = slice_along(starts, 1, axis, axis + 1)
    wide = cast(column, promote(starts.dtype, int32))
    return minimum(maximum(wide, 0), last)


@batching(shaping.DYNAMIC_SLICE)
def dynamic_slice_batch(
    attributes: shaping.DynamicSlice, batch: Batch, x: Tensor, starts: Tensor
) -> Results:
    """Another start for each element: its rows are gathered, axis by axis."""
    sizes = attributes.sizes
    if not batch.batched[1]:
        wider = shaping.DynamicSlice((batch.size, *sizes))
        return bind(shaping.DYNAMIC_SLICE, wider, x, _at_zero(starts))
    is_batched = batch.batched[0]
    for axis, count in enumerate(sizes):
        length = x.shape[axis + is_batched]
        if count == length:
            continue
        first = _starts_along(starts, axis, length - count)
        indices = first + iota((1, count), 1, first.dtype)
        flags = replace(batch, batched=(is_batched, True))
        (x,) = gather_batch(indexing.Gather(axis), flags, x, indices)
        is_batched = True
    return (x if is_batched else repeated(x, batch.size),)


@batching(shaping.DYNAMIC_UPDATE)
def dynamic_update_batch(
    attributes: shaping.DynamicUpdate, batch: Batch, x: Tensor, update: Tensor, starts: Tensor
) -> Results:
    """Another start for each element: the update moved to its place, chosen there over x."""
    x, update, _ = replace(batch, batched=(*batch.batched[:2], True)).spread((x, update, starts))
    if not batch.batched[2]:
        return bind(shaping.DYNAMIC_UPDATE, attributes, x, update, _at_zero(starts))
    if update.size == 0:
        return (x,)
    inside = constant(True, x.shape, bool_)
    for axis, count in enumerate(update.shape[1:]):
        length = x.shape[axis + 1]
        if count == length:
            continue
        first = _starts_along(starts, axis, length - count)
        place = iota((1, length), 1, first.dtype) - first  # (B, length), counted from the start
        within = logical_and(place >= 0, place < count)
        both = replace(batch, batched=(True, True))
        clipped = minimum(maximum(place, 0), count - 1)
        (update,) = gather_batch(indexing.Gather(axis), both, update, clipped)
        kept = [n if i in (0, axis + 1) else 1 for i, n in enumerate(x.shape)]
        inside = logical_and(inside, reshape(within, kept))
    return (where(inside, update, x),)
