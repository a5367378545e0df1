"""A step as a chain of programs, and of exchanges between the processes that make it together.

A chain is data: which program runs on which bytes, and what goes from where to where. A device
executes it, in one launch if it can exchange by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from treadle.ir.types import TensorType
from treadle.runtime.executable import Executable
from treadle.runtime.memory import Values

ALIGNED = 256  # bytes: where rows of a buffer begin that programs read
# For messages, after each kernel of a processor's program: a look takes less than a microsecond
# where there are none. See docs/decisions.md, "Programs look for messages after every kernel".
LOOKS = 8


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


class Place(NamedTuple):
    """Some bytes of a buffer: of a value of the session, an input, or one of the chain's own."""

    buffer: str
    offset: int = 0


def input_name(row: int, leaf: str) -> str:
    """The buffer of an input of one of several rows of inputs."""
    return f"input {row} {leaf}"


@dataclass(frozen=True, slots=True)
class Run:
    """A program; leaves that are not named are the session's, and other results are not kept."""

    program: Executable
    leaves: Mapping[str, Place] = field(default_factory=dict)
    results: Mapping[str, Place] = field(default_factory=dict)  # by "kind:name"
    # What it does, if that is nothing but sums of float32: a buffer, and one that is added to it.
    sums: tuple[tuple[str, str, int], ...] = ()  # and how many


@dataclass(frozen=True, slots=True)
class Copy:
    target: Place
    source: Place
    nbytes: int


@dataclass(frozen=True, slots=True)
class Gather:
    """What every rank gives, as rows, on every rank. What is given may be this rank's row."""

    given: Place
    taken: Place
    nbytes: int  # of one rank


@dataclass(frozen=True, slots=True)
class Swap:
    """Row r of what is given goes to rank r; row r of what is taken comes from it."""

    given: Place
    taken: Place
    nbytes: int  # of one row


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchanges that do not depend on each other: all of them begin together.

    With `is_open` nothing needs them before the next exchange that is not.
    """

    name: str
    parts: tuple[Gather | Swap, ...]
    is_open: bool = False


Link = Run | Copy | Exchange


@dataclass(frozen=True, slots=True)
class Chain:
    """Links in their order, and the memory that they need beside the session's values.

    Rows of inputs are given with each call; buffers begin as zeros.
    Results are where `results` says in the buffer `RESULTS`, which comes back to the host.
    """

    links: tuple[Link, ...]
    inputs: Mapping[str, TensorType]
    rows: int
    buffers: Mapping[str, int]  # bytes
    results: Mapping[str, tuple[int, TensorType]]  # by name: an offset, and what is there
    overlaps: bool = True  # whether exchanges may begin as soon as what they give is there
    # Buffers that are gathered before programs read them, and need not be there after.
    fetched: Mapping[str, Gather] = field(default_factory=dict)


RESULTS = "results"


class Staged(Protocol):
    """What carries bytes of the host between processes."""

    def exchange(self, name: str, parts: Sequence[tuple[bool, np.ndarray, np.ndarray]]) -> None:
        """Of each part: whether it is gathered or swapped, what is given, and what is taken."""
        ...

    def native(self) -> NativeCalls | None:
        """The same for machine code; None where it cannot exchange."""
        ...

    def note(self, name: str, seconds: float) -> None:
        """What an exchange has taken."""
        ...


class NativeCalls(Protocol):
    """Functions that begin exchanges and look after them: addresses, and arguments as words."""

    @property
    def request_bytes(self) -> int:
        """Of the handle of an exchange that has begun."""
        ...

    def begin(
        self, gathers: bool, given: int, taken: int, nbytes: int, request: int
    ) -> tuple[int, ...]: ...

    def test_all(self, count: int, requests: int, flag: int) -> tuple[int, ...]: ...

    def progress(self) -> tuple[int, ...]: ...

    def waiting(self) -> int:
        """Where waits are noted."""
        ...


class RunningChain(Protocol):
    """A chain on a device."""

    @property
    def calls_made(self) -> int:
        """How many calls have changed the session's values, whatever interrupted them then."""
        ...

    def run(
        self, values: Values, version: int, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """One call: the session's values are updated; results by name.

        The version is another when arrays of the session were replaced.
        """
        ...
