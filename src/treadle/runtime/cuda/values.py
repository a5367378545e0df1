"""A session's values on the device: at fixed addresses, copied out when they are looked at."""

from __future__ import annotations

import numpy as np

from treadle.runtime.cuda.arrays import DeviceArray
from treadle.runtime.cuda.device import Block, device
from treadle.runtime.held import is_one_number
from treadle.runtime.memory import PlacedValues


class DeviceValues(PlacedValues[Block]):
    """Arrays by name, each a block of the device's memory."""

    def __getitem__(self, name: str) -> np.ndarray:
        device().enter()
        shape, dtype = self._like[name]
        return self._places[name].read(np.empty(shape, dtype))

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        device().enter()
        array = np.asarray(value)
        known = self._places.get(name)
        if known is None or known.nbytes != array.nbytes:
            self._places[name] = Block(array.nbytes)
            self.layout += 1
        else:
            device().wait()
        self._like[name] = array.shape, array.dtype
        if is_one_number(array) and array.dtype.itemsize <= 4:
            self._places[name].set(array[(0,) * array.ndim])
        else:
            self._places[name].write(array)

    def shared(self, name: str) -> DeviceArray:
        """The memory itself, for others."""
        return DeviceArray(self._places[name], *self._like[name])

    def note_checkpoint(self, told: str) -> None:
        device().checkpoint = told
