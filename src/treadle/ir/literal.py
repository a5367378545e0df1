"""Exact constants: numbers that are not rounded until they are lowered, and frozen arrays."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np

from treadle.base import dtypes
from treadle.base.arrays import rounded
from treadle.base.dtypes import DType

Number = bool | int | float | Fraction


class ArrayLiteral:
    """A frozen array that compares and hashes by content."""

    __slots__ = ("_key", "array")

    def __init__(self, array: np.ndarray):
        frozen = np.array(array, order="C", copy=True)
        frozen.flags.writeable = False
        self.array = frozen
        digest = hashlib.blake2b(frozen.tobytes(), digest_size=16).hexdigest()
        self._key = (frozen.dtype.str, frozen.dtype.name, frozen.shape, digest)

    @property
    def dtype(self) -> DType:
        found = dtypes.from_numpy(self.array.dtype)
        assert found is not None
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayLiteral) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"ArrayLiteral({self.array.dtype.name}{list(self.array.shape)})"


def number_key(value: Number) -> str:
    """Tells apart what == confuses (0.0 and -0.0, 1 and True) and equates NaN with itself."""
    return f"{type(value).__name__}:{value!r}"


def to_numpy(value: Number | ArrayLiteral, dtype: np.dtype[np.generic]) -> np.ndarray:
    """The constant rounded to a NumPy dtype, as an array of its own shape."""
    if isinstance(value, ArrayLiteral):
        return rounded(value.array, dtype)
    if isinstance(value, Fraction):
        value = value.numerator / value.denominator
    if isinstance(value, int) and dtype.kind in "iu":
        value = value % 2 ** (8 * dtype.itemsize)
        return np.array(value, np.uint64).astype(dtype)
    return rounded(np.array(value), dtype)
