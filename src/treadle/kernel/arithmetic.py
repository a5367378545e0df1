"""Facts about ops on numbers that stages share."""

from __future__ import annotations

from treadle.kernel.nodes import Accumulate

# What a small change of an operand changes little: inside it, narrow floats need no rounding.
SMOOTH = frozenset("add sub mul div neg abs sqrt rsqrt exp log sin cos tanh erf pow".split())


def identity(s: Accumulate) -> float | int:
    """What an accumulation starts from: the number that changes nothing."""
    if s.op in ("add", "mul"):
        return int(s.op == "mul")
    if s.value.dtype.is_float:
        return float("-inf") if s.op == "max" else float("inf")
    return s.value.dtype.range()[s.op == "min"]
