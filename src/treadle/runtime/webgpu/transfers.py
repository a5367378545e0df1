"""Results on their way back: copied where the host can map them, and mapped when looked at."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from treadle.base.words import WORD, from_words
from treadle.ir.types import TensorType
from treadle.runtime.webgpu.device import device


class Returns:
    """Memory that the host can map, of one size, used again when it was looked at or dropped."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._free: list[Any] = []

    def take(self) -> Pending:
        return Pending(self, self._free.pop() if self._free else device().staging(self.nbytes))

    def give(self, buffer: Any) -> None:
        self._free.append(buffer)


class Pending:
    """Results of one run."""

    def __init__(self, returns: Returns, buffer: Any):
        self._returns, self.buffer = returns, buffer
        self._kept: np.ndarray | None = None
        self._lock = threading.Lock()

    def words(self) -> np.ndarray:
        with self._lock:
            if self._kept is None:
                self._kept = device().mapped(self.buffer)
                self._returns.give(self.buffer)
                self.buffer = None
            return self._kept

    def __del__(self) -> None:
        if getattr(self, "buffer", None) is not None:
            self._returns.give(self.buffer)


class Later:
    """An output that is waited for when it is looked at."""

    __slots__ = ("_halves", "_offset", "_pending", "_type")

    def __init__(self, pending: Pending, offset: int, type_: TensorType, halves: bool):
        self._pending, self._offset, self._type, self._halves = pending, offset, type_, halves

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        type_, start = self._type, self._offset // WORD
        words = self._pending.words()[start : start + type_.size]
        array = from_words(words, type_.shape, type_.dtype.numpy, self._halves)
        return array if dtype is None else array.astype(dtype)

    def __float__(self) -> float:
        return float(self.__array__())

    def __bool__(self) -> bool:
        return bool(self.__array__())
