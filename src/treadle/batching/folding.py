"""The batching rule of composites that stay composites: the axis folds into one that they have.

The others go through their definition.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.batching.primitives import Results, any_rank, shifted
from treadle.batching.walk import BATCHING, Batch, by_definition
from treadle.frontend.coerce import broadcast_to
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import moveaxis, reshape
from treadle.frontend.scopes import bind, bind1
from treadle.frontend.tensor import Tensor
from treadle.ir import composites as c
from treadle.ir.leading import shift_axes, shift_axis
from treadle.ir.op import NONE, Op

batching = BATCHING

# Those that take elements, or rows and windows of the last axes: what is in front is free.
for _op in (
    *(c.RELU, c.SIGMOID, c.SILU, c.GELU, c.SOFTPLUS),
    *(c.CROSS_ENTROPY, c.MAX_POOL, c.AVG_POOL, c.ONE_HOT),
):
    any_rank(_op)

for _op in (c.MEAN, c.VAR, c.LOGSUMEXP):
    shifted(_op)(shift_axes)

for _op in (c.SOFTMAX, c.LOG_SOFTMAX):
    shifted(_op)(shift_axis)


def merged(x: Tensor, axis: int) -> Tensor:
    """(B, …) with the batch in front of the elements along `axis` of the others, as one axis."""
    moved = moveaxis(x, 0, axis)
    size, n = moved.shape[axis : axis + 2]
    return reshape(moved, (*moved.shape[:axis], size * n, *moved.shape[axis + 2 :]))


def parted(x: Tensor, axis: int, size: int) -> Tensor:
    """The inverse of `merged`."""
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return moveaxis(reshape(x, shape), axis, 0)


def _norm(op: Op) -> None:
    """Over the last axes, so x may have one more; a scale of each element is applied after."""

    def rule(attributes: c.Norm, batch: Batch, x: Tensor, *affine: Tensor) -> Results:
        if not any(batch.batched[1:]):
            return bind(op, attributes, x, *affine)
        rank = x.ndim - batch.batched[0]
        result = bind1(op, attributes, x)
        for i, (t, is_batched) in enumerate(zip(affine, batch.batched[1:], strict=True)):
            between = (1,) * (rank - attributes.dims)
            t = reshape(t, (batch.size, *between, *t.shape[1:])) if is_batched else t
            result = result + t if i else result * t
        return (result,)

    batching(op)(rule)


_norm(c.LAYER_NORM)
_norm(c.RMS_NORM)


@batching(c.BATCH_NORM)
def batch_norm_batch(attributes: c.BatchNorm, batch: Batch, x: Tensor, *affine: Tensor) -> Results:
    """Each element's channels are channels of their own."""
    x, *affine_each = batch.spread((x, *affine))
    scales = (merged(t, 0) for t in affine_each)
    result = bind1(c.BATCH_NORM, attributes, merged(x, 1), *scales)
    return (parted(result, 1, batch.size),)


@batching(c.GROUP_NORM)
def group_norm_batch(attributes: c.GroupNorm, batch: Batch, x: Tensor, *affine: Tensor) -> Results:
    """Each element's groups of channels are groups of their own."""
    x, *affine_each = batch.spread((x, *affine))
    scales = (merged(t, 0) for t in affine_each)
    more = replace(attributes, groups=attributes.groups * batch.size)
    return (parted(bind1(c.GROUP_NORM, more, merged(x, 1), *scales), 1, batch.size),)


def _attention(op: Op, plain: int) -> None:
    """Rows of the first axis do not meet, so a batch is more of them.

    After so many operands comes a bias. One for all rows is repeated, its gradient summed.
    """

    def rule(attributes: c.Attention, batch: Batch, *operands: Tensor) -> Results:
        *heads, last = batch.spread(operands)
        rows = heads[0].shape[1]
        is_shared = len(operands) > plain and last.shape[1] != rows
        if is_shared:
            last = broadcast_to(last, (batch.size, rows, *last.shape[2:]))
        results = bind(op, attributes, *(merged(x, 0) for x in (*heads, last)))
        *others, final = (parted(r, 0, batch.size) for r in results)
        if is_shared and op is c.ATTENTION_GRAD:
            final = sum_of(final, 1, keepdims=True)
        return [*others, final]

    batching(op)(rule)


_attention(c.ATTENTION, 3)
_attention(c.ATTENTION_GRAD, 6)


@batching(c.LINEAR_CROSS_ENTROPY)
def linear_cross_entropy_batch(
    attributes: c.HeadCrossEntropy, batch: Batch, *operands: Tensor
) -> Results:
    """More rows through one head; a head for each element goes through the definition."""
    x, weight, targets, *bias = operands
    if batch.batched[1] or any(batch.batched[3:]):
        return by_definition(c.LINEAR_CROSS_ENTROPY, attributes, batch, operands)
    x, _, targets, *_ = batch.spread(operands)
    rows = (merged(x, 0), weight, merged(targets, 0), *bias)
    return (parted(bind1(c.LINEAR_CROSS_ENTROPY, attributes, *rows), 0, batch.size),)


@batching(c.LINEAR_CROSS_ENTROPY_GRAD)
def linear_cross_entropy_grad_batch(
    attributes: c.HeadCrossEntropy, batch: Batch, *operands: Tensor
) -> Results:
    """The gradient of a head is summed over rows, each element's own."""
    return by_definition(c.LINEAR_CROSS_ENTROPY_GRAD, attributes, batch, operands)


@batching(c.EMBEDDING)
def embedding_batch(batch: Batch, table: Tensor, indices: Tensor) -> Results:
    if batch.batched[0]:
        return by_definition(c.EMBEDDING, NONE, batch, (table, indices))
    return bind(c.EMBEDDING, NONE, table, indices)


def _grouped(conv: c.Conv, size: int) -> c.Conv:
    """A convolution of each element's channels with its own kernels."""
    return replace(conv, groups=conv.groups * size)


@batching(c.CONV)
def conv_batch(attributes: c.Conv, batch: Batch, x: Tensor, w: Tensor) -> Results:
    """More images for one set of kernels, more kernels for one image, or more groups of both."""
    size = batch.size
    if batch.batched == (True, False):
        return (parted(bind1(c.CONV, attributes, merged(x, 0), w), 0, size),)
    if batch.batched == (False, True) and attributes.groups == 1:
        return (parted(bind1(c.CONV, attributes, x, merged(w, 0)), 1, size),)
    x, w = batch.spread((x, w))
    groups = _grouped(attributes, size)
    return (parted(bind1(c.CONV, groups, merged(x, 1), merged(w, 0)), 1, size),)


@batching(c.CONV_GRAD_X)
def conv_grad_x_batch(attributes: c.ConvGrad, batch: Batch, ct: Tensor, w: Tensor) -> Results:
    size, (n, channels, *spatial) = batch.size, attributes.shape
    if batch.batched == (True, False):
        more = c.ConvGrad(attributes.conv, (size * n, channels, *spatial))
        return (parted(bind1(c.CONV_GRAD_X, more, merged(ct, 0), w), 0, size),)
    ct, w = batch.spread((ct, w))
    more = c.ConvGrad(_grouped(attributes.conv, size), (n, size * channels, *spatial))
    return (parted(bind1(c.CONV_GRAD_X, more, merged(ct, 1), merged(w, 0)), 1, size),)


@batching(c.CONV_GRAD_W)
def conv_grad_w_batch(attributes: c.ConvGrad, batch: Batch, ct: Tensor, x: Tensor) -> Results:
    """Summed over images, each element's own: its channels are groups."""
    size, (outputs, *rest) = batch.size, attributes.shape
    ct, x = batch.spread((ct, x))
    more = c.ConvGrad(_grouped(attributes.conv, size), (size * outputs, *rest))
    return (parted(bind1(c.CONV_GRAD_W, more, merged(ct, 1), merged(x, 1)), 0, size),)
