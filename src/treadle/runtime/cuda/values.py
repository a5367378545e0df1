"""A session's values on the device: at fixed addresses, copied out when they are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.ir.types import TensorType
from treadle.runtime.cuda.arrays import DeviceArray, Found
from treadle.runtime.cuda.arrays import found as found_on_device
from treadle.runtime.cuda.device import Block, device
from treadle.runtime.held import as_dtype, is_one_number
from treadle.runtime.memory import Held, PlacedValues, Values


class DeviceValues(PlacedValues):
    """Arrays by name. Writing one that is there keeps its address: programs stay bound to it."""

    def __init__(self) -> None:
        self.layout = 0  # counts when addresses change
        self._blocks: dict[str, Block] = {}
        self._like: dict[str, tuple[tuple[int, ...], np.dtype]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        device().enter()
        shape, dtype = self._like[name]
        return self._blocks[name].read(np.empty(shape, dtype))

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        device().enter()
        array = np.asarray(value)
        known = self._blocks.get(name)
        if known is None or known.nbytes != array.nbytes:
            self._blocks[name] = Block(array.nbytes)
            self.layout += 1
        else:
            device().wait()
        self._like[name] = array.shape, array.dtype
        if is_one_number(array) and array.dtype.itemsize <= 4:
            self._blocks[name].set(array[(0,) * array.ndim])
        else:
            self._blocks[name].write(array)

    def __delitem__(self, name: str) -> None:
        del self._blocks[name], self._like[name]
        self.layout += 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def block(self, name: str) -> Block:
        return self._blocks[name]

    def shared(self, name: str) -> DeviceArray:
        """The memory itself, for others."""
        return DeviceArray(self._blocks[name], *self._like[name])

    def note_checkpoint(self, told: str) -> None:
        device().checkpoint = told


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the GPU. Arrays of other frameworks that are there are taken as they are."""

    device: str
    is_host: bool = False
    is_wide: bool = False

    def new_values(self) -> Values:
        return DeviceValues()

    def holder(self) -> Held:
        return self.held

    def held(self, array: np.ndarray, type_: TensorType) -> np.ndarray:
        """Of the right dtype; writing copies it to the device."""
        return as_dtype(array, type_.dtype.numpy)

    def found(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Found | None:
        return found_on_device(array, shape, dtype)
