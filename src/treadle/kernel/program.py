"""A program: kernels in phases over named buffers, some repeated over a leading axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle.base.origin import Origin
from treadle.base.quick import quick
from treadle.ir.graph import Output
from treadle.ir.types import TensorType
from treadle.kernel.bindings import Bindings
from treadle.kernel.launch import CooperativeLaunch
from treadle.kernel.nodes import Buffer, Kernel


@quick
@dataclass(frozen=True, slots=True)
class Argument:
    """A buffer of the program, or its row that belongs to an iteration of the repeat around."""

    buffer: str
    row: int = 0  # elements that an iteration moves on


@quick
@dataclass(frozen=True, slots=True)
class Call:
    """A kernel on buffers, in the order of the kernel's own.

    `parts` are calls that make the same one by one, where it was fused from several.
    """

    kernel: Kernel
    arguments: tuple[Argument, ...]
    origins: tuple[Origin, ...] = ()  # lines of the model that this call computes
    parts: tuple[Call, ...] = ()

    @property
    def read(self) -> tuple[Argument, ...]:
        return self.arguments[: len(self.kernel.inputs)]

    @property
    def written(self) -> tuple[Argument, ...]:
        return self.arguments[len(self.kernel.inputs) :]


@dataclass(frozen=True, slots=True)
class Phase:
    """Calls that do not depend on each other: threads share them out in any order."""

    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Phases for each row of a leading axis, from the first or from the last."""

    length: int
    reverse: bool
    steps: tuple[Step, ...]
    scope: str = ""  # of the scan whose iterations it makes; the one around it if it is none


Step = Phase | Repeat


@dataclass(frozen=True, slots=True)
class Rerun:
    """A kernel that is run once more so that what it made need not wait, and what that costs."""

    kernel: str
    lines: tuple[str, ...]  # of the model
    saved: int  # bytes that did not wait
    flops: int
    nbytes: int  # that it moves


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Leaves and constants in, outputs out; everything between is temporary."""

    leaves: tuple[tuple[str, TensorType], ...]  # by the name of the graph's leaf, also the buffer's
    constants: tuple[tuple[str, np.ndarray], ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[Output, str, TensorType], ...]  # what leaves, and the buffer it is in
    updated: tuple[str, ...] = ()  # leaves that are written in place
    series: tuple[tuple[str, ...], ...] = ()  # buffers of one size that lie at one distance
    cooperative: tuple[CooperativeLaunch, ...] = ()  # phases that a GPU runs as one launch
    again: tuple[Rerun, ...] = ()  # what a memory budget lets run a second time
    uncut: int = 0  # bytes of the arena without the budget; 0 where there is none to meet
    most: int = 0  # bytes that a step may take with a budget; 0 where there is none
    held: int = 0  # of them, what was known to lie beside the program's own memory
    bindings: Bindings = field(default_factory=Bindings)  # what each buffer holds

    def calls(self) -> Iterator[Call]:
        """Every call, those inside repeats once."""
        return (call for call, _ in self.counted_calls())

    def counted_calls(self) -> Iterator[tuple[Call, int]]:
        """Every call, and how often it is made."""
        return ((call, times) for phase, times in phases_of(self.steps) for call in phase.calls)

    def distinct(self) -> list[Kernel]:
        """Kernels without repetition. Equal ones are one object, so that none is compared."""
        found = {id(call.kernel): call.kernel for call in self.calls()}
        return list(found.values())

    def lines(self) -> list[tuple[str, ...]]:
        """For each distinct kernel the lines of the model that it computes, in all its calls."""
        found: dict[int, dict[str, None]] = {}
        for call in self.calls():
            found.setdefault(id(call.kernel), {}).update(dict.fromkeys(map(str, call.origins)))
        return [tuple(lines) for lines in found.values()]


def phases_of(steps: Sequence[Step]) -> Iterator[tuple[Phase, int]]:
    """Every phase in order, and how often it is run."""
    pending = [(step, 1) for step in reversed(steps)]
    while pending:
        step, times = pending.pop()
        if isinstance(step, Repeat):
            pending += [(s, times * step.length) for s in reversed(step.steps)]
        else:
            yield step, times


def calls_in(step: Step) -> list[Call]:
    return [call for phase, _ in phases_of([step]) for call in phase.calls]


def check_phases(program: Program) -> Program:
    """What is read was written in an earlier phase; no call touches what another one writes."""
    there = {n for n, _ in program.leaves} | {n for n, _ in program.constants}
    there |= {b.name for b in program.buffers if b.size == 0}
    for phase, _ in phases_of(program.steps):
        _check_phase(phase, there)
    return program


def _check_phase(phase: Phase, written: set[str]) -> None:
    writers: dict[str, int] = {}
    for position, call in enumerate(phase.calls):
        for argument in call.written:
            other = writers.setdefault(argument.buffer, position)
            assert other == position, f"two calls of a phase write {argument.buffer}"
    for position, call in enumerate(phase.calls):
        for argument in call.arguments[: len(call.kernel.inputs)]:
            writer = writers.get(argument.buffer, position)
            name = f"{argument.buffer}, which {call.kernel.name} reads"
            assert writer == position, f"{name}, is written in the same phase"
            is_there = argument.buffer in written or argument.buffer in writers
            assert is_there, f"{name}, is not written before"
    written.update(writers)
