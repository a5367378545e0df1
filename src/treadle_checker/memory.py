"""Calls in order and buffers apart: what is read was written, nothing else lies there."""

from __future__ import annotations

from treadle_checker.program import Call, Program, calls_of, phases_of, size_of
from treadle_checker.reading import Rejected


def check_memory(program: Program) -> None:
    _check_calls(program)
    _check_phases(program)
    _check_arena(program)


def given_to(program: Program, call: Call) -> tuple[list[str], list[str]]:
    """The buffers that a call reads, and those that it writes."""
    names, count = [n for n, _ in call.arguments], len(program.kernels[call.kernel].inputs)
    return names[:count], names[count:]


def _check_calls(program: Program) -> None:
    """Every call is of a kernel on buffers that have room for it, in all iterations of a repeat."""
    every = ((call, times) for phase, times in phases_of(program.steps) for call in phase.calls)
    for call, length in every:
        if call.kernel >= len(program.kernels):
            raise Rejected(f"a call of the kernel {call.kernel}, which is not there")
        kernel = program.kernels[call.kernel]
        if len(call.arguments) != len(kernel.buffers):
            raise Rejected(f"{kernel.name} is called with {len(call.arguments)} buffers")
        read, written = given_to(program, call)
        if len(set(written)) < len(written) or not set(read).isdisjoint(written):
            raise Rejected(f"{kernel.name}: one buffer is two of its arguments, and written")
        for buffer, (name, row) in zip(kernel.buffers, call.arguments, strict=True):
            given = program.buffers.get(name)
            if given is None or buffer.dtype != given.dtype:
                raise Rejected(f"{kernel.name} is called with {name}, which is no {buffer.dtype}")
            if length and row * (length - 1) + buffer.size > given.size:
                told = f"{buffer.size} elements at row {length - 1} of {row}"
                raise Rejected(f"{kernel.name} takes {told} of {name}, which has {given.size}")


def _check_phases(program: Program) -> None:
    """Calls of one phase do not touch what another one writes; what is given stays as it is. That
    what is read was written before is looked at with what buffers hold."""
    changed: set[str] = set()
    for phase, _ in phases_of(program.steps):
        writers: dict[str, Call] = {}
        for call in phase.calls:
            writers |= dict.fromkeys(given_to(program, call)[1], call)
        for call in phase.calls:
            for name, _ in call.arguments:
                if writers.get(name, call) is not call:
                    kernel = program.kernels[call.kernel].name
                    raise Rejected(f"{kernel} touches {name}, written in the same phase")
        changed |= set(writers)
    changed &= {*program.leaves, *program.constants} - {*program.updated}
    if changed:
        raise Rejected(f"{min(changed)} is given, and written")


def _check_arena(program: Program) -> None:
    """Buffers that live at one time do not overlap; all others are given from outside."""
    outside = {*program.leaves, *program.constants, *(name for _, _, name in program.outputs)}
    spans: dict[str, tuple[int, int]] = {}  # the first and the last step that touches a buffer
    for position, step in enumerate(program.steps):
        for call in calls_of((step,)):
            for name, _ in call.arguments:
                spans[name] = spans.get(name, (position, position))[0], position
    placed: list[tuple[int, int, int, int, str]] = []
    for name, (first, last) in spans.items():
        buffer = program.buffers[name]
        if name in outside or not buffer.nbytes:
            continue
        at = program.offsets.get(name)
        if at is None or at % size_of(buffer.dtype) or at + buffer.nbytes > program.arena:
            raise Rejected(f"{name} does not lie in the arena")
        placed.append((at, at + buffer.nbytes, first, last, name))
    if set(program.offsets) & outside:
        raise Rejected(f"{min(set(program.offsets) & outside)} is given, and lies in the arena")
    reaching: list[tuple[int, int, int, int, str]] = []
    for each in sorted(placed):  # each against those before it that reach so far
        at, _, first, last, name = each
        reaching = [other for other in reaching if other[1] > at]
        for _, _, start, end, other in reaching:
            if start <= last and first <= end:
                raise Rejected(f"{name} and {other} live at one time, and overlap")
        reaching.append(each)
