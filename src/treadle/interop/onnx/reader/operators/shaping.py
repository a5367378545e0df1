"""Operators that move elements or make them: shapes, slices, pads, ranges."""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.base.shapes import broadcast_shapes
from treadle.frontend.coerce import as_tensor, broadcast_to
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import padding
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.arithmetic import eq, where
from treadle.frontend.functions.indexing import take, take_along_axis
from treadle.frontend.functions.shaping import full
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.library import DTYPES
from treadle.interop.onnx.reader.calls import (
    STATIC,
    Call,
    Value,
    operator,
    rank_of,
    shape_of,
)

MOST_PARTS = 10_000


def axes_given(call: Call, axes: Value, rank: int) -> tuple[int, ...] | None:
    """Axes by an operand, or in older files by an attribute; None where there are none."""
    if axes is not None:
        return call.axes(call.whole(axes, "axes"), rank)
    return call.axes(call.integers("axes"), rank) if call.has("axes") else None


@operator("Shape")
def _shape(call: Call, x: Value) -> np.ndarray:
    shape = shape_of(x)
    start, end = call.integer("start", 0), call.integer("end", len(shape))
    return np.array(shape[slice(start, end)], np.int64)


@operator("Size")
def _size(call: Call, x: Value) -> np.ndarray:
    return np.array(math.prod(shape_of(x)), np.int64)


@operator("Constant")
def _constant(call: Call) -> np.ndarray:
    found = [(n, v) for n, v in call.attributes.items() if n.startswith("value")]
    if len(found) != 1:
        raise call.refuse(f"it has {len(found)} values")
    ((name, value),) = found
    if isinstance(value, np.ndarray):
        return value
    dtype = {"value_float": np.float32, "value_floats": np.float32}.get(name, np.int64)
    if name not in ("value_float", "value_floats", "value_int", "value_ints"):
        raise call.refuse(f"the attribute {name[:40]!r} is not read")
    return np.array(value, dtype)


@operator("ConstantOfShape")
def _constant_of_shape(call: Call, shape: Value) -> Value:
    value = call.attributes.get("value", np.zeros(1, np.float32))
    sizes = call.whole(shape, "the shape")
    if not isinstance(value, np.ndarray) or value.size != 1 or min(sizes, default=0) < 0:
        raise call.refuse(f"the shape {sizes[:32]} of a value {str(value)[:80]}")
    if math.prod(sizes) <= STATIC:
        return np.full(sizes, value.reshape(-1)[0])
    dtype = as_tensor(value).dtype
    return full(sizes, value.reshape(-1)[0].item(), dtype)


@operator("Range")
def _range(call: Call, start: Value, limit: Value, delta: Value) -> Value:
    first, last, step = (call.number(v, "a bound") for v in (start, limit, delta))
    if not step or not all(map(math.isfinite, (first, last, step))):
        raise call.refuse(f"from {first} to {last} by {step}")
    count = max(0, math.ceil((last - first) / step))
    call.bounded(count)
    dtype = call.static(start, "the start").dtype
    return (first + step * np.arange(count)).astype(dtype)


@operator("EyeLike")
def _eye_like(call: Call, x: Value) -> Tensor:
    shape = shape_of(x)
    dtype = DTYPES.get(call.integer("dtype")) if call.has("dtype") else as_tensor(x).dtype
    if len(shape) != 2 or dtype is None:
        raise call.refuse(f"of the shape {shape}")
    lower = s.iota(shape, 0) + call.integer("k", 0)
    return cast_to(eq(lower, s.iota(shape, 1)), dtype)


@operator("Reshape")
def _reshape(call: Call, x: Value, shape: Value) -> Tensor:
    tensor = as_tensor(x)
    sizes = list(call.whole(shape, "the shape"))
    if not call.flag("allowzero"):
        if any(n == 0 and i >= tensor.ndim for i, n in enumerate(sizes)):
            raise call.refuse(f"{sizes} of {tensor.type}")
        sizes = [tensor.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
        if sizes.count(-1) > 1 or not known or tensor.size % known:
            raise call.refuse(f"{sizes} of {tensor.type}")
        sizes[sizes.index(-1)] = tensor.size // known
    if min(sizes, default=0) < 0 or math.prod(sizes) != tensor.size:
        raise call.refuse(f"{sizes[:32]} of {tensor.type}")
    return s.reshape(tensor, tuple(sizes))


@operator("Flatten")
def _flatten(call: Call, x: Value) -> Tensor:
    tensor = as_tensor(x)
    axis = call.integer("axis", 1)
    at = tensor.ndim if axis == tensor.ndim else call.axis(axis, max(1, tensor.ndim))
    first = math.prod(tensor.shape[:at])
    return s.reshape(tensor, (first, math.prod(tensor.shape[at:])))


@operator("Transpose")
def _transpose(call: Call, x: Value) -> Tensor:
    tensor = as_tensor(x)
    axes = call.integers("perm", tuple(reversed(range(tensor.ndim))))
    return s.permute(tensor, call.axes(axes, tensor.ndim)) if axes else tensor


@operator("Squeeze")
def _squeeze(call: Call, x: Value, axes: Value = None) -> Tensor:
    tensor = as_tensor(x)
    chosen = axes_given(call, axes, tensor.ndim)
    if chosen is None:
        chosen = tuple(i for i, n in enumerate(tensor.shape) if n == 1)
    if any(tensor.shape[i] != 1 for i in chosen):
        raise call.refuse(f"axes {chosen} of {tensor.type}")
    return s.reshape(tensor, tuple(n for i, n in enumerate(tensor.shape) if i not in chosen))


@operator("Unsqueeze")
def _unsqueeze(call: Call, x: Value, axes: Value = None) -> Tensor:
    tensor = as_tensor(x)
    given = call.whole(axes, "axes") if axes is not None else call.integers("axes")
    rank = tensor.ndim + len(given)
    chosen = call.axes(given, rank)
    sizes = iter(tensor.shape)
    return s.reshape(tensor, tuple(1 if i in chosen else next(sizes) for i in range(rank)))


@operator("Expand")
def _expand(call: Call, x: Value, shape: Value) -> Tensor:
    tensor = as_tensor(x)
    wanted = call.whole(shape, "the shape")
    found = broadcast_shapes(tensor.shape, wanted)
    if found is None or min(wanted, default=0) < 0:
        raise call.refuse(f"{tensor.type} to {wanted[:32]}")
    return broadcast_to(tensor, found)


@operator("Tile")
def _tile(call: Call, x: Value, repeats: Value) -> Tensor:
    tensor, times = as_tensor(x), call.whole(repeats, "the repeats")
    if len(times) != tensor.ndim or min(times, default=0) < 0:
        raise call.refuse(f"{tensor.type} by {times[:32]}")
    pairs = [n for pair in zip(times, tensor.shape, strict=True) for n in pair]
    apart = s.reshape(tensor, tuple(m for n in tensor.shape for m in (1, n)))
    sizes = tuple(n * t for n, t in zip(tensor.shape, times, strict=True))
    return s.reshape(broadcast_to(apart, tuple(pairs)), sizes)


@operator("Concat")
def _concat(call: Call, *values: Value) -> Tensor:
    tensors = [as_tensor(v) for v in values]
    axis = call.axis(call.integer("axis"), tensors[0].ndim)
    return s.concat(tensors, axis)


def check_parts(call: Call, count: int) -> None:
    if count > MOST_PARTS:
        raise call.refuse(f"{count:,} parts, more than {MOST_PARTS:,}")


@operator("Split")
def _split(call: Call, x: Value, split: Value = None) -> list[Tensor]:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", 0), tensor.ndim)
    size = tensor.shape[axis]
    if split is not None:
        parts = call.whole(split, "the sizes of the parts")
    elif call.has("split"):
        parts = call.integers("split")
    else:
        count = call.integer("num_outputs", len(call.outputs))
        if count < 1:
            raise call.refuse(f"into {count} parts")
        check_parts(call, count)
        each = -(-size // count)
        parts = tuple(max(0, min(each, size - each * i)) for i in range(count))
    if sum(parts) != size or min(parts, default=-1) < 0:
        raise call.refuse(f"parts of {parts[:32]} of {tensor.type} along axis {axis}")
    call.spend(len(parts))  # each is a node of the trace
    ends = np.cumsum(parts).tolist()
    pairs = zip([0, *ends[:-1]], ends, strict=True)
    return [s.slice_along(tensor, axis, start, stop) for start, stop in pairs]


@operator("Slice")
def _slice(
    call: Call,
    x: Value,
    starts: Value = None,
    ends: Value = None,
    axes: Value = None,
    steps: Value = None,
) -> Tensor:
    tensor = as_tensor(x)
    first, last = _sizes(call, starts, "starts"), _sizes(call, ends, "ends")
    given = tuple(range(len(first)))
    if axes is not None or call.has("axes"):
        given = _sizes(call, axes, "axes")
    step = (1,) * len(first) if steps is None else call.whole(steps, "the steps")
    if not len(first) == len(last) == len(given) == len(step) or 0 in step:
        raise call.refuse(f"{first}:{last}:{step} along {given}"[:400])
    for axis, a, b, c in zip(call.axes(given, tensor.ndim), first, last, step, strict=True):
        start, stop, stride = slice(a, b, c).indices(tensor.shape[axis])
        count = len(range(start, stop, stride))
        if stride > 0:
            tensor = s.slice_along(tensor, axis, start, max(start, stop), stride)
        elif count:
            low = start + (count - 1) * stride
            tensor = s.flip(s.slice_along(tensor, axis, low, start + 1, -stride), axis)
        else:
            tensor = s.slice_along(tensor, axis, 0, 0)
    return tensor


def _sizes(call: Call, value: Value, name: str) -> tuple[int, ...]:
    """Integers of an operand, or in older files of an attribute."""
    if value is None and call.has(name):
        return call.integers(name)
    return call.whole(value, f"the {name}")


PADS = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad")
def _pad(
    call: Call, x: Value, pads: Value = None, value: Value = None, axes: Value = None
) -> Tensor:
    tensor = as_tensor(x)
    mode = PADS[call.choice("mode", "constant", tuple(PADS))]
    amounts = _sizes(call, pads, "pads")
    chosen = (
        range(tensor.ndim) if axes is None else call.axes(call.whole(axes, "axes"), tensor.ndim)
    )
    if len(amounts) != 2 * len(chosen):
        raise call.refuse(f"{len(amounts)} pads for {len(chosen)} axes")
    pairs = [(0, 0)] * tensor.ndim
    for i, axis in enumerate(chosen):
        pairs[axis] = (amounts[i], amounts[i + len(chosen)])
    if mode != "constant":
        return padding.pad(tensor, pairs, mode=mode)
    fill = call.real("value", 0.0)
    if value is not None and value.size:
        fill = call.number(value, "the value")
    return padding.pad(tensor, pairs, fill)


@operator("CenterCropPad")
def _center(call: Call, x: Value, shape: Value) -> Tensor:
    tensor = as_tensor(x)
    axes = call.axes(call.integers("axes", tuple(range(tensor.ndim))), tensor.ndim)
    wanted = call.whole(shape, "the shape")
    pairs = [(0, 0)] * tensor.ndim
    for axis, size in zip(axes, wanted, strict=True):
        more = size - tensor.shape[axis]
        low = more // 2 if more > 0 else -(-more // 2)
        pairs[axis] = (low, more - low)
    return padding.pad(tensor, pairs)


@operator("Trilu")
def _trilu(call: Call, x: Value, k: Value = None) -> Tensor:
    diagonal = 0 if k is None else int(call.number(k, "k"))
    tensor = as_tensor(x)
    if abs(diagonal) > 2**31 - 1 - max(tensor.shape, default=0):
        diagonal = int(math.copysign(sum(tensor.shape), diagonal))
    return s.triu(tensor, diagonal) if call.flag("upper", True) else s.tril(tensor, diagonal)


def _blocks(call: Call, x: Value) -> tuple[Tensor, int]:
    tensor, block = as_tensor(x), call.integer("blocksize")
    if tensor.ndim != 4 or block < 1:
        raise call.refuse(f"blocks of {block} of {tensor.type}")
    return tensor, block


@operator("DepthToSpace")
def _depth_to_space(call: Call, x: Value) -> Tensor:
    tensor, block = _blocks(call, x)
    n, c, h, w = tensor.shape
    inner = c // (block * block)
    if call.choice("mode", "DCR", ("DCR", "CRD")) == "DCR":
        apart = s.reshape(tensor, (n, block, block, inner, h, w))
        order = (0, 3, 4, 1, 5, 2)
    else:
        apart = s.reshape(tensor, (n, inner, block, block, h, w))
        order = (0, 1, 4, 2, 5, 3)
    return s.reshape(s.permute(apart, order), (n, inner, h * block, w * block))


@operator("SpaceToDepth")
def _space_to_depth(call: Call, x: Value) -> Tensor:
    tensor, block = _blocks(call, x)
    n, c, h, w = tensor.shape
    apart = s.reshape(tensor, (n, c, h // block, block, w // block, block))
    is_deep = call.choice("mode", "DCR", ("DCR", "CRD")) == "DCR"
    moved = s.permute(apart, (0, 3, 5, 1, 2, 4) if is_deep else (0, 1, 3, 5, 2, 4))
    return s.reshape(moved, (n, c * block * block, h // block, w // block))


@operator("ReverseSequence")
def _reverse_sequence(call: Call, x: Value, lengths: Value) -> Tensor:
    """The first so many elements of each row in reverse order."""
    tensor = as_tensor(x)
    batch, time = call.integer("batch_axis", 1), call.integer("time_axis", 0)
    if tensor.ndim < 2 or {batch, time} != {0, 1}:
        raise call.refuse(f"axes {batch} and {time} of {tensor.type}")
    rows = s.transpose(tensor, 0, 1) if time == 0 else tensor  # (N, T, …)
    n, t = rows.shape[:2]
    ends = s.reshape(cast_to(as_tensor(lengths), dtypes.int32), (n, 1))
    steps = s.iota((n, t), 1)
    places = where(steps < ends, ends - 1 - steps, steps)
    flat = s.reshape(rows, (n, t, math.prod(rows.shape[2:])))
    wide = broadcast_to(s.unsqueeze(places, -1), flat.shape)
    found = s.reshape(take_along_axis(flat, wide, 1), rows.shape)
    return s.transpose(found, 0, 1) if time == 0 else found


# What has a size that depends on numbers: those must be known


@operator("NonZero")
def _non_zero(call: Call, x: Value) -> np.ndarray:
    return np.array(np.nonzero(call.static(x, "x")), np.int64).reshape(max(1, rank_of(x)), -1)


@operator("Compress")
def _compress(call: Call, x: Value, condition: Value) -> Tensor:
    tensor = as_tensor(x)
    chosen = np.flatnonzero(call.static(condition, "the condition"))
    if not call.has("axis"):
        return take(s.reshape(tensor, (tensor.size,)), as_tensor(chosen))
    return take(tensor, as_tensor(chosen), call.axis(call.integer("axis"), tensor.ndim))


@operator("Unique")
def _unique(call: Call, x: Value) -> list[np.ndarray]:
    array = call.static(x, "x")
    axis = call.axis(call.integer("axis"), array.ndim) if call.has("axis") else None
    values, first, inverse, counts = np.unique(
        array, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not call.flag("sorted", True):
        order = np.argsort(first, kind="stable")
        rank = np.argsort(order, kind="stable")
        values = np.take(values, order, axis or 0)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    return [values, *(a.astype(np.int64) for a in (first, inverse, counts))]
