"""Elementwise ops: operands have one shape and one dtype; broadcasts and casts are explicit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import DTypeError, ShapeError
from treadle.ir.contract import Contract, Determinism, ErrorBound, Exact, Ulps
from treadle.ir.op import Attributes, NoAttributes, Op, Precision, TypeRule, Types, declare
from treadle.ir.types import TensorType

Accepts = Callable[[DType], bool]


def _any(dtype: DType) -> bool:
    return True


def _float(dtype: DType) -> bool:
    return dtype.is_float


def _number(dtype: DType) -> bool:
    return dtype is not dtypes.bool_


def _discrete(dtype: DType) -> bool:
    return not dtype.is_float


_ACCEPTED: dict[Accepts, str] = {
    _any: "any",
    _float: "float",
    _number: "float or integer",
    _discrete: "bool or integer",
}


def _same(name: str, accepts: Accepts, operands: Types) -> TensorType:
    """The one type that all operands must have."""
    first = operands[0]
    if not accepts(first.dtype):
        raise DTypeError(name, f"{first} is not {_ACCEPTED[accepts]}", "Cast the operand first.")
    for other in operands[1:]:
        if other.shape != first.shape:
            raise ShapeError(name, f"shapes differ: {first} and {other}", "Broadcast one of them.")
        if other.dtype is not first.dtype:
            raise DTypeError(name, f"dtypes differ: {first} and {other}", "Cast one of them.")
    return first


def _row(
    name: str,
    rule: TypeRule,
    error: ErrorBound,
    domain: str = "",
    subgradient: str = "",
    precision: Precision = Precision.FOLLOW,
) -> Op:
    determinism = Determinism.EVERYWHERE if isinstance(error, Exact) else Determinism.PER_BACKEND
    contract = Contract(
        error,
        domain or Contract(error).domain,
        subgradient or Contract(error).subgradient,
        determinism,
    )
    return declare(Op(name, NoAttributes, rule, precision, contract))


def _unary(name: str, accepts: Accepts) -> TypeRule:
    def infer(x: TensorType) -> Types:
        return (_same(name, accepts, (x,)),)

    return infer


def _binary(name: str, accepts: Accepts) -> TypeRule:
    def infer(x: TensorType, y: TensorType) -> Types:
        return (_same(name, accepts, (x, y)),)

    return infer


def _comparison(name: str, accepts: Accepts) -> TypeRule:
    def infer(x: TensorType, y: TensorType) -> Types:
        return (_same(name, accepts, (x, y)).with_dtype(dtypes.bool_),)

    return infer


_NO_GRADIENT = "zero everywhere"
_WRAPS = "all values; integers wrap"

NEG = _row("neg", _unary("neg", _number), Exact(), _WRAPS)
ABS = _row("abs", _unary("abs", _number), Exact(), _WRAPS, "0 at 0")
SIGN = _row("sign", _unary("sign", _number), Exact(), "all values; NaN gives NaN", _NO_GRADIENT)
FLOOR = _row("floor", _unary("floor", _float), Exact(), "", _NO_GRADIENT)
EXP = _row("exp", _unary("exp", _float), Ulps(4), "", "", Precision.WIDEN)
LOG = _row(
    "log",
    _unary("log", _float),
    Ulps(4),
    "x ≥ 0; log 0 = −∞; NaN below",
    "1/x, +∞ at 0",
    Precision.WIDEN,
)
SQRT = _row("sqrt", _unary("sqrt", _float), Ulps(1), "x ≥ 0; NaN below", "+∞ at 0")
RSQRT = _row(
    "rsqrt",
    _unary("rsqrt", _float),
    Ulps(4),
    "x ≥ 0; +∞ at 0; NaN below",
    "−∞ at 0",
    Precision.WIDEN,
)
SIN = _row("sin", _unary("sin", _float), Ulps(4), "finite x; NaN at ±∞", "", Precision.WIDEN)
COS = _row("cos", _unary("cos", _float), Ulps(4), "finite x; NaN at ±∞", "", Precision.WIDEN)
TANH = _row("tanh", _unary("tanh", _float), Ulps(4))
ERF = _row("erf", _unary("erf", _float), Ulps(4))
NOT = _row(
    "not", _unary("not", _discrete), Exact(), "bool: logical; integers: bitwise", _NO_GRADIENT
)
STOP_GRADIENT = _row(
    "stop_gradient", _unary("stop_gradient", _any), Exact(), "", "zero by definition"
)

ADD = _row("add", _binary("add", _number), Ulps(0.5), _WRAPS)
SUB = _row("sub", _binary("sub", _number), Ulps(0.5), _WRAPS)
MUL = _row("mul", _binary("mul", _number), Ulps(0.5), _WRAPS)
DIV = _row("div", _binary("div", _float), Ulps(1), "y ≠ 0; IEEE 754 at 0")
FLOORDIV = _row(
    "floordiv",
    _binary("floordiv", _number),
    Exact(),
    "y ≠ 0 for integers (0 there); rounds down",
    _NO_GRADIENT,
)
MOD = _row(
    "mod",
    _binary("mod", _number),
    Ulps(1),
    "y ≠ 0 for integers (0 there); sign of y",
    "1 and −⌊x/y⌋",
)
MAX = _row(
    "max", _binary("max", _number), Exact(), "NaN if either is", "half to each side at a tie"
)
MIN = _row(
    "min", _binary("min", _number), Exact(), "NaN if either is", "half to each side at a tie"
)
POW = _row(
    "pow",
    _binary("pow", _float),
    Ulps(8),
    "x ≥ 0, or integer y; pow(x, 0) = 1",
    "base: 0 where y = 0; exponent: 0 where x = 0 and y ≥ 0",
    Precision.WIDEN,
)
ATAN2 = _row(
    "atan2",
    _binary("atan2", _float),
    Ulps(4),
    "all values; zeros and infinities as in C",
    "0 at the origin",
    Precision.WIDEN,
)
EQ = _row("eq", _comparison("eq", _any), Exact(), "NaN equals nothing", _NO_GRADIENT)
LT = _row("lt", _comparison("lt", _number), Exact(), "false with NaN", _NO_GRADIENT)
LE = _row("le", _comparison("le", _number), Exact(), "false with NaN", _NO_GRADIENT)
AND = _row(
    "and", _binary("and", _discrete), Exact(), "bool: logical; integers: bitwise", _NO_GRADIENT
)
OR = _row("or", _binary("or", _discrete), Exact(), "bool: logical; integers: bitwise", _NO_GRADIENT)
XOR = _row(
    "xor", _binary("xor", _discrete), Exact(), "bool: logical; integers: bitwise", _NO_GRADIENT
)


def _where_type(condition: TensorType, x: TensorType, y: TensorType) -> Types:
    if condition.dtype is not dtypes.bool_:
        raise DTypeError(
            "where", f"the condition is {condition}, not bool", "Compare, or cast to bool."
        )
    result = _same("where", _any, (x, y))
    if condition.shape != result.shape:
        raise ShapeError(
            "where", f"the condition is {condition}, the branches {result}", "Broadcast it."
        )
    return (result,)


WHERE = _row(
    "where",
    _where_type,
    Exact(),
    "the branch not taken is ignored, NaN too",
    "ct to the branch taken",
)


@dataclass(frozen=True, slots=True)
class Cast(Attributes):
    """Another dtype. Float to integer truncates; to bool asks ≠ 0."""

    dtype: DType


def _cast_type(attributes: Cast, x: TensorType) -> Types:
    return (x.with_dtype(attributes.dtype),)


CAST = declare(
    Op(
        "cast",
        Cast,
        _cast_type,
        Precision.FOLLOW,
        Contract(
            Ulps(0.5),
            "floats round to nearest even; float to integer truncates, ends at the least and "
            "greatest integer, and makes NaN 0",
            "between floats: the cotangent is cast back; zero through integers and bool",
            Determinism.EVERYWHERE,
        ),
    )
)
