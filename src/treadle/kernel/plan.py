"""A plan: all that a runtime needs of a program beside its code, as plain data that can be stored.

The script is what threads follow: phases of calls, and repeats. A call's iterations are cut into
tasks; any cut gives the same bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from treadle.base import dtypes
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

    def to_json(self) -> str:
        found = {
            "entries": [[e.symbol, e.iterations, e.is_vector, e.scratch] for e in self.entries],
            "steps": list(map(_step_out, self.steps)),
            "slots": [[s.name, s.nbytes, s.offset] for s in self.slots],
            "leaves": [[n, s, _type_out(t)] for n, s, t in self.leaves],
            "constants": [list(c) for c in self.constants],
            "outputs": [[o.kind.value, o.name, o.slot, _type_out(o.type)] for o in self.outputs],
            "updated": list(self.updated),
            "arena": self.arena,
            "kernels": [[k.name, k.calls, k.flops, k.nbytes] for k in self.kernels],
        }
        return json.dumps(found, separators=(",", ":"))


def plan_from_json(text: str) -> Plan:
    """The plan that was written; KeyError, TypeError or ValueError if it is none."""
    found: dict[str, Any] = json.loads(text)
    return Plan(
        tuple(Entry(*e) for e in found["entries"]),
        tuple(map(_step_in, found["steps"])),
        tuple(Slot(*s) for s in found["slots"]),
        tuple((n, s, _type_in(t)) for n, s, t in found["leaves"]),
        tuple((s, n) for s, n in found["constants"]),
        tuple(PlannedOutput(OutputKind(k), n, s, _type_in(t)) for k, n, s, t in found["outputs"]),
        tuple(found["updated"]),
        int(found["arena"]),
        tuple(KernelFacts(n, c, f, b) for n, c, f, b in found["kernels"]),
    )


def _type_out(type_: TensorType) -> list[Any]:
    return [list(type_.shape), type_.dtype.name]


def _type_in(found: list[Any]) -> TensorType:
    return TensorType(tuple(found[0]), dtypes.BY_NAME[found[1]])


def _step_out(step: PlannedStep) -> list[Any]:
    if isinstance(step, PlannedRepeat):
        return [step.length, step.reverse, list(map(_step_out, step.steps))]
    return [step.is_serial, [[c.entry, c.tasks, c.slots, c.rows] for c in step.calls]]


def _step_in(found: list[Any]) -> PlannedStep:
    if len(found) == 3:
        return PlannedRepeat(found[0], found[1], tuple(map(_step_in, found[2])))
    calls = tuple(PlannedCall(e, n, tuple(s), tuple(r)) for e, n, s, r in found[1])
    return PlannedPhase(calls, found[0])
