"""What every device gives: a graph that can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np

from treadle.ir.graph import Graph
from treadle.kernel.plan import Plan


class Executable(Protocol):
    """A graph ready to run. It keeps no state of its own."""

    @property
    def graph(self) -> Graph: ...

    @property
    def is_in_place(self) -> bool:
        """Whether it is an `InPlaceProgram`."""
        ...

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order. Leaves are taken by name; more may be there."""
        ...


class Timing(NamedTuple):
    """What one kernel, or several that are one launch, took in a run."""

    calls: tuple[tuple[int, int], ...]  # entries of the plan, and how often each was called
    seconds: float
    name: str = ""  # of a launch that has several kernels


class Ceilings(NamedTuple):
    """What is possible at most: operations a second, bytes a second from memory."""

    flops: float
    nbytes: float

    def share(self, flops: float, nbytes: float, seconds: float) -> float:
        """The larger of the shares of arithmetic and memory that work in some time reaches."""
        time = max(seconds, 1e-12)
        return max(flops / time / self.flops, nbytes / time / self.nbytes)


class InPlaceProgram(Executable, Protocol):
    """A compiled program that updates an owner's values where they are."""

    @property
    def plan(self) -> Plan: ...

    @property
    def runs(self) -> int:
        """How often it has written its updates."""
        ...

    @property
    def results(self) -> tuple[list[str], list[int]]:
        """Names ("kind:name") and numbers of the outputs that are not updates."""
        ...

    @property
    def prints(self) -> Sequence[str]:
        """Texts of the outputs that are printed."""
        ...

    @property
    def can_repeat(self) -> bool:
        """Whether several runs can go in one call."""
        ...

    @property
    def workspace(self) -> int:
        """Bytes that a run needs beside the plan's arena."""
        ...

    @property
    def shares_arena(self) -> bool:
        """Whether programs compute in the same memory, one after the other."""
        ...

    def run_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        inputs: Mapping[str, Any],
        wanted: Sequence[int],
        stays: bool = False,
    ) -> Sequence[Any]:
        """Some outputs; what the owner holds is updated in place.

        With `stays` outputs remain where the device computed them.
        """
        ...

    def run_several_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        rows: Sequence[Mapping[str, Any]],
        wanted: Sequence[int],
    ) -> Sequence[Sequence[Any]]:
        """`run_on` for each row of inputs."""
        ...

    def seconds(self, values: Mapping[str, np.ndarray], least: float) -> float:
        """What a run takes, the mean of as many as take some time; the values stay as they are."""
        ...

    def profile(self, values: Mapping[str, np.ndarray]) -> list[Timing]:
        """What each kernel takes in a run; the values stay as they are."""
        ...


def updates_in_place(program: Executable) -> TypeGuard[InPlaceProgram]:
    """Whether a program updates the values of a session itself."""
    return program.is_in_place


@runtime_checkable
class ThreadedProgram(Protocol):
    """A program whose kernels several threads share: the CPU's."""

    @property
    def threads(self) -> int: ...
