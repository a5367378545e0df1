"""Element types and how they combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

Kind = Literal["float", "int", "uint", "bool"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. Compare with `is` or `==`; there is one object per type."""

    name: str
    kind: Kind
    bits: int
    fraction_bits: int = 0

    def __hash__(self) -> int:
        return hash(self.name)  # which a string keeps

    def __deepcopy__(self, memo: object) -> DType:
        return self  # there is one object per type

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_narrow(self) -> bool:
        """A float with fewer bits than float32: arithmetic on it accumulates in float32."""
        return self.is_float and self.bits < 32

    @property
    def itemsize(self) -> int:
        return (self.bits + 7) // 8

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return _NUMPY[self.name]

    @property
    def unit_roundoff(self) -> float:
        """Half the distance from 1 to the next number: the u of every error bound."""
        assert self.is_float, self
        return 2.0 ** -(self.fraction_bits + 1)

    @property
    def largest(self) -> float:
        """The largest finite float."""
        return _LARGEST[self.name]

    def range(self) -> tuple[int, int]:
        """The smallest and largest integer this type holds."""
        if self.kind == "bool":
            return 0, 1
        assert self.is_integer, self
        return (
            (0, 2**self.bits - 1)
            if self.kind == "uint"
            else (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
        )

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name


float64 = DType("float64", "float", 64, 52)
float32 = DType("float32", "float", 32, 23)
bfloat16 = DType("bfloat16", "float", 16, 7)
float16 = DType("float16", "float", 16, 10)
int64 = DType("int64", "int", 64)
int32 = DType("int32", "int", 32)
uint32 = DType("uint32", "uint", 32)
int8 = DType("int8", "int", 8)
uint8 = DType("uint8", "uint", 8)
bool_ = DType("bool", "bool", 1)
# What float8 products read. Only graphs have them: no input, parameter or result is one.
float8_e4m3 = DType("float8_e4m3", "float", 8, 3)  # values: no infinity, NaN where e5m2 has it
float8_e5m2 = DType("float8_e5m2", "float", 8, 2)  # gradients

ALL = (float64, float32, bfloat16, float16, int64, int32, uint32, int8, uint8, bool_)
FLOATS = tuple(d for d in ALL if d.is_float)
INTEGERS = tuple(d for d in ALL if d.is_integer)
FLOAT8 = (float8_e4m3, float8_e5m2)
BY_NAME = {d.name: d for d in ALL}
EVERY = BY_NAME | {d.name: d for d in FLOAT8}  # of graphs and plans

_NUMPY: dict[str, np.dtype[np.generic]] = {
    d.name: np.dtype(ml_dtypes.bfloat16 if d is bfloat16 else d.name) for d in ALL
}
_FROM_NUMPY = {n: BY_NAME[name] for name, n in _NUMPY.items()}
_NUMPY[float8_e4m3.name] = np.dtype(ml_dtypes.float8_e4m3fn)
_NUMPY[float8_e5m2.name] = np.dtype(ml_dtypes.float8_e5m2)
_EVERY_FROM_NUMPY = {n: EVERY[name] for name, n in _NUMPY.items()}
_LARGEST = {d.name: float(ml_dtypes.finfo(_NUMPY[d.name]).max) for d in (*FLOATS, *FLOAT8)}  # type: ignore[no-untyped-call]

# The result of combining two kinds of the same class that differ in width or sign.
_INTEGER_RANK = {"bool": 0, "uint8": 1, "int8": 1, "int32": 2, "uint32": 2, "int64": 3}


def from_numpy(dtype: np.dtype[np.generic]) -> DType | None:
    """The DType of a NumPy dtype, or None where Treadle has none (int16, complex, objects)."""
    return _FROM_NUMPY.get(dtype.newbyteorder("="))


def of_memory(dtype: np.dtype[np.generic]) -> DType:
    """The DType of arrays that a program reads, float8 included; KeyError if there is none."""
    return _EVERY_FROM_NUMPY[dtype]


def promote(a: DType, b: DType) -> DType:
    """The dtype that holds a result of `a` and `b`, as PyTorch chooses it.

    Differences, because some of its types are missing here: uint8 with int8 gives int32, and
    uint32 with a signed type gives int64.
    """
    if a is b:
        return a
    if a.is_float or b.is_float:
        return _promote_floats(a, b)
    if _INTEGER_RANK[a.name] != _INTEGER_RANK[b.name]:
        low, high = sorted((a, b), key=lambda d: _INTEGER_RANK[d.name])
        loses_sign = high is uint32 and low is int8
        return int64 if loses_sign else high
    return int32 if a.bits == 8 else int64


def _promote_floats(a: DType, b: DType) -> DType:
    if not b.is_float:
        return a
    if not a.is_float:
        return b
    if a.bits == b.bits:
        return float32  # bfloat16 with float16: neither holds the other
    return a if a.bits > b.bits else b


def accumulator(dtype: DType) -> DType:
    """The dtype sums of `dtype` are held in while they are computed."""
    return float32 if dtype.is_narrow else dtype


def narrowed(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Floats as a cast gives them: to nearest even; those of 8 bits saturate and keep NaN."""
    held = np.clip(array, -dtype.largest, dtype.largest) if dtype in FLOAT8 else array
    return held.astype(dtype.numpy)
