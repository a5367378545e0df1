"""The library `onnx`, imported when something is first read or written; element types."""

from __future__ import annotations

from functools import cache
from typing import Any

from treadle.base import dtypes
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


def element_type(code: int) -> str:
    """The name of a file's element type."""
    names = library().TensorProto.DataType
    return str(names.Name(code)) if code in names.values() else str(code)
