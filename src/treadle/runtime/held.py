"""Arrays as a session holds them: of the device's dtype, from a cache line on."""

from __future__ import annotations

import mmap

import numpy as np

ALIGNMENT = 64
# Bytes of a block, of the least array that shares one, and of arrays that need none: NumPy asks for
# large pages from there on. Weights of 1 MB each were read at 15 to 19 GB/s by one core, at 20 to
# 28 in a block (docs/decisions.md, "Values that are written together lie together").
BLOCK, LEAST, LARGE = 32 << 20, 1 << 16, 4 << 20


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


class Pages:
    """Memory at addresses that stay, whose pages go back to the system when they are given back.

    They are read as zeros then, and are there again when something is written.
    """

    def __init__(self, nbytes: int):
        private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
        self._map = mmap.mmap(-1, max(1, nbytes), **({"flags": private} if private else {}))
        self._advise("MADV_HUGEPAGE")
        self._memory = np.frombuffer(self._map, np.uint8)

    def array(self, start: int, nbytes: int) -> np.ndarray:
        """Some of the bytes."""
        return self._memory[start : start + nbytes]

    def give_back(self) -> None:
        self._advise("MADV_DONTNEED")

    def _advise(self, name: str) -> None:
        advice = getattr(mmap, name, None)  # Linux has it; elsewhere the memory stays
        if advice is not None:
            self._map.madvise(advice)


class Room:
    """Memory for arrays that are written together: side by side in blocks of large pages.

    A block is given back when none of its arrays is there any more.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy that starts at a cache line; small and large ones are by themselves."""
        if is_one_number(array) or not LEAST <= array.nbytes < LARGE:
            return aligned_copy(array)
        taken = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if self._left.nbytes < taken:
            memory = np.empty(BLOCK, np.uint8)
            self._left = memory[-memory.ctypes.data % ALIGNMENT :]
        found = self._left[: array.nbytes].view(array.dtype).reshape(array.shape)
        self._left = self._left[taken:]
        found[...] = array
        return found
