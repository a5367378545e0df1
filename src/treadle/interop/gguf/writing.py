"""Write a GGUF file, tensor by tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treadle.base.blocks import BLOCKS, encoded
from treadle.base.errors import ArgumentError
from treadle.interop.gguf.container import (
    ALIGNMENT,
    ARRAY,
    KINDS,
    MAGIC,
    MOST_AXES,
    NUMBERS,
    PLAIN,
    SIZES,
    STRING,
    Value,
)
from treadle.runtime.files import write_parts

VERSION = 3
WRITTEN = ("f32", "f16", "bf16", *(n for n, f in BLOCKS.items() if f.encode is not None))
LONGEST_NAME = 63  # bytes, llama.cpp's limit
KIND_OF = {np.dtype(dtype): kind for kind, dtype in KINDS.items()}
NUMBER_OF = {name: number for number, name in NUMBERS.items()}


@dataclass(frozen=True)
class _Tensor:
    name: str
    format: str
    array: np.ndarray

    @property
    def nbytes(self) -> int:
        size, nbytes = SIZES[self.format]
        return math.prod(self.array.shape) // size * nbytes

    def bytes(self) -> bytes:
        if self.format in BLOCKS:
            return encoded(self.format, self.array).tobytes()
        with np.errstate(over="ignore"):
            found = self.array.astype(PLAIN[self.format][1])
        is_float = not self.format.startswith("i")
        if is_float and (np.isinf(found) & np.isfinite(self.array)).any():
            cause = f"{self.name} has numbers that {self.format} does not hold"
            raise ArgumentError("save", cause, "Use f32 or bf16.")
        return found.tobytes()


def save(
    path: str | Path,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, Value] | None = None,
    *,
    dtype: str = "f32",
    formats: Mapping[str, str] | None = None,
) -> None:
    """Write arrays by name, floats in the format `dtype`, or as `formats` says of a name.

    As in files of llama.cpp, arrays of one axis are f32, and rows that are no whole blocks f16.
    """
    chosen = formats or {}
    tensors = [_tensor(n, np.asarray(a), chosen.get(n), dtype) for n, a in arrays.items()]
    header = _header(tensors, metadata or {})
    write_parts(path, lambda: _parts(header, tensors))


def _tensor(name: str, array: np.ndarray, chosen: str | None, dtype: str) -> _Tensor:
    for format_ in (dtype, *([chosen] if chosen else ())):
        if format_ not in WRITTEN:
            remedy = f"Written are: {', '.join(WRITTEN)}."
            raise ArgumentError("save", f"the format is {format_!r}", remedy)
    if len(name.encode()) > LONGEST_NAME or array.ndim > MOST_AXES:
        cause = f"{name[:100]!r} is {array.shape}; names have at most {LONGEST_NAME} bytes"
        raise ArgumentError("save", cause, f"Arrays have at most {MOST_AXES} axes.")
    if array.dtype.kind == "i":
        return _Tensor(name, f"i{8 * array.dtype.itemsize}", array)
    if array.dtype.kind != "f" and array.dtype != PLAIN["bf16"][1]:
        cause = f"{name} is an array of {array.dtype}"
        raise ArgumentError("save", cause, "Pass floats or signed integers.")
    return _Tensor(name, chosen or _fitting(array, dtype), array)


def _fitting(array: np.ndarray, dtype: str) -> str:
    if array.ndim < 2:
        return "f32"
    return "f16" if array.shape[-1] % SIZES[dtype][0] else dtype


def _parts(header: bytes, tensors: list[_Tensor]) -> Iterator[bytes]:
    yield header
    for tensor in tensors:
        found = tensor.bytes()
        yield found
        yield bytes(-len(found) % ALIGNMENT)


def _header(tensors: list[_Tensor], metadata: Mapping[str, Value]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(key, value)]
    at = 0
    for tensor in tensors:
        shape = tensor.array.shape[::-1]
        parts.append(_text(tensor.name) + struct.pack("<I", len(shape)))
        parts.append(struct.pack(f"<{len(shape)}Q", *shape))
        parts.append(struct.pack("<IQ", NUMBER_OF[tensor.format], at))
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    found = b"".join(parts)
    return found + bytes(-len(found) % ALIGNMENT)


def _text(text: str) -> bytes:
    found = text.encode()
    return struct.pack("<Q", len(found)) + found


def _value(key: str, value: Value) -> bytes:
    """The kind of a value, and the value: numbers in 32 bits where they fit, as readers expect."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value):
        head = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return head + b"".join(_text(str(v)) for v in value)
    array = np.asarray(value)
    narrow = _narrow(key, array)
    kind = struct.pack("<I", KIND_OF[narrow.dtype])
    if array.ndim == 0:
        return kind + narrow.tobytes()
    return struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(narrow)) + narrow.tobytes()


def _narrow(key: str, array: np.ndarray) -> np.ndarray:
    if array.ndim > 1 or array.dtype.kind not in "biuf":
        cause = f"{key} is {str(array)[:80]}, {array.dtype}"
        raise ArgumentError("save", cause, "Metadata are numbers, strings, or lists of either.")
    if array.dtype.kind == "f":
        return array.astype("<f4")
    if array.dtype.kind == "b":
        return array
    is_whole = array.ndim == 0 and array >= 0  # single numbers are counts: unsigned
    for dtype in ("<u4", "<u8") if is_whole else ("<i4", "<i8"):
        if (array.astype(dtype) == array).all():
            return array.astype(dtype)
    raise ArgumentError("save", f"{key} is {str(array)[:80]}", "Integers have 64 bits.")
