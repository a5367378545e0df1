"""A plan: all that a runtime needs of a program beside its code, as plain data that can be stored.

The script is what threads follow: phases of calls, and repeats. A call's iterations are cut into
tasks; any cut gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.graph import OutputKind
from treadle.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel: its symbol, its iterations, and what one thread needs to run it."""

    symbol: str
    iterations: int
    is_vector: bool  # whether iterations are elements, so that tasks are cut at whole vectors
    scratch: int  # bytes


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """An entry on buffers: slots of the table, and bytes that each moves on in a repeat."""

    entry: int
    tasks: int
    slots: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedPhase:
    """Calls in any order. A serial phase is the first thread's alone."""

    calls: tuple[PlannedCall, ...]
    is_serial: bool


@dataclass(frozen=True, slots=True)
class PlannedRepeat:
    length: int
    reverse: bool
    steps: tuple[PlannedStep, ...]


PlannedStep = PlannedPhase | PlannedRepeat


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer of the table: where it lies in the arena, or −1 for what is given from outside."""

    name: str
    nbytes: int
    offset: int = -1


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    kind: OutputKind
    name: str
    slot: int
    type: TensorType


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the report says about a kernel.

    Lines of the model are not here: one plan serves every script that has the same graph.
    """

    name: str
    calls: int
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """An index that is data: the op that uses it, and how many elements there are."""

    op: str
    extent: int
    origin: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A program's memory, its script, and what goes in and out."""

    entries: tuple[Entry, ...]
    steps: tuple[PlannedStep, ...]
    slots: tuple[Slot, ...]
    leaves: tuple[tuple[str, int, TensorType], ...]  # name, slot, type
    constants: tuple[tuple[int, str], ...]  # slot, and the name under which the array is stored
    outputs: tuple[PlannedOutput, ...]
    updated: tuple[str, ...]  # leaves that are written in place
    arena: int
    kernels: tuple[KernelFacts, ...] = ()

    @property
    def scratch(self) -> int:
        """Bytes that each thread needs of its own."""
        return max((e.scratch for e in self.entries), default=0)
