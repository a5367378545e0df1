"""What each primitive does to NumPy arrays: the entries of the oracle's table."""

from __future__ import annotations

import math

import numpy as np

from treadle.base.errors import IndexRangeError
from treadle.domains.float64 import MEANING, Array, carrier
from treadle.domains.philox import random_bits
from treadle.ir.literal import to_numpy
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves, linear, reductions, shaping

meaning = MEANING


@meaning(leaves.CONSTANT)
def _constant(attributes: leaves.Constant) -> Array:
    exact = to_numpy(attributes.value, carrier(attributes.type.dtype))
    return np.broadcast_to(exact, attributes.type.shape)


@meaning(leaves.IOTA)
def _iota(attributes: leaves.Iota) -> Array:
    shape, axis = attributes.shape, attributes.axis
    line = np.arange(shape[axis]).astype(carrier(attributes.dtype))
    return np.broadcast_to(line.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)


def erf(x: Array) -> Array:
    """The C library's, element by element: NumPy has none, and SciPy is too heavy to depend on."""
    values = map(math.erf, x.reshape(-1).tolist())
    return np.fromiter(values, np.float64, count=x.size).reshape(x.shape)


def _sign(x: Array) -> Array:
    return np.sign(x)


def _floordiv(x: Array, y: Array) -> Array:
    return np.floor_divide(x, y)


meaning(e.NEG)(np.negative)
meaning(e.ABS)(np.abs)
meaning(e.SIGN)(_sign)
meaning(e.FLOOR)(np.floor)
meaning(e.EXP)(np.exp)
meaning(e.LOG)(np.log)
meaning(e.SQRT)(np.sqrt)
meaning(e.RSQRT)(lambda x: 1.0 / np.sqrt(x))
meaning(e.SIN)(np.sin)
meaning(e.COS)(np.cos)
meaning(e.TANH)(np.tanh)
meaning(e.ERF)(erf)
meaning(e.NOT)(np.invert)
meaning(e.STOP_GRADIENT, reductions.SHARD_SUM)(lambda x: x)
meaning(e.ADD)(np.add)
meaning(e.SUB)(np.subtract)
meaning(e.MUL)(np.multiply)
meaning(e.DIV)(np.divide)
meaning(e.FLOORDIV)(_floordiv)
meaning(e.MOD)(np.mod)
meaning(e.MAX)(np.maximum)
meaning(e.MIN)(np.minimum)
meaning(e.POW)(np.power)
meaning(e.ATAN2)(np.arctan2)
meaning(e.EQ)(np.equal)
meaning(e.LT)(np.less)
meaning(e.LE)(np.less_equal)
meaning(e.AND)(np.bitwise_and)
meaning(e.OR)(np.bitwise_or)
meaning(e.XOR)(np.bitwise_xor)
meaning(e.WHERE)(np.where)


@meaning(e.CAST)
def _cast(attributes: e.Cast, x: Array) -> Array:
    dtype = attributes.dtype
    if not dtype.is_integer or x.dtype.kind != "f":
        return x.astype(carrier(dtype))
    low, high = dtype.range()
    # NumPy leaves what does not fit to the processor.
    inside = np.where((x > low) & (x < high), x, 0).astype(carrier(dtype))
    return np.where(x >= high, high, np.where(x <= low, low, inside)).astype(carrier(dtype))


@meaning(reductions.REDUCE_SUM)
def _reduce_sum(attributes: reductions.Reduce, x: Array) -> Array:
    return np.sum(x, axis=attributes.axes, dtype=x.dtype)


@meaning(reductions.REDUCE_MAX)
def _reduce_max(attributes: reductions.Reduce, x: Array) -> Array:
    return np.max(x, axis=attributes.axes)


@meaning(reductions.REDUCE_MIN)
def _reduce_min(attributes: reductions.Reduce, x: Array) -> Array:
    return np.min(x, axis=attributes.axes)


@meaning(reductions.REDUCE_PROD)
def _reduce_prod(attributes: reductions.Reduce, x: Array) -> Array:
    return np.prod(x, axis=attributes.axes, dtype=x.dtype)


@meaning(reductions.ARGMAX)
def _argmax(attributes: reductions.ArgReduce, x: Array) -> Array:
    return np.argmax(x, axis=attributes.axis)


@meaning(reductions.ARGMIN)
def _argmin(attributes: reductions.ArgReduce, x: Array) -> Array:
    return np.argmin(x, axis=attributes.axis)


@meaning(reductions.CUMSUM)
def _cumsum(attributes: reductions.Cumulate, x: Array) -> Array:
    axis = attributes.axis
    if attributes.reverse:
        return np.flip(np.cumsum(np.flip(x, axis), axis=axis, dtype=x.dtype), axis)
    return np.cumsum(x, axis=axis, dtype=x.dtype)


def sorted_indices(x: Array, axis: int, descending: bool) -> Array:
    """A stable order along `axis`; NaN is the greatest, equal elements keep their order."""
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    reversed_ = np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
    return x.shape[axis] - 1 - reversed_


@meaning(reductions.SORT)
def _sort(attributes: reductions.Sort, x: Array) -> tuple[Array, Array]:
    order = sorted_indices(x, attributes.axis, attributes.descending)
    return np.take_along_axis(x, order, attributes.axis), order


@meaning(reductions.TOP_K)
def _top_k(attributes: reductions.TopK, x: Array) -> tuple[Array, Array]:
    order = sorted_indices(x, attributes.axis, attributes.largest)
    first = np.take(order, range(attributes.k), axis=attributes.axis)
    return np.take_along_axis(x, first, attributes.axis), first


@meaning(shaping.RESHAPE)
def _reshape(attributes: shaping.Reshape, x: Array) -> Array:
    return x.reshape(attributes.shape)


@meaning(shaping.PERMUTE)
def _permute(attributes: shaping.Permute, x: Array) -> Array:
    return x.transpose(attributes.axes)


@meaning(shaping.BROADCAST)
def _broadcast(attributes: shaping.Broadcast, x: Array) -> Array:
    sizes = [1] * len(attributes.shape)
    for axis, n in zip(attributes.axes, x.shape, strict=True):
        sizes[axis] = n
    return np.broadcast_to(x.reshape(sizes), attributes.shape)


@meaning(shaping.SLICE)
def _slice(attributes: shaping.Slice, x: Array) -> Array:
    bounds = zip(attributes.starts, attributes.stops, attributes.strides, strict=True)
    return x[tuple(slice(*b) for b in bounds)]


@meaning(shaping.PAD)
def _pad(attributes: shaping.Pad, x: Array) -> Array:
    places, shape = pad_places(attributes, x.shape)
    result = np.full(shape, to_numpy(attributes.value, x.dtype), x.dtype)
    result[places] = x
    return result


def pad_places(
    attributes: shaping.Pad, shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[int, ...]]:
    """Where the operand's elements go, and the padded shape."""
    places, sizes = [], []
    for n, low, high, gap in zip(
        shape, attributes.low, attributes.high, attributes.interior, strict=True
    ):
        inner = n + max(n - 1, 0) * gap
        places.append(slice(low, low + inner, gap + 1))
        sizes.append(low + inner + high)
    return tuple(places), tuple(sizes)


@meaning(shaping.CONCAT)
def _concat(attributes: shaping.Concat, *xs: Array) -> Array:
    return np.concatenate(xs, axis=attributes.axis)


@meaning(shaping.FLIP)
def _flip(attributes: shaping.Flip, x: Array) -> Array:
    return np.flip(x, attributes.axes)


def clamped_window(
    starts: Array, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[slice, ...]:
    """The slices of a window of `sizes` that is moved to lie inside `shape`."""
    inside = (min(max(int(s), 0), n - k) for s, k, n in zip(starts, sizes, shape, strict=True))
    return tuple(slice(s, s + k) for s, k in zip(inside, sizes, strict=True))


@meaning(shaping.DYNAMIC_SLICE)
def _dynamic_slice(attributes: shaping.DynamicSlice, x: Array, starts: Array) -> Array:
    return x[clamped_window(starts, attributes.sizes, x.shape)]


@meaning(shaping.DYNAMIC_UPDATE)
def _dynamic_update(
    attributes: shaping.DynamicUpdate, x: Array, update: Array, starts: Array
) -> Array:
    result = x.copy()
    result[clamped_window(starts, update.shape, x.shape)] = update
    return result


@meaning(linear.CONTRACT)
def _contract(attributes: linear.Contraction, x: Array, y: Array) -> Array:
    return contract_with(np.matmul, attributes, x, y)


def contract_with(matmul: object, attributes: linear.Contraction, x: Array, y: Array) -> Array:
    """Any contraction as one batched matrix product (B, M, K) @ (B, K, N) of the given kind."""
    lx, ly, lr = attributes.labels
    size = dict(zip(lx, x.shape, strict=True)) | dict(zip(ly, y.shape, strict=True))
    batch = [c for c in lr if c in lx and c in ly]
    rows = [c for c in lr if c in lx and c not in ly]
    columns = [c for c in lr if c in ly and c not in lx]
    summed = [c for c in lx if c in ly and c not in lr]
    extent = {
        k: math.prod(size[c] for c in v)
        for k, v in zip("bmnk", (batch, rows, columns, summed), strict=True)
    }
    left = x.transpose([lx.index(c) for c in batch + rows + summed])
    right = y.transpose([ly.index(c) for c in batch + summed + columns])
    product = matmul(  # type: ignore[operator]
        left.reshape(extent["b"], extent["m"], extent["k"]),
        right.reshape(extent["b"], extent["k"], extent["n"]),
    )
    order = batch + rows + columns
    return product.reshape([size[c] for c in order]).transpose([order.index(c) for c in lr])


@meaning(linear.WINDOW)
def _window(attributes: linear.Window, x: Array) -> Array:
    return x[window_index(attributes, x.shape)].transpose(window_order(attributes, x.ndim))


def window_index(window: linear.Window, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """An open mesh of indices; each windowed axis stands as (position, offset)."""
    rank = len(shape) + len(window.axes)
    index: list[Array] = []
    place = 0
    for axis, n in enumerate(shape):
        if axis in window.axes:
            i = window.axes.index(axis)
            starts = np.arange(window.starts(shape)[i]) * window.strides[i]
            offsets = np.arange(window.sizes[i]) * window.dilations[i]
            grid, width = starts[:, None] + offsets, 2
        else:
            grid, width = np.arange(n), 1
        index.append(grid.reshape((1,) * place + grid.shape + (1,) * (rank - place - width)))
        place += width
    return tuple(index)


def window_order(window: linear.Window, rank: int) -> list[int]:
    """Moves each offset axis of `window_index` to the end."""
    positions, offsets, place = [], [], 0
    for axis in range(rank):
        positions.append(place)
        place += 1
        if axis in window.axes:
            offsets.append(place)
            place += 1
    return positions + offsets


@meaning(linear.UNWINDOW)
def _unwindow(attributes: linear.Unwindow, x: Array) -> Array:
    window, shape = attributes.window, attributes.shape
    result = np.zeros(shape, x.dtype)
    counts = window.starts(shape)
    for offset in np.ndindex(*window.sizes):
        places = [slice(None)] * len(shape)
        for axis, k, s, d, n in zip(
            window.axes, offset, window.strides, window.dilations, counts, strict=True
        ):
            places[axis] = slice(k * d, k * d + (n - 1) * s + 1, s)
        result[tuple(places)] += x[(..., *offset)]
    return result


def checked_indices(name: str, indices: Array, size: int) -> Array:
    """The indices, after making sure that each lies in the axis."""
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        worst = indices.min() if indices.min() < 0 else indices.max()
        raise IndexRangeError(name, f"index {worst} is outside an axis of {size} elements")
    return indices.astype(np.int64)


@meaning(indexing.GATHER)
def _gather(attributes: indexing.Gather, x: Array, indices: Array) -> Array:
    axis, batch = attributes.axis, attributes.batch
    indices = checked_indices("gather", indices, x.shape[axis])
    if batch == 0:
        return np.take(x, indices, axis=axis)
    return x[gather_index(axis, batch, x.shape, indices)]


def gather_index(
    axis: int, batch: int, shape: tuple[int, ...], indices: Array
) -> tuple[Array, ...]:
    """An open mesh that picks the gathered elements in the result's order of axes."""
    chosen = indices.ndim - batch
    rank = len(shape) - 1 + chosen
    mesh: list[Array] = []
    for i, n in enumerate(shape):
        if i == axis:
            middle = indices.reshape(
                indices.shape[:batch] + (1,) * (axis - batch) + indices.shape[batch:]
            )
            mesh.append(middle.reshape(middle.shape + (1,) * (rank - middle.ndim)))
        else:
            place = i if i < axis else i - 1 + chosen
            mesh.append(np.arange(n).reshape((1,) * place + (n,) + (1,) * (rank - place - 1)))
    return tuple(mesh)


@meaning(indexing.SCATTER_ADD)
def _scatter_add(attributes: indexing.ScatterAdd, updates: Array, indices: Array) -> Array:
    axis, batch, size = attributes.axis, attributes.batch, attributes.size
    indices = checked_indices("scatter_add", indices, size)
    chosen = indices.ndim - batch
    shape = (*updates.shape[:axis], size, *updates.shape[axis + chosen :])
    result = np.zeros(shape, updates.dtype)
    np.add.at(result, gather_index(axis, batch, shape, indices), updates)
    return result


@meaning(indexing.RANDOM_BITS)
def _random_bits(attributes: indexing.RandomBits, key: Array) -> Array:
    return random_bits(key, attributes.site, attributes.shape, attributes.blocks)
