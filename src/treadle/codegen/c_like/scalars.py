"""What a dialect says of numbers, and the signs that all of them have."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.literal import to_numpy
from treadle.kernel.arithmetic import identity
from treadle.kernel.nodes import Literal

ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
COMPARISONS = {"eq": "==", "lt": "<", "le": "<="}
BITS = {"and": "&", "or": "|", "xor": "^"}


class Scalars(Protocol):
    """Numbers of a dialect: its module `scalars`."""

    FMA: str  # a · b + c, rounded once

    def register(self, dtype: DType, /) -> str:
        """The type that values of a dtype have in registers."""
        ...

    def literal(self, value: Literal, /) -> str: ...

    def apply(
        self, op: str, x: list[str], operand: DType, dtype: DType, exceeds: bool = False, /
    ) -> str: ...

    def convert(self, text: str, source: DType, target: DType, /) -> str: ...


def infix(signs: dict[str, str], op: str, x: list[str]) -> str:
    return f"({x[0]} {signs[op]} {x[1]})"


def single(value: Literal) -> np.ndarray:
    """A number as its dtype rounds it, in float32."""
    return np.asarray(to_numpy(value.value, value.dtype.numpy)).astype(np.float32)


def unrounded(value: Literal) -> Literal:
    """A narrow number as exact as float32 has it, unless its dtype makes it infinite."""
    is_exact = value.dtype.is_narrow and bool(np.isfinite(single(value)))
    return replace(value, dtype=dtypes.float32) if is_exact else value


def decimal(number: np.ndarray) -> str:
    """A finite float32 as text that gives it exactly."""
    return f"{float(str(number))!r}f"


def nothing(scalars: Scalars, op: str, dtype: DType) -> str:
    """What an accumulation starts from."""
    return scalars.literal(Literal(identity(op, dtype), dtype))
