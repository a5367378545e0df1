"""Facts about ops on numbers that stages share."""

from __future__ import annotations

from treadle.base.dtypes import DType

# What a small change of an operand changes little: inside it, narrow floats need no rounding.
SMOOTH = frozenset("add sub mul div neg abs sqrt rsqrt exp log sin cos tanh erf pow".split())


def identity(op: str, dtype: DType) -> float | int:
    """What an accumulation (add, mul, max, min) starts from: the number that changes nothing."""
    if op in ("add", "mul"):
        return int(op == "mul")
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    return dtype.range()[op == "min"]
