"""Elementwise ops, conversions and numbers as WGSL expressions.

Values of every dtype are 32 bits wide in registers and in memory. Narrow floats are float32 that
are rounded after every op, 8-bit integers wrap after every op, and a bool is 0 or 1 in memory.
Kernels count elements in int64, which 32 bits hold here; no tensor of a graph is int64.
"""

from __future__ import annotations

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import DTypeError
from treadle.codegen.c_like.scalars import ARITHMETIC, BITS, COMPARISONS, decimal, infix, single
from treadle.ir.literal import to_numpy
from treadle.kernel.nodes import Literal

_REGISTERS = {
    "float32": "f32",
    "bfloat16": "f32",
    "float16": "f32",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i32",
    "int8": "i32",
    "uint8": "u32",
    "bool": "bool",
}
SUPPORTED = frozenset(_REGISTERS)


def register(dtype: DType) -> str:
    """The type that values of a dtype have in registers."""
    if dtype.name not in SUPPORTED:
        raise DTypeError(
            "webgpu",
            f"WGSL has no {dtype}",
            'Use float32 and int32 there, or device="cpu".',
        )
    return _REGISTERS[dtype.name]


def memory(dtype: DType) -> str:
    """The type of a group's or a thread's own memory."""
    return "u32" if dtype is dtypes.bool_ else register(dtype)


def loaded(text: str, dtype: DType) -> str:
    """A word of an arena as a value."""
    if dtype is dtypes.bool_:
        return f"({text} != 0u)"
    type_ = register(dtype)
    return text if type_ == "u32" else f"bitcast<{type_}>({text})"


def stored(text: str, dtype: DType) -> str:
    """A value as a word of an arena."""
    if dtype is dtypes.bool_:
        return f"select(0u, 1u, {text})"
    return text if register(dtype) == "u32" else f"bitcast<u32>({text})"


def literal(value: Literal) -> str:
    """A number, exactly as its dtype rounds it."""
    type_ = register(value.dtype)
    if type_ != "f32":
        found = to_numpy(value.value, value.dtype.numpy)
        return str(bool(found)).lower() if type_ == "bool" else f"{type_}({int(found)})"
    number = single(value)
    size, ends = abs(float(number)), np.finfo(np.float32)
    is_tiny = size < float(ends.tiny) and number.tobytes() != bytes(4)
    # WGSL has no text for it; that of the largest number is rounded beyond it.
    if not np.isfinite(number) or is_tiny or size == float(ends.max):
        return f"number({hex(int(number.view(np.uint32)))}u)"
    return decimal(number)


FMA = "fma"
_SIGNS = ARITHMETIC | COMPARISONS
_LOGIC = BITS | {"xor": "!=", "eq": "=="}


def apply(op: str, x: list[str], operand: DType, dtype: DType, exceeds: bool = False) -> str:
    """One op on expressions; `operand` is the dtype of the last of them.

    A narrow float in excess precision is left as exact as it is computed.
    """
    if op == "where":
        return f"select({x[2]}, {x[1]}, {x[0]})"
    if operand is dtypes.bool_:
        return f"(!{x[0]})" if op == "not" else infix(_LOGIC, op, x)
    found = _float(op, x) if operand.is_float else _integer(op, x, operand)
    is_exact = op in COMPARISONS or (exceeds and dtype.is_narrow)
    return found if is_exact else rounded(found, dtype)


def rounded(text: str, dtype: DType) -> str:
    """A number held to what its dtype can hold."""
    if dtype.is_narrow:
        return f"round_{dtype.name}({text})"
    return f"wrap_{dtype.name}({text})" if dtype.bits == 8 else text


def _float(op: str, x: list[str]) -> str:
    if op == "eq" and x[0] == x[1]:
        return f"(!is_nan({x[0]}))"  # compilers may say that a number is itself
    if (op == "mul" and "0.0f" in x) or (op == "sub" and x[0] == x[1]):
        x = [x[0], f"kept({x[1]})"]
    if op in _SIGNS:
        return infix(_SIGNS, op, x)
    if op == "neg":
        return f"(-{x[0]})"
    return f"{op}({x[0]})" if op in ("abs", "floor") else f"f_{op}({', '.join(x)})"


def _integer(op: str, x: list[str], operand: DType) -> str:
    if op in _SIGNS or op in BITS:
        return infix(_SIGNS | BITS, op, x)
    type_, given = register(operand), ", ".join(x)
    if op in ("max", "min", "abs", "mulhi"):
        return f"{op}({given})"
    match op:
        case "neg":
            return f"({type_}(0) - {given})"
        case "not":
            return f"(~{given})"
        case "sign" | "floordiv" | "mod":
            return f"{type_}_{op}({given})"
    raise AssertionError(op)


def convert(text: str, source: DType, target: DType) -> str:
    """Another dtype: floats round, float to integer is cut off, to bool asks ≠ 0."""
    if source is target:
        return text
    own, wanted = register(source), register(target)
    if target is dtypes.bool_:
        return f"({text} != {own}(0))"
    if source is dtypes.bool_:
        return f"select({wanted}(0), {wanted}(1), {text})"
    if target.is_float:
        return rounded(text if own == "f32" else f"f32({text})", target)
    if source.is_float:
        low, high = target.range()
        limits = f", {wanted}({low}), {wanted}({high})" if target.bits == 8 else ""
        found = f"f_to_{wanted}({text})"
        return f"clamp({found}{limits})" if limits else found
    if target is dtypes.int64 and own == "u32":
        return f"i32(min({text}, 2147483647u))"  # beyond every axis, as it is
    return rounded(text if own == wanted else f"{wanted}({text})", target)
