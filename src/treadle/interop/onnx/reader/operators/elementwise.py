"""Elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import activations as act
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import elementary as el
from treadle.frontend.functions import reductions as red
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.shaping import iota, ones, reshape
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.library import DTYPES, element_type
from treadle.interop.onnx.reader.calls import OPERATORS, Call, Operator, Value, operator

UNARY: dict[str, Callable[[Value], Tensor]] = {
    "Abs": a.abs,
    "Acos": el.acos,
    "Acosh": el.acosh,
    "Asin": el.asin,
    "Asinh": el.asinh,
    "Atan": el.atan,
    "Atanh": el.atanh,
    "BitwiseNot": a.bitwise_not,
    "Ceil": a.ceil,
    "Cos": a.cos,
    "Cosh": el.cosh,
    "Erf": a.erf,
    "Exp": a.exp,
    "Floor": a.floor,
    "HardSwish": act.hardswish,
    "Identity": lambda x: x,
    "IsNaN": a.isnan,
    "Log": a.log,
    "Mish": act.mish,
    "Neg": a.neg,
    "Not": a.logical_not,
    "Reciprocal": a.reciprocal,
    "Relu": act.relu,
    "Round": a.round,
    "Sigmoid": act.sigmoid,
    "Sign": a.sign,
    "Sin": a.sin,
    "Sinh": el.sinh,
    "Softplus": act.softplus,
    "Softsign": act.softsign,
    "Sqrt": a.sqrt,
    "Tan": el.tan,
    "Tanh": a.tanh,
}
BINARY: dict[str, Callable[[Value, Value], Tensor]] = {
    "Add": a.add,
    "And": a.logical_and,
    "BitwiseAnd": a.bitwise_and,
    "BitwiseOr": a.bitwise_or,
    "BitwiseXor": a.bitwise_xor,
    "Equal": a.eq,
    "Greater": a.gt,
    "GreaterOrEqual": a.ge,
    "Less": a.lt,
    "LessOrEqual": a.le,
    "Mul": a.mul,
    "Or": a.logical_or,
    "Sub": a.sub,
    "Xor": a.logical_xor,
}


def _unary(function: Callable[[Value], Tensor]) -> Operator:
    return lambda call, x: function(x)


def _binary(function: Callable[[Value, Value], Tensor]) -> Operator:
    return lambda call, x, y: function(x, y)


OPERATORS.update({name: _unary(function) for name, function in UNARY.items()})
OPERATORS.update({name: _binary(function) for name, function in BINARY.items()})


def dtype_of(value: Value) -> DType:
    return as_tensor(value).dtype


@operator("Div")
def _div(call: Call, x: Value, y: Value) -> Tensor:
    """Of integers, towards zero."""
    if dtype_of(x).is_float:
        return a.div(x, y)
    size = a.floor_divide(a.abs(x), a.abs(y))
    return a.mul(a.mul(a.sign(x), a.sign(y)), size) if dtype_of(x).kind == "int" else size


@operator("Mod")
def _mod(call: Call, x: Value, y: Value) -> Tensor:
    if not call.flag("fmod"):
        return a.remainder(x, y)
    rest = a.remainder(a.abs(x), a.abs(y))
    return a.where(a.lt(x, 0), a.neg(rest), rest)


@operator("Pow")
def _pow(call: Call, x: Value, y: Value) -> Tensor:
    """In the base's dtype."""
    base, dtype = as_tensor(x), dtype_of(x)
    if isinstance(y, np.ndarray) and y.size == 1 and dtype.is_float and y.ndim <= base.ndim:
        return a.pow(base, float(y.reshape(-1)[0]))
    wide = base if dtype.is_float else cast_to(base, dtypes.float64)
    found = a.pow(wide, cast_to(as_tensor(y), wide.dtype))
    return found if dtype.is_float else cast_to(a.round(found), dtype)


def _folded(function: Callable[[Value, Value], Tensor]) -> Operator:
    def fold(call: Call, *values: Value) -> Tensor:
        return as_tensor(reduce(function, values))

    return fold


OPERATORS["Max"] = _folded(a.maximum)
OPERATORS["Min"] = _folded(a.minimum)
OPERATORS["Sum"] = _folded(a.add)


@operator("Mean")
def _mean(call: Call, *values: Value) -> Tensor:
    return a.div(as_tensor(reduce(a.add, values)), float(len(values)))


@operator("BitShift")
def _bit_shift(call: Call, x: Value, y: Value) -> Tensor:
    """By a power of two; all bits leave where the shift is negative or as wide as the integer."""
    dtype, shift = dtype_of(x), as_tensor(y)
    if not dtype.is_integer:
        raise call.refuse(f"of {dtype}", "Integers are shifted.")
    is_left = call.choice("direction", "", ("LEFT", "RIGHT")) == "LEFT"
    is_signed = dtype.kind == "int"
    # The highest power of a signed integer is negative: to the right, only the sign is left by it.
    most = dtype.bits - 1 if is_signed and not is_left else dtype.bits
    powers = np.array([1 << i for i in range(most)], f"u{dtype.itemsize}").astype(dtype.numpy)
    is_inside = a.logical_and(a.ge(shift, 0), a.lt(shift, most))
    factor = take(as_tensor(powers), cast_to(a.where(is_inside, shift, 0), dtypes.int32))
    if is_left:
        return a.where(is_inside, a.mul(x, factor), 0)
    rest = a.where(a.lt(x, 0), -1, 0) if is_signed else 0
    return a.where(is_inside, a.floor_divide(x, factor), cast_to(as_tensor(rest), dtype))


@operator("IsInf")
def _is_inf(call: Call, x: Value) -> Tensor:
    above = a.logical_and(a.eq(x, math.inf), call.flag("detect_positive", True))
    below = a.logical_and(a.eq(x, -math.inf), call.flag("detect_negative", True))
    return a.logical_or(above, below)


@operator("Clip")
def _clip(call: Call, x: Value, low: Value = None, high: Value = None) -> Tensor:
    """Bounds are operands, or in older files attributes."""
    low = call.real("min") if call.has("min") else low
    high = call.real("max") if call.has("max") else high
    bounds = [b.item() if isinstance(b, np.ndarray) and b.ndim == 0 else b for b in (low, high)]
    found = as_tensor(x)
    if bounds[0] is not None:
        found = a.maximum(found, bounds[0])
    return found if bounds[1] is None else a.minimum(found, bounds[1])


@operator("Where")
def _where(call: Call, condition: Value, x: Value, y: Value) -> Tensor:
    return a.where(condition, x, y)


@operator("Cast")
def _cast(call: Call, x: Value) -> Tensor:
    dtype = DTYPES.get(call.integer("to"))
    if dtype is None:
        raise call.refuse(f"the element type {element_type(call.integer('to'))} is not read")
    return cast_to(as_tensor(x), dtype)


@operator("BitCast")
def _bit_cast(call: Call, x: Value) -> Value:
    """The same bits as another type: of integers, or of numbers that are known while tracing."""
    old, new = dtype_of(x), DTYPES.get(call.integer("to"))
    if new is None or old.itemsize != new.itemsize:
        name = element_type(call.integer("to"))
        raise call.refuse(f"bits of {old} as the element type {name}", "Widths are equal.")
    if old is new:
        return x
    if isinstance(x, np.ndarray):
        return x.view(new.numpy)
    if old.is_float or new.is_float or new is dtypes.bool_:
        raise call.refuse(f"bits of {old} as {new}", "Such numbers must be known while tracing.")
    return cast_to(as_tensor(x), new)


@operator("CastLike")
def _cast_like(call: Call, x: Value, other: Value) -> Tensor:
    return cast_to(as_tensor(x), dtype_of(other))


@operator("Dropout")
def _dropout(call: Call, x: Value, ratio: Value = None, training: Value = None) -> list[Value]:
    """Nothing, but where the file says that it is training."""
    tensor = as_tensor(x)
    is_training = training is not None and bool(call.number(training, "training_mode"))
    part = 0.5 if ratio is None else float(call.number(ratio, "the ratio"))
    if is_training and part > 0:
        if call.is_read(1):
            raise call.refuse("the mask of a dropout that is training is read")
        return [el.dropout(tensor, part)]
    return [tensor, ones(tensor.shape, dtypes.bool_ if call.opset >= 10 else tensor.dtype)]


# Activations


def _with(name: str, function: Callable[..., Tensor], **defaults: float) -> None:
    """An operator whose attributes of floats are arguments of a function, in order."""

    def run(call: Call, x: Value) -> Tensor:
        given = [call.real(key, default) for key, default in defaults.items()]
        return function(as_tensor(x), *given)

    OPERATORS[name] = run


def _selu(x: Tensor, alpha: float, gamma: float) -> Tensor:
    return act.elu(x, alpha) * gamma


def _hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    return a.minimum(a.maximum(x * alpha + beta, 0.0), 1.0)


def _shrink(x: Tensor, bias: float, lambd: float) -> Tensor:
    real = x if x.dtype.is_float else cast_to(x, dtypes.float32)
    above = a.where(a.gt(real, lambd), real - bias, 0.0)
    return cast_to(a.where(a.lt(real, -lambd), real + bias, above), x.dtype)


def _swish(x: Tensor, alpha: float) -> Tensor:
    return act.silu(x) if alpha == 1 else x * act.sigmoid(x * alpha)


def _thresholded(x: Tensor, alpha: float) -> Tensor:
    return a.where(a.gt(x, alpha), x, 0.0)


_with("LeakyRelu", act.leaky_relu, alpha=0.01)
_with("Elu", act.elu, alpha=1.0)
_with("Celu", act.celu, alpha=1.0)
_with("Selu", _selu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875)
_with("HardSigmoid", _hard_sigmoid, alpha=0.2, beta=0.5)
_with("Shrink", _shrink, bias=0.0, lambd=0.5)
_with("Swish", _swish, alpha=1.0)
_with("ThresholdedRelu", _thresholded, alpha=1.0)


@operator("SwiGLU")
def _swiglu(call: Call, x: Value, gate: Value) -> Tensor:
    """x · sigmoid(alpha · x), times the second operand."""
    left, right = as_tensor(x), as_tensor(gate)
    if left.type != right.type:
        raise call.refuse(f"{left.type} and {right.type}", "Both have one shape and dtype.")
    return _swish(left, call.real("alpha", 1.0)) * right


@operator("Gelu")
def _gelu(call: Call, x: Value) -> Tensor:
    return act.gelu(x, call.choice("approximate", "none", ("none", "tanh")))


@operator("PRelu")
def _prelu(call: Call, x: Value, slope: Value) -> Tensor:
    return a.where(a.lt(x, 0), a.mul(x, slope), x)


def _axis(call: Call, x: Value, default: int = -1) -> int:
    return call.axis(call.integer("axis", default), as_tensor(x).ndim)


def _along_axis(function: Callable[[Tensor, int], Tensor]) -> Operator:
    """Over an axis; before opset 13 over it and all that follow, as one."""

    def run(call: Call, x: Value) -> Tensor:
        tensor = as_tensor(x)
        if call.opset >= 13:
            return function(tensor, _axis(call, x))
        axis = _axis(call, x, 1)
        rows = math.prod(tensor.shape[:axis])
        flat = reshape(tensor, (rows, math.prod(tensor.shape[axis:])))
        return reshape(function(flat, 1), tensor.shape)

    return run


def _hardmax(x: Tensor, axis: int) -> Tensor:
    first = red.argmax(x, axis, keepdims=True)
    return cast_to(a.eq(iota(x.shape, axis), first), x.dtype)


OPERATORS["Softmax"] = _along_axis(act.softmax)
OPERATORS["LogSoftmax"] = _along_axis(act.log_softmax)
OPERATORS["Hardmax"] = _along_axis(_hardmax)
