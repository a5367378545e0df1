"""A plan: all that a runtime needs of a program beside its code, as plain data that can be stored.

The script is what threads follow: phases of calls, and repeats. A call's iterations are cut into
tasks; any cut gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.ir.graph import Graph, OutputKind
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


def fits(plan: Plan, graph: Graph, constants: Mapping[str, np.ndarray]) -> bool:
    """Whether leaves and outputs are the graph's, and every number points at what is there.

    That its machine code is right cannot be told from here.
    """
    try:
        checks = (_has_its_outputs, _has_its_leaves, _has_room)
        return all(check(plan, graph) for check in checks) and _has_constants(plan, constants)
    except (TypeError, AttributeError, LookupError):  # numbers that are none
        return False


def _has_its_outputs(plan: Plan, graph: Graph) -> bool:
    found = [(o.kind, o.name, o.type) for o in plan.outputs]
    wanted = zip(graph.outputs, graph.output_types, strict=True)
    return found == [(o.kind, o.name, t) for o, t in wanted] and all(
        o.type.nbytes <= plan.slots[_checked(o.slot, plan.slots)].nbytes for o in plan.outputs
    )


def _has_its_leaves(plan: Plan, graph: Graph) -> bool:
    """All of the graph's, and what it only writes."""
    types = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
    found = {name: type_ for name, _, type_ in plan.leaves}
    own = {name: type_ for name, type_ in found.items() if name in types}
    is_written = all(name in plan.updated for name in found if name not in types)
    return own == types and is_written and all(n in found for n in plan.updated)


def _has_room(plan: Plan, graph: Graph) -> bool:
    """Buffers lie in the arena or are given from outside; calls name what there is."""
    outside = {s for _, s, _ in plan.leaves} | {s for s, _ in plan.constants}
    outside |= {o.slot for o in plan.outputs}
    for i, slot in enumerate(plan.slots):
        is_inside = slot.offset >= 0 and 0 <= slot.nbytes <= plan.arena - slot.offset
        is_given = slot.offset == -1 and (i in outside or slot.nbytes == 0)
        if not (is_inside or is_given):
            return False
    if any(e.iterations < 0 or e.scratch < 0 for e in plan.entries):
        return False
    leaves = all(t.nbytes <= plan.slots[_checked(s, plan.slots)].nbytes for _, s, t in plan.leaves)
    return leaves and _can_follow(plan, plan.steps, 1)


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
    _checked(call.entry, plan.entries)
    if call.tasks < 1 or len(call.slots) != len(call.rows):
        return False
    return all(
        0 <= row * max(0, length - 1) <= plan.slots[_checked(slot, plan.slots)].nbytes
        for slot, row in zip(call.slots, call.rows, strict=True)
    )


def _has_constants(plan: Plan, constants: Mapping[str, np.ndarray]) -> bool:
    return all(
        constants[name].nbytes >= plan.slots[_checked(slot, plan.slots)].nbytes
        for slot, name in plan.constants
    )


def _checked(number: int, among: Sequence[object]) -> int:
    """A position in a sequence: no negative one, which Python would count from the end."""
    if not 0 <= number < len(among):
        raise IndexError(number)
    return number
