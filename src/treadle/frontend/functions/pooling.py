"""Pooling: windows, windows to a size, with indices and back, and by powers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treadle.base.dtypes import DType, int32
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import POSITIVE, check_number
from treadle.frontend.coerce import as_tensor, cast, constant
from treadle.frontend.functions.arithmetic import isfinite, maximum, pow, stop_gradient, where
from treadle.frontend.functions.indexing import scatter_add, take, take_along_axis
from treadle.frontend.functions.linear import check_kernel, per_axis
from treadle.frontend.functions.reductions import argmax
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import expand, iota, pad, reshape, zeros
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir import composites as c
from treadle.ir.ops.linear import WINDOW, Window

Sizes = int | Sequence[int]
OptionalSizes = int | Sequence[int | None] | None


def max_pool(
    x: Operand,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The greatest of each window over the spatial axes: (N, C, …) → (N, C, windows …).

    The first of equals gets the gradient.

    `ceil_mode` lets the last window reach beyond the end.
    """
    tensor, pool = pool_of("max_pool", x, kernel, stride, padding, dilation)
    if ceil_mode:
        tensor = _lengthened(tensor, pool, least(tensor.dtype))
    return bind1(c.MAX_POOL, pool, tensor)


def avg_pool(
    x: Operand,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    count_include_pad: bool = True,
    ceil_mode: bool = False,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window over the spatial axes: (N, C, …) → (N, C, windows …)."""
    _check_float("avg_pool", x)
    tensor, pool = pool_of("avg_pool", x, kernel, stride, padding, 1, count_include_pad)
    count = math.prod(pool.sizes)
    if divisor_override is None and not ceil_mode:
        return bind1(c.AVG_POOL, pool, tensor)
    if divisor_override is not None and divisor_override == 0:
        raise ArgumentError("avg_pool", "divisor_override is 0", "Give another divisor.")
    counts = _counted(tensor, pool) if divisor_override is None else np.array(divisor_override)
    longer = _lengthened(tensor, pool, 0) if ceil_mode else tensor
    mean = bind1(c.AVG_POOL, replace(pool, count_padding=True), longer)
    factors = (count / counts).astype(tensor.dtype.numpy)
    return mean * as_tensor(factors)


def _check_float(name: str, x: Operand) -> None:
    """Means of integers are no integers."""
    given = as_tensor(x)
    if not given.dtype.is_float:
        raise DTypeError(
            name, f"{given.type} is not a float", "Cast it first, for instance to td.float32."
        )


def pool_of(
    name: str,
    x: Operand,
    kernel: Sizes,
    stride: Sizes | None,
    padding: Sizes,
    dilation: Sizes,
    count_padding: bool = True,
) -> tuple[Tensor, c.Pool]:
    """The tensor and the windows that some arguments mean."""
    x = as_tensor(x)
    dims = len(kernel) if isinstance(kernel, Sequence) else x.ndim - 2
    if not 0 < dims < x.ndim:
        raise ShapeError(
            name, f"{x.type} has no {dims} spatial axes", "x is (N, channels, spatial …)."
        )
    sizes = per_axis(name, "kernel", kernel, dims)
    pads = per_axis(name, "padding", padding, dims, 0)
    if any(2 * p > k for p, k in zip(pads, sizes, strict=True)):
        raise ArgumentError(
            name,
            f"padding {pads} is more than half of the kernel {sizes}",
            "A window must hold an element of x.",
        )
    strides = sizes if stride is None else per_axis(name, "stride", stride, dims)
    dilations = per_axis(name, "dilation", dilation, dims)
    check_kernel(name, x, sizes, dilations, [(p, p) for p in pads])
    return x, c.Pool(sizes, strides, pads, dilations, count_padding)


def pool_windows(pool: c.Pool, x: Tensor, fill: float) -> Tensor:
    """Windows over the last axes with their own axes flattened into one, the last."""
    lead = x.ndim - len(pool.sizes)
    padded = pad(x, (*((0, 0),) * lead, *((p, p) for p in pool.padding)), fill)
    axes = tuple(range(lead, x.ndim))
    windows = bind1(WINDOW, Window(axes, pool.sizes, pool.strides, pool.dilations), padded)
    return reshape(windows, (*windows.shape[: x.ndim], math.prod(pool.sizes)))


def least(dtype: DType) -> float:
    return -math.inf if dtype.is_float else dtype.range()[0]


def _counts(n: int, k: int, s: int, p: int, d: int) -> tuple[int, int]:
    """Windows where the last may reach beyond the end, and by how much it does."""
    span = d * (k - 1) + 1
    count = -(-(n + 2 * p - span) // s) + 1
    if (count - 1) * s >= n + p:  # it would begin beyond the end
        count -= 1
    return count, max(0, (count - 1) * s + span - n - 2 * p)


def _lengthened(x: Tensor, pool: c.Pool, fill: float) -> Tensor:
    """x with as much at the end as the last windows need."""
    lead = x.ndim - len(pool.sizes)
    given = zip(x.shape[lead:], pool.sizes, pool.strides, pool.padding, pool.dilations, strict=True)
    extra = [(0, _counts(*one)[1]) for one in given]
    return pad(x, (*((0, 0),) * lead, *extra), fill)


def _counted(x: Tensor, pool: c.Pool) -> np.ndarray:
    """Elements of each window that count: those inside x, and perhaps its padding."""
    lead = x.ndim - len(pool.sizes)
    found = np.ones(())
    given = zip(x.shape[lead:], pool.sizes, pool.strides, pool.padding, pool.dilations, strict=True)
    for n, k, s, p, d in given:
        starts = np.arange(_counts(n, k, s, p, d)[0]) * s - p
        ends = np.minimum(starts + k, n + p)
        if not pool.count_padding:
            starts, ends = np.maximum(starts, 0), np.minimum(ends, n)
        found = found[..., None] * (ends - starts)
    return found


def adaptive_avg_pool(x: Operand, output_size: OptionalSizes) -> Tensor:
    """The mean of as many windows as the output has elements: (N, C, …) → (N, C, output_size …)."""
    _check_float("adaptive_avg_pool", x)
    x, sizes = _output(as_tensor(x), "adaptive_avg_pool", output_size)
    lengths = x.shape[x.ndim - len(sizes) :]
    if not any(n % out for n, out in zip(lengths, sizes, strict=True)):
        return avg_pool(x, tuple(n // out for n, out in zip(lengths, sizes, strict=True)))
    for axis, out in enumerate(sizes, x.ndim - len(sizes)):
        if out != x.shape[axis]:
            x = _averaged(x, axis, out)
    return x


def _averaged(x: Tensor, axis: int, out: int) -> Tensor:
    """Windows of unequal length along an axis: what lies outside of one is not read for it.

    A product with weights would have 0 · ∞ from other windows.
    """
    windows = _windows(x.shape[axis], out)
    widest = max(high - low for low, high in windows)
    places = np.array([[min(low + i, high - 1) for i in range(widest)] for low, high in windows])
    counts = np.array([high - low for low, high in windows])
    inside = np.arange(widest) < counts[:, None]
    spread = take(x, places.astype(np.int32), axis)
    behind = (1,) * (x.ndim - axis - 1)
    mask = expand(as_tensor(inside.reshape(*inside.shape, *behind)), spread.shape)
    total = sum_of(where(mask, spread, 0), axis + 1)
    return total / counts.reshape(-1, *behind).astype(x.dtype.numpy)


def _windows(n: int, out: int) -> list[tuple[int, int]]:
    return [(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]


def adaptive_max_pool(x: Operand, output_size: OptionalSizes) -> Tensor:
    """The greatest of as many windows as the output has: (N, C, …) → (N, C, output_size …)."""
    x, sizes = _output(as_tensor(x), "adaptive_max_pool", output_size)
    lengths = x.shape[x.ndim - len(sizes) :]
    if not any(n % out for n, out in zip(lengths, sizes, strict=True)):
        return max_pool(x, tuple(n // out for n, out in zip(lengths, sizes, strict=True)))
    for axis, out in enumerate(sizes, x.ndim - len(sizes)):
        windows = _windows(x.shape[axis], out)
        widest = max(b - a for a, b in windows)
        # Elements beyond a shorter window are its last one again, which changes no maximum.
        places = np.array(
            [[min(low + i, high - 1) for i in range(widest)] for low, high in windows]
        )
        spread = take(x, places.astype(np.int32), axis)
        first = argmax(spread, axis + 1, keepdims=True)
        x = reshape(take_along_axis(spread, first, axis + 1), _with(x.shape, axis, out))
    return x


def _with(shape: tuple[int, ...], axis: int, n: int) -> tuple[int, ...]:
    return (*shape[:axis], n, *shape[axis + 1 :])


def _output(x: Tensor, name: str, output_size: OptionalSizes) -> tuple[Tensor, tuple[int, ...]]:
    """Output sizes of the last axes; None keeps an axis as it is."""
    given = list(output_size) if isinstance(output_size, Sequence) else [output_size]
    dims = len(given) if isinstance(output_size, Sequence) else x.ndim - 2
    if not 0 < dims < x.ndim:
        raise ShapeError(name, f"{x.type} has no {dims} spatial axes", "x is (N, channels, …).")
    given = given * dims if len(given) == 1 else given
    lengths = x.shape[x.ndim - dims :]
    sizes = [n if out is None else out for n, out in zip(lengths, given, strict=True)]
    return x, per_axis(name, "output_size", sizes, dims)


def lp_pool(
    x: Operand, norm_type: float, kernel_size: Sizes, stride: Sizes | None = None
) -> Tensor:
    """The p-norm of each window over the spatial axes: (N, C, …) → (N, C, windows …)."""
    check_number("lp_pool", "norm_type", norm_type, POSITIVE)
    value, pool = pool_of("lp_pool", x, kernel_size, stride, 0, 1)
    count = math.prod(pool.sizes)
    total = avg_pool(pow(value, norm_type), kernel_size, stride) * count
    is_zero = total == 0  # where a root has no slope
    return where(is_zero, 0, pow(where(is_zero, 1, total), 1 / norm_type))


def max_pool_with_indices(
    x: Operand,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """`max_pool`, and where each greatest lies among the flattened spatial axes, as int32.

    (N, C, …) → two of (N, C, windows …).
    """
    tensor, pool = pool_of("max_pool", x, kernel, stride, padding, dilation)
    longer = _lengthened(tensor, pool, least(tensor.dtype)) if ceil_mode else tensor
    windows = pool_windows(pool, longer, least(tensor.dtype))  # (…, windows …, kernel)
    first = argmax(windows, -1, keepdims=True)
    values = reshape(take_along_axis(windows, first, -1), windows.shape[:-1])
    dims, lengths = len(pool.sizes), tensor.shape[tensor.ndim - len(pool.sizes) :]
    chosen, flat = reshape(first, values.shape), zeros(values.shape, int32)
    rest = chosen
    places: list[Tensor] = []
    for size in reversed(pool.sizes):
        places.insert(0, rest % size)
        rest = rest // size
    lead = tensor.ndim - dims
    for i, place in enumerate(places):
        start = iota(values.shape, lead + i) * pool.strides[i] - pool.padding[i]
        flat = flat * lengths[i] + start + place * pool.dilations[i]
    return values, cast(flat, int32)


def max_unpool(
    x: Operand,
    indices: Operand,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    output_size: Sequence[int] | None = None,
) -> Tensor:
    """Values put back to where `max_pool_with_indices` found them, zeros elsewhere.

    x and indices (N, C, windows …) → (N, C, output_size …).
    """
    values, index = as_tensor(x), as_tensor(indices)
    dims = len(kernel_size) if isinstance(kernel_size, Sequence) else values.ndim - 2
    if values.shape != index.shape or not 0 < dims < values.ndim:
        raise ShapeError(
            "max_unpool", f"values {values.type}, indices {index.type}", "They have one shape."
        )
    kernel = per_axis("max_unpool", "kernel_size", kernel_size, dims)
    strides = kernel if stride is None else per_axis("max_unpool", "stride", stride, dims)
    pads = per_axis("max_unpool", "padding", padding, dims, 0)
    lead, lengths = values.shape[: values.ndim - dims], values.shape[values.ndim - dims :]
    sizes = [
        (n - 1) * s - 2 * p + k for n, s, p, k in zip(lengths, strides, pads, kernel, strict=True)
    ]
    if output_size is not None:
        sizes = [int(n) for n in tuple(output_size)[-dims:]]
    rows, width = math.prod(lead), math.prod(sizes)
    start = iota((rows, math.prod(lengths)), 0) * width
    flat = reshape(cast(index, int32), start.shape) + start
    empty = zeros((rows * width,), values.dtype)
    places, each = reshape(flat, (-1,)), reshape(values, (-1,))
    # Windows that overlap may name one place several times, with one value: each of them has the
    # whole gradient of the place, as in PyTorch.
    known = stop_gradient(each)
    total = scatter_add(empty, places, known)
    count = scatter_add(empty, places, constant(1, known.shape, known.dtype))
    finite = where(isfinite(each), each, 0)
    slopes = scatter_add(empty, places, finite - stop_gradient(finite))  # of zeros
    return reshape(total / maximum(count, 1) + slopes, (*lead, *sizes))
