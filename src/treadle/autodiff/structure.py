"""The vjp of each op that reduces, moves, contracts or indexes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.autodiff.backward import VJP, Cotangent
from treadle.base.dtypes import FLOAT8
from treadle.base.errors import GradientError
from treadle.base.shapes import inverse_permutation
from treadle.frontend.coerce import cast
from treadle.frontend.functions.arithmetic import eq
from treadle.frontend.functions.dynamic import dynamic_slice, dynamic_update_slice
from treadle.frontend.functions.linear import contract
from treadle.frontend.functions.reductions import cumsum
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import (
    flip,
    pad,
    permute,
    reshape,
    slice_along,
    stack,
    zeros_like,
)
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Tensor
from treadle.ir.ops import indexing, linear, reductions, shaping

vjp = VJP
Cts = tuple[Cotangent, ...]


def unreduced(x: Tensor, shape: tuple[int, ...], axes: Sequence[int]) -> Tensor:
    """Repeat over the axes that a reduction removed."""
    kept = tuple(i for i in range(len(shape)) if i not in axes)
    return bind1(shaping.BROADCAST, shaping.Broadcast(shape, kept), x) if axes else x


@vjp(reductions.REDUCE_SUM)
def reduce_sum_vjp(attributes: reductions.Reduce, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (unreduced(ct, x.shape, attributes.axes),)


@vjp(reductions.REDUCE_MAX, reductions.REDUCE_MIN)
def reduce_extreme_vjp(attributes: reductions.Reduce, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """Shared evenly among the elements that equal the extreme."""
    hit = cast(eq(x, unreduced(out, x.shape, attributes.axes)), x.dtype)
    share = ct / sum_of(hit, attributes.axes)
    return (hit * unreduced(share, x.shape, attributes.axes),)


@vjp(reductions.REDUCE_PROD)
def reduce_prod_vjp(attributes: reductions.Reduce, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """Each factor gets the product of all others, without dividing: zeros are exact at any order.

    Going up, pairs are multiplied; going down, each half is multiplied by its sibling.
    """
    axes = attributes.axes
    order = (*(i for i in range(x.ndim) if i not in axes), *axes)
    rows = permute(x, order)
    n = math.prod(x.shape[a] for a in axes)
    if n == 0:
        return (None,)
    level = reshape(rows, (*ct.shape, n))
    pairs: list[tuple[Tensor, Tensor]] = []
    while level.shape[-1] > 1:
        even = level.shape[-1] + level.shape[-1] % 2
        full = pad(level, (*((0, 0),) * ct.ndim, (0, even - level.shape[-1])), 1)
        left, right = slice_along(full, ct.ndim, 0, even, 2), slice_along(full, ct.ndim, 1, even, 2)
        pairs.append((left, right))
        level = left * right
    down = reshape(ct, (*ct.shape, 1))
    for left, right in reversed(pairs):
        down = slice_along(down, ct.ndim, 0, left.shape[-1])
        both = stack([down * right, down * left], -1)
        down = reshape(both, (*ct.shape, 2 * left.shape[-1]))
    result = reshape(slice_along(down, ct.ndim, 0, n), rows.shape)
    return (permute(result, inverse_permutation(order)),)


@vjp(reductions.CUMSUM)
def cumsum_vjp(attributes: reductions.Cumulate, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (cumsum(ct, attributes.axis, not attributes.reverse),)


@vjp(reductions.SORT, reductions.TOP_K)
def ordered_vjp(
    attributes: reductions.Sort | reductions.TopK, cts: Cts, outs: tuple[Tensor, Tensor], x: Tensor
) -> Cts:
    """Each value's cotangent goes back to where the value came from."""
    assert cts[0] is not None
    return (put_along_axis(cts[0], outs[1], attributes.axis, x.shape[attributes.axis]),)


def put_along_axis(updates: Tensor, indices: Tensor, axis: int, size: int) -> Tensor:
    """Add updates into zeros along an axis, all other axes running together."""
    last = updates.ndim - 1
    order = (*(i for i in range(updates.ndim) if i != axis), axis)
    attributes = indexing.ScatterAdd(last, size, last)
    result = bind1(
        indexing.SCATTER_ADD, attributes, permute(updates, order), permute(indices, order)
    )
    return permute(result, inverse_permutation(order))


@vjp(shaping.RESHAPE)
def reshape_vjp(attributes: shaping.Reshape, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (reshape(ct, x.shape),)


@vjp(shaping.PERMUTE)
def permute_vjp(attributes: shaping.Permute, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (permute(ct, inverse_permutation(attributes.axes)),)


@vjp(shaping.BROADCAST)
def broadcast_vjp(attributes: shaping.Broadcast, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (sum_of(ct, [i for i in range(ct.ndim) if i not in attributes.axes]),)


@vjp(shaping.SLICE)
def slice_vjp(attributes: shaping.Slice, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """Elements go back to their places, zeros between and around them."""
    amounts = []
    for n, m, start, stride in zip(
        x.shape, ct.shape, attributes.starts, attributes.strides, strict=True
    ):
        used = (m - 1) * stride + 1 if m else 0
        amounts.append((start, n - start - used))
    return (pad(ct, amounts, 0, [stride - 1 for stride in attributes.strides]),)


@vjp(shaping.PAD)
def pad_vjp(attributes: shaping.Pad, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    strides = tuple(gap + 1 for gap in attributes.interior)
    stops = tuple(
        low + ((n - 1) * stride + 1 if n else 0)
        for low, n, stride in zip(attributes.low, x.shape, strides, strict=True)
    )
    return (bind1(shaping.SLICE, shaping.Slice(attributes.low, stops, strides), ct),)


@vjp(shaping.CONCAT)
def concat_vjp(attributes: shaping.Concat, ct: Tensor, out: Tensor, *xs: Tensor) -> Cts:
    parts, start = [], 0
    for x in xs:
        parts.append(slice_along(ct, attributes.axis, start, start + x.shape[attributes.axis]))
        start += x.shape[attributes.axis]
    return tuple(parts)


@vjp(shaping.FLIP)
def flip_vjp(attributes: shaping.Flip, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (flip(ct, attributes.axes),)


@vjp(shaping.DYNAMIC_SLICE)
def dynamic_slice_vjp(
    attributes: shaping.DynamicSlice, ct: Tensor, out: Tensor, x: Tensor, starts: Tensor
) -> Cts:
    return dynamic_update_slice(zeros_like(x), ct, starts), None


@vjp(shaping.DYNAMIC_UPDATE)
def dynamic_update_vjp(
    attributes: shaping.DynamicUpdate,
    ct: Tensor,
    out: Tensor,
    x: Tensor,
    update: Tensor,
    starts: Tensor,
) -> Cts:
    """The window's cotangent goes to the update, the rest to x."""
    rest = dynamic_update_slice(ct, zeros_like(update), starts)
    return rest, dynamic_slice(ct, starts, update.shape), None


@vjp(linear.CONTRACT)
def contract_vjp(
    attributes: linear.Contraction, ct: Tensor, out: Tensor, x: Tensor, y: Tensor
) -> Cts:
    """The other operand takes the result's place: labels say the rest. Products stay as narrow."""
    if x.dtype in FLOAT8:
        raise GradientError(
            "contract",
            f"a product of floats of 8 bits, {x.type} and {y.type}, is differentiated",
            'Second derivatives need precision="bfloat16".',
        )
    lx, ly, lr = attributes.labels
    narrow = cast(ct, x.dtype)
    return contract(narrow, y, (lr, ly, lx)), contract(narrow, x, (lr, lx, ly))


@vjp(linear.WINDOW)
def window_vjp(attributes: linear.Window, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (bind1(linear.UNWINDOW, linear.Unwindow(attributes, x.shape), ct),)


@vjp(linear.UNWINDOW)
def unwindow_vjp(attributes: linear.Unwindow, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (bind1(linear.WINDOW, attributes.window, ct),)


@vjp(indexing.GATHER)
def gather_vjp(
    attributes: indexing.Gather, ct: Tensor, out: Tensor, x: Tensor, indices: Tensor
) -> Cts:
    scatter = indexing.ScatterAdd(attributes.axis, x.shape[attributes.axis], attributes.batch)
    return bind1(indexing.SCATTER_ADD, scatter, ct, indices), None


@vjp(indexing.SCATTER_ADD)
def scatter_add_vjp(
    attributes: indexing.ScatterAdd, ct: Tensor, out: Tensor, updates: Tensor, indices: Tensor
) -> Cts:
    return bind1(
        indexing.GATHER, indexing.Gather(attributes.axis, attributes.batch), ct, indices
    ), None
