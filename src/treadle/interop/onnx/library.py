"""The library `onnx`, imported when something is first read or written; element types."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError

# TensorProto.DataType, which files have as numbers.
CODES = {
    dtypes.float32: 1,
    dtypes.uint8: 2,
    dtypes.int8: 3,
    dtypes.int32: 6,
    dtypes.int64: 7,
    dtypes.bool_: 9,
    dtypes.float16: 10,
    dtypes.float64: 11,
    dtypes.uint32: 12,
    dtypes.bfloat16: 16,
}
DTYPES = {code: dtype for dtype, code in CODES.items()}

# What files may hold and Treadle has no dtype for is held in the next wider one.
STORED: dict[int, np.dtype[Any]] = {
    **{code: dtype.numpy for code, dtype in DTYPES.items()},
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    13: np.dtype(np.uint64),
}
WIDENED: dict[int, DType] = {4: dtypes.int32, 5: dtypes.int32, 13: dtypes.int64}


@cache
def library() -> Any:
    """The module `onnx`."""
    try:
        import onnx
        import onnx.checker
        import onnx.defs
        import onnx.helper
    except ImportError as error:
        cause = f"the package onnx is not installed: {error}"
        raise ArgumentError("onnx", cause, 'pip install "treadle[onnx]".') from error
    return onnx


def held_dtype(code: int) -> DType | None:
    """The dtype that values of a file's element type have here; None where there is none."""
    return DTYPES.get(code) or WIDENED.get(code)
