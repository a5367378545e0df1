"""Values as small integers with a scale."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import linear
from treadle.frontend.functions import shaping as s
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator, rank_of


@operator("MatMulInteger")
def _matmul_integer(
    call: Call, x: Value, y: Value, x_zero: Value = None, y_zero: Value = None
) -> Tensor:
    left, right = (cast_to(as_tensor(v), dtypes.int32) for v in (x, y))
    if x_zero is not None:
        zero = cast_to(as_tensor(x_zero), dtypes.int32)
        left = left - (s.unsqueeze(zero, -1) if zero.ndim == 1 and zero.size > 1 else zero)
    if y_zero is not None:
        right = right - cast_to(as_tensor(y_zero), dtypes.int32)
    return linear.matmul(left, right)


def _along(call: Call, value: Value, rank: int, axis: int) -> Tensor:
    """A scale or zero of each slice along an axis."""
    tensor = as_tensor(value)
    if tensor.ndim == 1 and tensor.size > 1:
        at = call.axis(axis, rank)
        return s.reshape(tensor, (tensor.size, *(1,) * (rank - at - 1)))
    return s.reshape(tensor, ()) if tensor.size == 1 else tensor


@operator("DequantizeLinear")
def _dequantize(call: Call, x: Value, scale: Value, zero: Value = None) -> Tensor:
    tensor = as_tensor(x)
    _no_blocks(call, scale, tensor)
    factor = _along(call, scale, tensor.ndim, call.integer("axis", 1))
    wide = cast_to(tensor, dtypes.int32) if not tensor.dtype.is_float else tensor
    if zero is not None:
        wide = wide - cast_to(_along(call, zero, tensor.ndim, call.integer("axis", 1)), wide.dtype)
    return cast_to(wide, factor.dtype) * factor


@operator("QuantizeLinear")
def _quantize(call: Call, x: Value, scale: Value, zero: Value = None) -> Tensor:
    tensor = as_tensor(x)
    _no_blocks(call, scale, tensor)
    axis = call.integer("axis", 1)
    code = call.integer("output_dtype", 0)
    dtype = dtypes.uint8 if zero is None else as_tensor(zero).dtype
    if code:
        dtype = {2: dtypes.uint8, 3: dtypes.int8}.get(code, dtypes.float32)
    if dtype not in (dtypes.uint8, dtypes.int8):
        raise call.refuse(f"the element type {dtype}", "int8 and uint8 are read.")
    rounded = a.round(tensor / _along(call, scale, tensor.ndim, axis))
    if zero is not None:
        rounded = rounded + cast_to(_along(call, zero, tensor.ndim, axis), rounded.dtype)
    low, high = dtype.range()
    return cast_to(a.clamp(rounded, low, high), dtype)


def _no_blocks(call: Call, scale: Value, x: Tensor) -> None:
    if rank_of(scale) > 1 or call.integer("block_size", 0):
        raise call.refuse(f"scales of blocks for {x.type}", "One, or one per slice, are read.")


@operator("DynamicQuantizeLinear")
def _dynamic_quantize(call: Call, x: Value) -> list[Tensor]:
    tensor = as_tensor(x)
    high, low = a.maximum(tensor.max(), 0.0), a.minimum(tensor.min(), 0.0)
    scale = (high - low) / 255.0
    safe = a.where(scale > 0, scale, 1.0)
    zero = a.clamp(a.round(a.neg(low) / safe), 0.0, 255.0)
    found = a.clamp(a.round(tensor / safe) + zero, 0.0, 255.0)
    return [cast_to(found, dtypes.uint8), scale, cast_to(zero, dtypes.uint8)]
