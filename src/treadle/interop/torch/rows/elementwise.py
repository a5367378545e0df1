"""Rows of elementwise ops: arithmetic, comparisons, activations."""

from __future__ import annotations

import math
from typing import Any

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor, cast, constant
from treadle.frontend.functions import activations as f
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import elementary as e
from treadle.frontend.functions import gamma, powers, special
from treadle.frontend.functions.shaping import expand, reshape
from treadle.frontend.tensor import Operand, Tensor
from treadle.interop.torch.rows.table import aten, declare_all

declare_all(
    {
        **{name: getattr(a, name) for name in ("abs", "ceil", "cos", "erf", "exp", "expm1")},
        **{name: getattr(a, name) for name in ("floor", "isfinite", "isnan", "log", "log1p")},
        **{name: getattr(a, name) for name in ("log2", "logical_and", "logical_not", "logical_or")},
        **{name: getattr(a, name) for name in ("logical_xor", "neg", "reciprocal", "round")},
        **{name: getattr(a, name) for name in ("rsqrt", "sign", "sin", "sqrt", "square", "tanh")},
        **{name: getattr(a, name) for name in ("atan2", "maximum", "minimum", "bitwise_not")},
        **{name: getattr(e, name) for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh")},
        **{name: getattr(e, name) for name in ("cosh", "frac", "hypot", "isinf")},
        **{name: getattr(e, name) for name in ("log10", "logaddexp", "sinh", "tan", "trunc")},
        **{name: getattr(f, name) for name in ("hardsigmoid", "hardswish", "log_sigmoid", "mish")},
        **{name: getattr(f, name) for name in ("relu", "relu6", "selu", "sigmoid", "silu")},
        **{name: getattr(f, name) for name in ("celu", "glu", "hardshrink", "hardtanh")},
        **{name: getattr(f, name) for name in ("leaky_relu", "softplus", "softshrink")},
        "digamma": gamma.digamma,
        "lgamma": gamma.lgamma,
        "erfc": special.erfc,
        "fix": e.trunc,
        "fmax": e.fmax,
        "fmin": e.fmin,
        "fmod.Scalar": e.fmod,
        "fmod.Tensor": e.fmod,
        "max.other": a.maximum,
        "min.other": a.minimum,
        "sgn": a.sign,
        "signbit": e.signbit,
        "threshold": f.threshold,
        "nan_to_num": e.nan_to_num,
    }
)

for _name in ("eq", "ge", "gt", "le", "lt", "ne", "mul", "remainder"):
    declare_all({f"{_name}.{kind}": getattr(a, _name) for kind in ("Tensor", "Scalar")})
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    declare_all({f"{_name}.{kind}": getattr(a, _name) for kind in ("Tensor", "Scalar")})
for _kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar"):
    declare_all({f"pow.{_kind}": powers.pow})


def scaled(x: Operand, factor: Any) -> Tensor:
    """x · factor, where a factor of 1 is no product."""
    return as_tensor(x) if factor == 1 else a.mul(x, factor)


@aten("add.Tensor", "add.Scalar")
def _add(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    return a.add(x, y if alpha == 1 else a.mul(y, alpha))


@aten("sub.Tensor", "sub.Scalar")
def _sub(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    return a.sub(x, y if alpha == 1 else a.mul(y, alpha))


@aten("rsub.Tensor", "rsub.Scalar")
def _rsub(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    return a.sub(y, scaled(x, alpha))


@aten("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor")
def _div(x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode == "floor":
        return a.floor_divide(x, y)
    if rounding_mode is None:
        return a.div(x, y)
    if not any(as_tensor(t).dtype.is_float for t in (x, y)):
        return _truncated(as_tensor(x), as_tensor(y))
    return e.trunc(a.div(x, y))


def _truncated(x: Tensor, y: Tensor) -> Tensor:
    """Integers divided towards zero: exact, where a quotient of floats would be rounded."""
    size = a.floor_divide(a.abs(x), a.abs(y))
    return a.where(a.eq(a.lt(x, 0), a.lt(y, 0)), size, a.neg(size))


@aten("floor_divide", "floor_divide.Scalar")
def _floor_divide(x: Operand, y: Operand) -> Tensor:
    return a.floor_divide(x, y)


@aten("clamp", "clamp.Tensor")
def _clamp(x: Operand, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    return a.clamp(x, min, max)


@aten("clamp_min", "clamp_min.Tensor")
def _clamp_min(x: Operand, min: Operand) -> Tensor:
    return a.clamp(x, min, None)


@aten("clamp_max", "clamp_max.Tensor")
def _clamp_max(x: Operand, max: Operand) -> Tensor:
    return a.clamp(x, None, max)


@aten("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    return a.where(cast(as_tensor(condition), dtypes.bool_), x, y)


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    filled = cast(as_tensor(value), x.dtype) if isinstance(value, Tensor) else value
    return a.where(mask, filled, x)


@aten("lerp.Scalar", "lerp.Tensor")
def _lerp(start: Operand, end: Operand, weight: Operand) -> Tensor:
    return e.lerp(start, end, weight)


@aten("addcmul")
def _addcmul(x: Operand, first: Operand, second: Operand, value: float = 1) -> Tensor:
    return e.addcmul(x, first, second, value)


@aten("addcdiv")
def _addcdiv(x: Operand, first: Operand, second: Operand, value: float = 1) -> Tensor:
    return e.addcdiv(x, first, second, value)


@aten("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")
def _xlogy(x: Operand, y: Operand) -> Tensor:
    return special.xlogy(x, y)


@aten("logaddexp2")
def _logaddexp2(x: Operand, y: Operand) -> Tensor:
    return e.logaddexp(a.mul(x, math.log(2)), a.mul(y, math.log(2))) / math.log(2)


@aten("exp2")
def _exp2(x: Operand) -> Tensor:
    return a.exp(a.mul(x, math.log(2)))


@aten("logit")
def _logit(x: Operand, eps: float | None = None) -> Tensor:
    return special.logit(x, eps)


@aten("deg2rad")
def _deg2rad(x: Operand) -> Tensor:
    return a.mul(x, math.pi / 180)


@aten("rad2deg")
def _rad2deg(x: Operand) -> Tensor:
    return a.mul(x, 180 / math.pi)


@aten("bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "__lshift__.Scalar")
def _left_shift(x: Operand, y: Operand) -> Tensor:
    return a.mul(x, _power_of_two(as_tensor(x), y))


@aten("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "__rshift__.Scalar")
def _right_shift(x: Operand, y: Operand) -> Tensor:
    return a.floor_divide(x, _power_of_two(as_tensor(x), y))


def _power_of_two(x: Tensor, y: Operand) -> Operand:
    if isinstance(y, int):
        return 2**y
    return cast(
        a.pow(constant(2.0, (), dtypes.float64), cast(as_tensor(y), dtypes.float64)), x.dtype
    )


# Activations with arguments that are not Treadle's


@aten("elu")
def _elu(x: Operand, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    value = as_tensor(x)
    below = a.mul(a.expm1(scaled(a.where(value > 0, 0.0, value), input_scale)), alpha * scale)
    return a.where(value > 0, scaled(value, scale), below)


@aten("gelu")
def _gelu(x: Operand, approximate: str = "none") -> Tensor:
    return f.gelu(x, approximate)


@aten("prelu", "_prelu_kernel")
def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    slopes = weight
    if weight.ndim == 1 and x.ndim > 1:
        slopes = reshape(weight, (weight.shape[0], *(1,) * (x.ndim - 2)))
    return a.where(x > 0, x, x * slopes)


@aten("log_sigmoid_forward")
def _log_sigmoid_forward(x: Operand) -> tuple[Tensor, None]:
    return f.log_sigmoid(x), None


@aten("softmax.int", "_safe_softmax")
def _softmax(x: Tensor, dim: int, dtype: dtypes.DType | None = None) -> Tensor:
    return f.softmax(_as_float(x, dtype), dim) if x.ndim else a.exp(x * 0.0)


@aten("_softmax")
def _softmax_core(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _softmax(x, dim)


@aten("log_softmax.int")
def _log_softmax(x: Tensor, dim: int, dtype: dtypes.DType | None = None) -> Tensor:
    return f.log_softmax(_as_float(x, dtype), dim) if x.ndim else x * 0.0


@aten("_log_softmax")
def _log_softmax_core(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _log_softmax(x, dim)


def _as_float(x: Tensor, dtype: dtypes.DType | None) -> Tensor:
    return x if dtype is None else cast(x, dtype)


@aten("clone", "contiguous", "alias", "positive", "lift_fresh_copy", "lift_fresh", "lift")
def _same(x: Tensor) -> Tensor:
    return x


@aten("detach")
def _detach(x: Tensor) -> Tensor:
    return a.stop_gradient(x)


@aten("_to_copy", "to.dtype_layout")
def _to_copy(x: Tensor, dtype: dtypes.DType | None = None, **others: Any) -> Tensor:
    return x if dtype is None else cast(x, dtype)


@aten("to.dtype")
def _to(x: Tensor, dtype: dtypes.DType, non_blocking: bool = False, copy: bool = False) -> Tensor:
    return cast(x, dtype)


@aten("to.device")
def _to_device(x: Tensor, device: object = None, dtype: Any = None, *others: Any) -> Tensor:
    return x if dtype is None else cast(x, dtype)


@aten("to.other", "type_as")
def _to_other(x: Tensor, other: Tensor, *others: Any) -> Tensor:
    return cast(x, other.dtype)


@aten("copy")
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return expand(cast(source, x.dtype), x.shape)
