"""A plan: all that a runtime needs of a program beside its code, as plain data that can be stored.

The script is what threads follow: phases of calls, and repeats. A call's iterations are cut into
tasks; any cut gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType

T = TypeVar("T")

CUT = 16  # iterations of a vector loop that stay in one task: a vector of AVX-512


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


class Point(NamedTuple):
    """A point of a plan: after a call of a step. A repeat is one call."""

    step: int
    call: int


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
class PlannedConstant:
    """An array that is stored beside the plan: its slot, its name there, and its type."""

    slot: int
    name: str
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
    constants: tuple[PlannedConstant, ...]
    outputs: tuple[PlannedOutput, ...]
    updated: tuple[str, ...]  # leaves that are written in place
    arena: int
    kernels: tuple[KernelFacts, ...] = ()
    again: tuple[KernelFacts, ...] = ()  # calls that are made a second time, for a memory budget
    uncut: int = 0  # bytes of the arena without that budget
    most: int = 0  # bytes that a step may take with that budget; 0 where there is none
    held: int = 0  # of them, what was known to lie beside the program's own memory

    @property
    def scratch(self) -> int:
        """Bytes that each thread needs of its own."""
        return max((e.scratch for e in self.entries), default=0)


def fits(plan: Plan, graph: Graph, constants: Mapping[str, np.ndarray]) -> bool:
    """Whether a plan from outside belongs to a graph, before anything is run by it.

    That its machine code is right cannot be told from here.
    """
    try:
        return all(_conditions(plan, graph, constants))
    except (TypeError, AttributeError, LookupError):  # numbers that are none
        return False


def _conditions(plan: Plan, graph: Graph, constants: Mapping[str, np.ndarray]) -> Iterator[bool]:
    """Leaves and outputs are the graph's, and every number points at what is there."""
    wanted = zip(graph.outputs, graph.output_types, strict=True)
    outputs = [(o.kind, o.name, o.type) for o in plan.outputs]
    yield outputs == [(o.kind, o.name, type_) for o, type_ in wanted]
    # All leaves of the graph, and what it only writes.
    types = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
    found = {name: type_ for name, _, type_ in plan.leaves}
    yield types == {name: type_ for name, type_ in found.items() if name in types}
    yield found.keys() - types.keys() <= set(plan.updated) <= found.keys()
    # Buffers lie in the arena or are given from outside, and have room.
    given = [(slot, type_.nbytes) for _, slot, type_ in plan.leaves]
    given += [(o.slot, o.type.nbytes) for o in plan.outputs]
    yield all(nbytes <= _at(plan.slots, slot).nbytes for slot, nbytes in given)
    # Constants are of the type that the plan states, and fill their buffers.
    yield all(_is_of(constants[c.name], c.type) for c in plan.constants)
    yield all(c.type.nbytes >= _at(plan.slots, c.slot).nbytes for c in plan.constants)
    outside = {slot for slot, _ in given} | {c.slot for c in plan.constants}
    for i, slot in enumerate(plan.slots):
        is_inside = slot.offset >= 0 and 0 <= slot.nbytes <= plan.arena - slot.offset
        is_given = slot.offset == -1 and (i in outside or slot.nbytes == 0)
        yield is_inside or is_given
    yield plan.most >= 0 and plan.held >= 0
    yield all(e.iterations >= 0 and e.scratch >= 0 for e in plan.entries)
    yield _can_follow(plan, plan.steps, 1)


def _is_of(array: np.ndarray, type_: TensorType) -> bool:
    return array.dtype == type_.dtype.numpy and array.shape == type_.shape


def _can_follow(plan: Plan, steps: Sequence[PlannedStep], length: int) -> bool:
    for step in steps:
        if isinstance(step, PlannedRepeat):
            if step.length < 0 or not _can_follow(plan, step.steps, step.length):
                return False
        elif not all(_can_call(plan, call, length) for call in step.calls):
            return False
    return True


def _can_call(plan: Plan, call: PlannedCall, length: int) -> bool:
    """Rows of all iterations of the repeat around start inside their buffers."""
    _at(plan.entries, call.entry)
    rows = zip(call.slots, call.rows, strict=False)
    return (
        call.tasks >= 1
        and len(call.slots) == len(call.rows)
        and all(0 <= row * max(0, length - 1) <= _at(plan.slots, s).nbytes for s, row in rows)
    )


def _at(among: Sequence[T], number: int) -> T:
    """An element, but for negative numbers, which Python would count from the end."""
    if number < 0:
        raise IndexError(number)
    return among[number]


START = Point(0, 0)  # for what no call touches


def last_uses(plan: Plan, threads: int = 1) -> dict[str, Point]:
    """The last point of a plan at which each of its outputs' buffers was touched.

    Several threads share the calls of a step: it is over at its end.
    """
    touched: dict[int, Point] = {}
    for number, step in enumerate(plan.steps):
        parts = slots_touched(step)
        for call, slots in enumerate(parts):
            at = Point(number, call if threads == 1 else len(parts) - 1)
            touched |= dict.fromkeys(slots, at)
    return {o.name: touched[o.slot] for o in plan.outputs if o.slot in touched}


def slots_touched(step: PlannedStep) -> list[set[int]]:
    """What each call of a step touches; a repeat is one."""
    if isinstance(step, PlannedPhase):
        return [set(c.slots) for c in step.calls] or [set()]
    return [{s for inner in step.steps for slots in slots_touched(inner) for s in slots}]


def points_after(plan: Plan, first: Point) -> list[Point]:
    """A point of the plan, and all later ones."""
    every = (
        Point(i, j) for i, step in enumerate(plan.steps) for j in range(len(slots_touched(step)))
    )
    return [point for point in every if point >= first]
