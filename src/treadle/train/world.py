"""The ranks that train together: who writes and shows, and what all of them must agree on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from treadle.base.errors import CheckpointError, DistributedError
from treadle.distributed.communicator import Communicator, SelfCommunicator
from treadle.step.parallel.local_state import communicator_of
from treadle.step.train_step import TrainStep

Given = TypeVar("Given")


class World:
    """The ranks of some steps. A process by itself is rank 0 of 1, and asks nobody."""

    def __init__(self, communicator: Communicator | None = None):
        self._comm: Communicator = communicator or SelfCommunicator()
        self.rank, self.size = self._comm.rank, self._comm.size

    @staticmethod
    def of(steps: Iterable[object]) -> World:
        """Of steps that train together; forwards are every rank's own."""
        found = [communicator_of(s) for s in steps if isinstance(s, TrainStep)]
        return World(max(found, key=lambda comm: comm.size, default=None))

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes files and shows progress."""
        return self.rank == 0

    def gathered(self, *numbers: int) -> np.ndarray:
        """(ranks, numbers): whole numbers of every rank, on every rank; none is a barrier."""
        own = np.array(numbers or [0], np.int64)
        every = np.zeros((self.size, len(own)), np.int64)
        self._comm.wait([self._comm.all_gather(own, every)])
        return every

    def told(self, value: object) -> list[Any]:
        """A JSON value of every rank."""
        return [json.loads(text) for text in self._comm.texts(json.dumps(value))]

    def first(self, value: object) -> Any:
        """The JSON value of rank 0."""
        return self.told(value if self.writes else None)[0]

    def check_same(self, operation: str, what: str, number: float, remedy: str) -> None:
        """A number that must have the same bits on all ranks."""
        if self.is_alone:
            return
        (word,) = np.array([number], np.float64).view(np.int64)
        every = self.gathered(int(word))[:, 0]
        other = np.flatnonzero(every != every[0])
        if len(other):
            values = every.view(np.float64)
            raise DistributedError(
                operation,
                f"ranks 0 and {other[0]} differ in {what}: {values[0]:g} and {values[other[0]]:g}",
                remedy,
            )

    def check_goes_on(self, is_over: bool, what: str) -> None:
        """That the data of all ranks ends at the same batch."""
        if self.is_alone:
            return
        ends = self.gathered(int(is_over))[:, 0]
        if ends.any() and not ends.all():
            over, more = int(np.argmax(ends)), int(np.argmin(ends))
            raise DistributedError(
                "fit",
                f"{what} is over on rank {over}, and goes on on rank {more}",
                "Give every rank as many batches: the same loader on each, or "
                "ArrayLoader(…, local=True).",
            )

    def agreed(self, operation: str, call: Callable[[], Given]) -> Given:
        """What a call gives, unless it fails on any rank; then the same error on every rank."""
        error: Exception | None = None
        found: Given | None = None
        try:
            found = call()
        except Exception as own:
            error = own
        told = self._comm.texts("" if error is None else _said(error))
        wrong = [(rank, text) for rank, text in enumerate(told) if text]
        if not wrong:
            return found  # type: ignore[return-value]
        if error is not None and len(wrong) == self.size:
            raise error
        rank, text = wrong[0]
        raise CheckpointError(
            operation,
            f"rank {rank} of {self.size}: {text}",
            "Nothing was done on any rank.",
        ) from error


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(getattr(error, "cause", "")) or f"{type(error).__name__}: {error}"
