"""Where a device holds the values of a session, and which arrays it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from treadle.ir.types import TensorType
from treadle.runtime.held import Room, aligned_copy, as_dtype

Held = Callable[[np.ndarray, TensorType], np.ndarray]
Place = TypeVar("Place")


class Values(MutableMapping[str, np.ndarray]):
    """Arrays by name, as a device holds them. Reading one on a device copies it to the host."""

    @abstractmethod
    def shared(self, name: str) -> Any:
        """The memory itself, for other frameworks to read."""

    @abstractmethod
    def restore(self, values: Mapping[str, np.ndarray]) -> None:
        """Exactly these values, and no others."""

    @abstractmethod
    def note_checkpoint(self, told: str) -> None:
        """What an error says if the device is lost."""


class PlacedValues(Values, Generic[Place]):
    """Arrays at places of a device that programs are bound to: each is equal to itself alone.

    Writing one that is there keeps its place.
    """

    def __init__(self) -> None:
        self.layout = 0  # counts when places change
        self._places: dict[str, Place] = {}
        self._like: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def place(self, name: str) -> Place:
        return self._places[name]

    def __delitem__(self, name: str) -> None:
        del self._places[name], self._like[name]
        self.layout += 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def restore(self, values: Mapping[str, np.ndarray]) -> None:
        """Exactly these values, and no others."""
        for name in [n for n in self if n not in values]:
            del self[name]
        self.update(values)


class Memory(Protocol):
    """What arrays a device takes, and how it holds them."""

    @property
    def device(self) -> str:
        """The device's name."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether it is the host's memory.

        If it is not, arrays of other frameworks on the device are taken as they are, calls return
        before the device is done, and results are waited for when they are looked at.
        """
        ...

    @property
    def is_wide(self) -> bool:
        """Whether floats of 32 bits and fewer are held as float64."""
        ...

    def new_values(self) -> Values:
        """Room for a session."""
        ...

    def held(self, array: np.ndarray, type_: TensorType) -> np.ndarray:
        """The array as `new_values` is given it: of the device's dtype, not the caller's memory."""
        ...

    def holder(self) -> Held:
        """`held` for values that are written together."""
        ...

    def found(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any | None:
        """An array of this type that is on the device already; None for every other."""
        ...


class HostValues(dict[str, np.ndarray], Values):
    """Arrays of the host by name."""

    def shared(self, name: str) -> np.ndarray:
        view = self[name].view()
        view.flags.writeable = False
        return view

    def restore(self, values: Mapping[str, np.ndarray]) -> None:
        self.clear()
        self.update(values)

    def note_checkpoint(self, told: str) -> None:
        """The host is not lost."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Aligned arrays of the host, each of its own dtype."""

    device: str
    is_host: bool = True
    is_wide: bool = False

    def new_values(self) -> Values:
        return HostValues()

    def held(self, array: np.ndarray, type_: TensorType) -> np.ndarray:
        return aligned_copy(as_dtype(array, type_.dtype.numpy))

    def holder(self) -> Held:
        room = Room()
        return lambda array, type_: room.copy(as_dtype(array, type_.dtype.numpy))

    def found(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        return None


def _nothing(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """No array of another framework is on the device."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device beside the host; `on_device` finds arrays of others that are there."""

    device: str
    values: Callable[[], Values]
    on_device: Callable[[Any, tuple[int, ...], np.dtype[Any]], Any | None] = _nothing
    is_host: bool = False
    is_wide: bool = False

    def new_values(self) -> Values:
        return self.values()

    def holder(self) -> Held:
        return self.held

    def held(self, array: np.ndarray, type_: TensorType) -> np.ndarray:
        """Of the right dtype; writing copies it to the device."""
        return as_dtype(array, type_.dtype.numpy)

    def found(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any | None:
        return self.on_device(array, shape, dtype)
