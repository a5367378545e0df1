"""The ops by which values are accumulated: add, mul, max and min."""

from __future__ import annotations

from treadle.base.dtypes import DType


def identity(op: str, dtype: DType) -> float | int:
    """What accumulating starts from."""
    if op in ("add", "mul"):
        return int(op == "mul")
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    return dtype.range()[op == "min"]
