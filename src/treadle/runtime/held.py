"""Arrays as a session holds them: of the device's dtype, from a cache line on."""

from __future__ import annotations

import numpy as np

ALIGNMENT = 64


def is_one_number(array: np.ndarray) -> bool:
    """Whether all elements are the same memory: a number seen as an array."""
    return array.size > 1 and not any(array.strides)


def as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array itself, or its numbers in another dtype; one number stays one number."""
    if is_one_number(array):
        return np.broadcast_to(array[(0,) * array.ndim].astype(dtype), array.shape)
    return np.asarray(array).astype(dtype, copy=False)


def aligned(nbytes: int) -> np.ndarray:
    """Bytes that start at a cache line."""
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a cache line, of the same shape."""
    memory = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
    if not (is_one_number(array) and not any(array[(0,) * array.ndim].tobytes())):
        memory[...] = array  # pages of zeros are given out where they are first written
    return memory
