"""Values as small integers with a scale."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import linear
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.sequences import repeat_interleave
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.library import DTYPES, element_type
from treadle.interop.onnx.reader.calls import Call, Value, operator, rank_of
from treadle.interop.onnx.reader.operators.linear import convolution


@operator("MatMulInteger")
def _matmul_integer(
    call: Call, x: Value, y: Value, x_zero: Value = None, y_zero: Value = None
) -> Tensor:
    return linear.matmul(_shifted(x, _of_rows(x_zero)), _shifted(y, y_zero))


def _shifted(x: Value, zero: Value) -> Tensor:
    """x − zero, in int32."""
    wide = cast_to(as_tensor(x), dtypes.int32)
    return wide if zero is None else wide - cast_to(as_tensor(zero), dtypes.int32)


def _of_rows(value: Value) -> Value:
    """A scale or zero of each row of a left operand, along its rows."""
    if value is None or rank_of(value) != 1 or as_tensor(value).size == 1:
        return value
    return s.unsqueeze(as_tensor(value), -1)


def _of_channels(value: Value, rank: int) -> Value:
    """A scale or zero of each output channel of a convolution's weight, along its first axis."""
    if value is None or as_tensor(value).size == 1:
        return None if value is None else s.reshape(as_tensor(value), ())
    return s.reshape(as_tensor(value), (-1, *(1,) * (rank - 1)))


def _narrowed(call: Call, found: Tensor, factor: Tensor, zero: Value) -> Tensor:
    """Sums in int32 times a factor, rounded and held in the dtype of a zero."""
    target = as_tensor(zero)
    if target.dtype not in (dtypes.uint8, dtypes.int8):
        raise call.refuse(f"results are {target.dtype}", "int8 and uint8 are read.")
    wide = a.round(cast_to(found, dtypes.float32) * cast_to(factor, dtypes.float32))
    low, high = target.dtype.range()
    shifted = wide + cast_to(target, dtypes.float32)
    return cast_to(a.clamp(shifted, low, high), target.dtype)


@operator("QLinearMatMul")
def _quantized_matmul(
    call: Call,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    y: Value,
    y_scale: Value,
    y_zero: Value,
    scale: Value,
    zero: Value,
) -> Tensor:
    sums = linear.matmul(_shifted(x, _of_rows(x_zero)), _shifted(y, y_zero))
    factor = as_tensor(_of_rows(x_scale)) * as_tensor(y_scale) / as_tensor(_of_rows(scale))
    return _narrowed(call, sums, factor, _of_rows(zero))


@operator("ConvInteger")
def _integer_convolution(
    call: Call, x: Value, w: Value, x_zero: Value = None, w_zero: Value = None
) -> Tensor:
    rank = rank_of(w)
    return convolution(call, _shifted(x, x_zero), _shifted(w, _of_channels(w_zero, rank)))


@operator("QLinearConv")
def _quantized_convolution(
    call: Call,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    w: Value,
    w_scale: Value,
    w_zero: Value,
    scale: Value,
    zero: Value,
    bias: Value = None,
) -> Tensor:
    rank = rank_of(w)
    weight = _shifted(w, _of_channels(w_zero, rank))
    sums = convolution(call, _shifted(x, x_zero), weight, bias)
    each = _of_channels(w_scale, rank - 1)
    return _narrowed(call, sums, as_tensor(x_scale) * each / as_tensor(scale), zero)


def _along(call: Call, value: Value, x: Tensor) -> Tensor:
    """A scale or zero of each slice along an axis, or of each block of some elements of it."""
    tensor, rank, axis = as_tensor(value), x.ndim, call.integer("axis", 1)
    block = call.integer("block_size", 0)
    if tensor.ndim > 1:
        at = call.axis(axis, rank)
        sizes = [-(-n // block) if i == at and block > 0 else n for i, n in enumerate(x.shape)]
        if block < 1 or tensor.shape != tuple(sizes):
            raise call.refuse(f"scales {tensor.type} of blocks of {block} for {x.type}")
        return s.slice_along(repeat_interleave(tensor, block, at), at, 0, x.shape[at])
    if tensor.ndim == 1 and tensor.size > 1:
        at = call.axis(axis, rank)
        return s.reshape(tensor, (tensor.size, *(1,) * (rank - at - 1)))
    return s.reshape(tensor, ()) if tensor.size == 1 else tensor


@operator("DequantizeLinear")
def _dequantize(call: Call, x: Value, scale: Value, zero: Value = None) -> Tensor:
    tensor = as_tensor(x)
    factor = _along(call, scale, tensor)
    wide = cast_to(tensor, dtypes.int32) if not tensor.dtype.is_float else tensor
    if zero is not None:
        wide = wide - cast_to(_along(call, zero, tensor), wide.dtype)
    return cast_to(wide, factor.dtype) * factor


@operator("QuantizeLinear")
def _quantize(call: Call, x: Value, scale: Value, zero: Value = None) -> Tensor:
    tensor = as_tensor(x)
    code = call.integer("output_dtype", 0)
    dtype = dtypes.uint8 if zero is None else as_tensor(zero).dtype
    if code:
        dtype = DTYPES.get(code, dtypes.float32)
    if dtype not in (dtypes.uint8, dtypes.int8):
        name = element_type(code) if code else dtype
        raise call.refuse(f"results are {name}", "int8 and uint8 are read.")
    rounded = a.round(tensor / _along(call, scale, tensor))
    if zero is not None:
        rounded = rounded + cast_to(_along(call, zero, tensor), rounded.dtype)
    low, high = dtype.range()
    return cast_to(a.clamp(rounded, low, high), dtype)


@operator("DynamicQuantizeLinear")
def _dynamic_quantize(call: Call, x: Value) -> list[Tensor]:
    tensor = as_tensor(x)
    high, low = a.maximum(tensor.max(), 0.0), a.minimum(tensor.min(), 0.0)
    scale = (high - low) / 255.0
    safe = a.where(scale > 0, scale, 1.0)
    zero = a.clamp(a.round(a.neg(low) / safe), 0.0, 255.0)
    found = a.clamp(a.round(tensor / safe) + zero, 0.0, 255.0)
    return [cast_to(found, dtypes.uint8), scale, cast_to(zero, dtypes.uint8)]
