"""The type of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, DTypeError
from treadle.base.quick import quick
from treadle.base.shapes import Shape, size_of


@quick
@dataclass(frozen=True, slots=True)
class TensorType:
    """A static shape and an element type: `td.Spec((128, 784))`, `td.Spec((128,), td.int32)`."""

    shape: Shape
    dtype: DType = dtypes.float32

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple or not all(type(n) is int and n >= 0 for n in self.shape):
            object.__setattr__(self, "shape", _checked_shape(self.shape))
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", as_dtype(self.dtype))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return size_of(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_float(self) -> bool:
        return self.dtype.kind == "float"

    def with_shape(self, shape: Shape) -> TensorType:
        return TensorType(shape, self.dtype)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(self.shape, dtype)

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"

    __repr__ = __str__


Spec = TensorType  # the public name


def _checked_shape(shape: object) -> Shape:
    remedy = "A shape is a tuple of integers that are not negative, like (128, 784)."
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
    if not isinstance(sizes, Iterable):
        raise ArgumentError("Spec", f"shape is {shape!r}", remedy)
    result = []
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
            raise ArgumentError("Spec", f"shape {shape!r} has the size {n!r}", remedy)
        result.append(int(n))
    return tuple(result)


def as_dtype(dtype: object) -> DType:
    """A DType from one, its name, a NumPy dtype or a Python type."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtype in dtypes.BY_NAME:
        return dtypes.BY_NAME[dtype]
    python = {float: dtypes.float32, int: dtypes.int32, bool: dtypes.bool_}
    if isinstance(dtype, type) and dtype in python:
        return python[dtype]
    try:
        found = dtypes.from_numpy(np.dtype(dtype))  # type: ignore[call-overload]
    except TypeError:
        found = None
    if found is None:
        names = ", ".join(dtypes.BY_NAME)
        raise DTypeError(
            "dtype", f"{dtype!r} is not an element type of Treadle", f"There are: {names}."
        )
    return found
