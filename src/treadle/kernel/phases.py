"""Whether a program's phases can be run: calls of one phase side by side, in any order."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.kernel.program import Call, Phase, Program, Repeat, Step


def check_phases(program: Program) -> Program:
    """What is read was written in an earlier phase; no call touches what another one writes."""
    there = {n for n, _ in program.leaves} | {n for n, _ in program.constants}
    there |= {b.name for b in program.buffers if b.size == 0}
    _check_steps(program.steps, there)
    return program


def calls_in(step: Step) -> list[Call]:
    if isinstance(step, Repeat):
        return [c for s in step.steps for c in calls_in(s)]
    return list(step.calls)


def _check_steps(steps: Sequence[Step], written: set[str]) -> None:
    for step in steps:
        if isinstance(step, Repeat):
            _check_steps(step.steps, written)
        else:
            _check_phase(step, written)


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
