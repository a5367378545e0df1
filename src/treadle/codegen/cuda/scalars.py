"""Elementwise ops, conversions and numbers as C++ expressions."""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.c_like.scalars import ARITHMETIC, BITS, COMPARISONS, decimal, infix, single
from treadle.ir.literal import to_numpy
from treadle.kernel.nodes import Literal

_REGISTERS = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "f32",
    "float16": "f32",
    "float8_e4m3": "f32",
    "float8_e5m2": "f32",
    "int64": "i64",
    "int32": "i32",
    "uint32": "u32",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}
_MEMORY = _REGISTERS | {"bfloat16": "bf16", "float16": "f16", "bool": "b1"}
_MEMORY |= {"float8_e4m3": "e4m3", "float8_e5m2": "e5m2"}


def register(dtype: DType) -> str:
    """The type that values of a dtype have in registers."""
    return _REGISTERS[dtype.name]


def memory(dtype: DType) -> str:
    return _MEMORY[dtype.name]


def literal(value: Literal) -> str:
    """A number, exactly as its dtype rounds it."""
    found = to_numpy(value.value, value.dtype.numpy)
    if value.dtype is dtypes.bool_:
        return "true" if bool(found) else "false"
    if not value.dtype.is_float:
        return f"({register(value.dtype)}){int(found)}ll"
    if value.dtype is dtypes.float64:
        wide = float(found)
        return repr(wide) if math.isfinite(wide) else f"bits64({_bits(found, np.uint64)}ull)"
    number = single(value)
    return decimal(number) if np.isfinite(number) else f"bits32({_bits(number, np.uint32)}u)"


def _bits(value: np.ndarray, like: type) -> str:
    return hex(int(np.asarray(value).view(like)))


def rounded(text: str, dtype: DType) -> str:
    """A float held to what a narrow dtype can hold."""
    return f"round_{memory(dtype)}({text})" if dtype.is_narrow else text


FMA = "t_fma"
_FLOAT = ARITHMETIC | COMPARISONS
_NAMED = frozenset(
    "abs sign floor sqrt rsqrt exp log sin cos tanh erf pow atan2 max min div".split()
)
_WRAPPING = ARITHMETIC | BITS
_LOGIC = {"and": "&&", "or": "||", "xor": "!=", "eq": "=="}


def apply(op: str, x: list[str], operand: DType, dtype: DType, exceeds: bool = False) -> str:
    """One op on expressions; `operand` is the dtype of the last of them.

    A result in excess precision is left as exact as it is computed.
    """
    if op == "where":
        return f"({x[0]} ? {x[1]} : {x[2]})"
    if operand.is_float:
        found = _float(op, x, operand)
        return found if exceeds else rounded(found, dtype)
    if operand is dtypes.bool_:
        return f"(!{x[0]})" if op == "not" else infix(_LOGIC, op, x)
    return _integer(op, x, operand)


def _float(op: str, x: list[str], operand: DType) -> str:
    if op in _FLOAT:
        return infix(_FLOAT, op, x)
    if op == "neg":
        return f"(-{x[0]})"
    if op in ("floordiv", "mod"):
        name = "f_div" if op == "floordiv" else "f_mod"
        return f"{name}<{register(operand)}>({x[0]}, {x[1]})"
    if op == "div" and operand is dtypes.float32 and _is_plain(x[1]):
        return f"c_div({x[0]}, {x[1]})"
    assert op in _NAMED, op
    prefix = "n" if operand.is_narrow and op in ("exp", "tanh", "erf", "div") else "t"
    return f"{prefix}_{op}({', '.join(x)})"


def _is_plain(text: str) -> bool:
    """Whether an expression is a number of ordinary size."""
    try:
        return 1e-30 < abs(float(text.removesuffix("f"))) < 1e30
    except ValueError:
        return False


def _integer(op: str, x: list[str], operand: DType) -> str:
    type_ = register(operand)
    if op in COMPARISONS:
        return infix(COMPARISONS, op, x)
    if op in _WRAPPING:
        # Signed numbers wrap: the sum of unsigned ones has the same bits.
        return f"(({type_})((u64){x[0]} {_WRAPPING[op]} (u64){x[1]}))"
    match op:
        case "neg":
            return f"(({type_})(0ull - (u64){x[0]}))"
        case "not":
            return f"(({type_})~{x[0]})"
        case "mulhi":
            return f"__umulhi({x[0]}, {x[1]})"
        case "floordiv" | "mod":
            name = "i_div" if op == "floordiv" else "i_mod"
            return f"{name}<{type_}>({x[0]}, {x[1]})"
    assert op in ("abs", "sign", "max", "min"), op
    return f"t_{op}<{type_}>({', '.join(x)})" if op in ("max", "min") else f"t_{op}({x[0]})"


def convert(text: str, source: DType, target: DType) -> str:
    """Another dtype: floats round, float to integer is cut off, to bool asks ≠ 0."""
    if source is target:
        return text
    if target is dtypes.bool_:
        return f"({text} != 0)"
    if target.is_float:
        plain = f"({register(target)})({text})"
        return rounded(plain, target)
    type_ = register(target)
    if source.is_float:
        if target is dtypes.int64:
            return f"to_i64({text})"
        low, high = target.range()
        return f"(({type_})cut({text}, {low}ll, {high}ll))"
    return f"(({type_})({text}))"
