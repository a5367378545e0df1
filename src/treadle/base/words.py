"""Arrays as words of four bytes, as WebGPU's arenas hold every element.

With `halves` float16 is what it is, two elements to a word.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.base.errors import DTypeError

WORD = 4


def is_half(dtype: np.dtype[Any], halves: bool) -> bool:
    return halves and dtype == np.float16


def nbytes_of(size: int, dtype: np.dtype[Any], halves: bool = False) -> int:
    """Of so many elements, in whole words."""
    return -(-size // 2) * WORD if is_half(dtype, halves) else size * WORD


def as_words(array: np.ndarray, halves: bool = False) -> np.ndarray:
    """An array's elements, each in a word: narrow floats as float32, bools and bytes widened."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if is_half(flat.dtype, halves):
        return np.pad(flat, (0, flat.size % 2)).view(np.uint32)
    if flat.dtype.kind in "iu" and flat.dtype.itemsize > WORD:
        _refuse_beyond(flat)
    if flat.dtype.itemsize == WORD:
        return flat.view(np.uint32)
    if flat.dtype.kind in "bu":
        return flat.astype(np.uint32)
    if flat.dtype.kind == "i":
        return flat.astype(np.int32).view(np.uint32)
    return flat.astype(np.float32).view(np.uint32)


def _refuse_beyond(array: np.ndarray) -> None:
    least, most = (int(f(initial=0)) for f in (array.min, array.max))
    if least < -(2**31) or most >= 2**31:
        raise DTypeError(
            "webgpu", f"{array.dtype} from {least} to {most} does not fit 32 bits", "Use int32."
        )


def from_words(
    words: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any], halves: bool = False
) -> np.ndarray:
    """What was made words of, as an array of its dtype."""
    size = int(np.prod(shape, dtype=np.int64))
    if is_half(dtype, halves):
        return words.view(dtype)[:size].reshape(shape).copy()
    flat = words.view(np.uint32)[:size]
    if dtype.itemsize == WORD:
        return flat.view(dtype).reshape(shape).copy()
    if dtype.kind == "b":
        return (flat != 0).reshape(shape)
    kind = np.uint32 if dtype.kind == "u" else np.int32 if dtype.kind == "i" else np.float32
    return flat.view(kind).astype(dtype).reshape(shape)
