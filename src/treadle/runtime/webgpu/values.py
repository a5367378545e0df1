"""A session's values on the device: at fixed places, read back when they are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.words import as_words, from_words, nbytes_of
from treadle.runtime.memory import PlacedValues
from treadle.runtime.webgpu.device import device, padded


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Bytes of a buffer of the device."""

    buffer: Any
    start: int
    nbytes: int

    def read(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        here = device()
        words = here.read(self.buffer, self.start, self.nbytes)
        return from_words(words, shape, dtype, here.limits.has_f16)

    def write(self, array: np.ndarray) -> None:
        device().write(self.buffer, self.start, as_words(array, device().limits.has_f16))


def rooms(sizes: Mapping[str, int], what: str) -> dict[str, Room]:
    """Places for arrays by name, side by side in as few buffers as bindings allow."""
    found: dict[str, Room] = {}
    most, pending, taken = device().limits.binding_bytes, list[tuple[str, int, int]](), 0

    def close() -> None:
        if pending:
            buffer = device().buffer(taken, what)
            found.update({name: Room(buffer, at, size) for name, at, size in pending})

    for name, size in sizes.items():
        if taken + padded(size) > most and pending:
            close()
            pending, taken = [], 0
        pending.append((name, taken, size))
        taken += padded(size)
    close()
    return found


class DeviceValues(PlacedValues[Room]):
    """Arrays by name, each in a part of a buffer of the device."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self._places[name].read(*self._like[name])

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        self.update({name: value})

    def update(self, *values: Any, **more: Any) -> None:
        """Arrays that are written together lie together."""
        given = {n: np.asarray(a) for n, a in dict(*values, **more).items()}
        halves = device().limits.has_f16
        sizes = {n: nbytes_of(a.size, a.dtype, halves) for n, a in given.items()}
        known = {n: r.nbytes for n, r in self._places.items()}
        new = {n: size for n, size in sizes.items() if known.get(n) != size}
        if new:
            self._places |= rooms(new, "what a session holds")
            self.layout += 1
        for name, array in given.items():
            self._like[name] = array.shape, array.dtype
            self._places[name].write(array)

    def shared(self, name: str) -> np.ndarray:
        """A copy: no other framework sees the memory of WebGPU."""
        return self[name]

    def note_checkpoint(self, told: str) -> None:
        device().checkpoint = told
