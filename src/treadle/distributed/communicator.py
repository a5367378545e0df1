"""What ranks exchange: a small protocol, and the communicator of a process by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from treadle.distributed.mpi_calls import MpiCalls


class Pending(Protocol):
    """An exchange that has begun; its arrays are not touched until it was waited for."""


class Communicator(Protocol):
    """All ranks call the same methods in the same order. Arrays are contiguous memory."""

    @property
    def name(self) -> str:
        """What carries the bytes."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def waited(self) -> float:
        """Seconds in `wait` so far: of this process, in which it did nothing else."""
        ...

    def all_to_all(self, given: np.ndarray, taken: np.ndarray) -> Pending:
        """Row r of what is given goes to rank r; row r of what is taken comes from it."""
        ...

    def all_gather(self, given: np.ndarray, taken: np.ndarray) -> Pending:
        """What every rank gives, as rows, on every rank."""
        ...

    def wait(self, pending: Sequence[Pending]) -> None:
        """Until all of it has arrived; an error that names what is awaited after a time."""
        ...

    def texts(self, text: str) -> list[str]:
        """A text of each rank."""
        ...

    def calls(self) -> MpiCalls | None:
        """Functions that native programs can call themselves; None where there are none."""
        ...

    def waiting(self) -> int:
        """The address of what native programs note their waits in; 0 where they must not wait.

        From now on they wait as long as this communicator does.
        """
        ...


class SelfCommunicator:
    """One process: everything is here already."""

    name, rank, size = "self", 0, 1
    waited = 0.0

    def all_to_all(self, given: np.ndarray, taken: np.ndarray) -> None:
        taken.reshape(-1)[...] = given.reshape(-1)

    def all_gather(self, given: np.ndarray, taken: np.ndarray) -> None:
        taken.reshape(-1)[...] = given.reshape(-1)

    def wait(self, pending: Sequence[object]) -> None:
        """Nothing is on its way."""

    def texts(self, text: str) -> list[str]:
        return [text]

    def calls(self) -> None:
        """Nobody is to be called."""

    def waiting(self) -> int:
        """Nobody is waited for."""
        return 0
