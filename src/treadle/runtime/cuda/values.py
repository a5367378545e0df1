"""A session's values on the device: at fixed addresses, copied out when they are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import numpy as np

from treadle.runtime.cuda.arrays import DeviceArray
from treadle.runtime.cuda.device import Block, device
from treadle.runtime.held import is_one_number


class DeviceValues(MutableMapping[str, np.ndarray]):
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

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def restore(self, values: Mapping[str, np.ndarray]) -> None:
        """What there was before, and nothing else."""
        for name in [n for n in self if n not in values]:
            del self[name]
        self.update(values)
