"""Calls in order and buffers apart: what is read was written, nothing else lies there."""

from __future__ import annotations

from collections.abc import Iterator

from treadle_checker.program import BYTES, Call, Phase, Program, Step
from treadle_checker.reading import Rejected


def check_calls(program: Program) -> None:
    """Every call is of a kernel on buffers that have room for it, in all iterations of a repeat."""
    for call, length in _calls(program.steps, 1):
        if call.kernel >= len(program.kernels):
            raise Rejected(f"a call of the kernel {call.kernel}, which is not there")
        kernel = program.kernels[call.kernel]
        if len(call.arguments) != len(kernel.buffers):
            raise Rejected(f"{kernel.name} is called with {len(call.arguments)} buffers")
        for buffer, (name, row) in zip(kernel.buffers, call.arguments, strict=True):
            given = program.buffers.get(name)
            if given is None or buffer.dtype != given.dtype:
                raise Rejected(f"{kernel.name} is called with {name}, which is no {buffer.dtype}")
            if length and row * (length - 1) + buffer.size > given.size:
                told = f"{buffer.size} elements at row {length - 1} of {row}"
                raise Rejected(f"{kernel.name} takes {told} of {name}, which has {given.size}")


def _calls(steps: tuple[Step, ...], length: int) -> Iterator[tuple[Call, int]]:
    """Every call, and how often the innermost repeat around it makes it."""
    for step in steps:
        if isinstance(step, Phase):
            yield from ((call, length) for call in step.calls)
        else:
            yield from _calls(step.steps, step.length)


def check_phases(program: Program) -> None:
    """Calls of one phase do not touch what another one writes; what is read was written before."""
    written = {*program.leaves, *program.constants}
    written |= {b.name for b in program.buffers.values() if not b.size}
    _check_steps(program, program.steps, written)
    missing = [name for _, _, name in program.outputs if name not in written]
    if missing:
        raise Rejected(f"the output {missing[0]} is never written")
    changed = {name for call, _ in _calls(program.steps, 1) for name in _written(program, call)}
    changed &= {*program.leaves, *program.constants}
    if not changed <= set(program.updated):
        raise Rejected(f"{min(changed - set(program.updated))} is given, and written")


def _check_steps(program: Program, steps: tuple[Step, ...], written: set[str]) -> None:
    for step in steps:
        if not isinstance(step, Phase):
            _check_steps(program, step.steps, written)
            continue
        writers: dict[str, Call] = {}
        for call in step.calls:
            for name in _written(program, call):
                if writers.setdefault(name, call) is not call:
                    raise Rejected(f"two calls of a phase write {name}")
        for call in step.calls:
            kernel = program.kernels[call.kernel]
            for name, _ in call.arguments[: len(kernel.inputs)]:
                if writers.get(name, call) is not call:
                    raise Rejected(f"{kernel.name} reads {name}, written in the same phase")
                if name not in written and name not in writers:
                    raise Rejected(f"{kernel.name} reads {name}, which is not written before")
        written |= set(writers)


def _written(program: Program, call: Call) -> list[str]:
    first = len(program.kernels[call.kernel].inputs)
    return [name for name, _ in call.arguments[first:]]


def check_arena(program: Program) -> None:
    """Buffers that live at one time do not overlap; all others are given from outside."""
    outside = {*program.leaves, *program.constants, *(name for _, _, name in program.outputs)}
    spans: dict[str, tuple[int, int]] = {}  # the first and the last step that touches a buffer
    for position, step in enumerate(program.steps):
        for call, _ in _calls((step,), 1):
            for name, _ in call.arguments:
                spans[name] = spans.get(name, (position, position))[0], position
    placed: list[tuple[int, int, int, int, str]] = []
    for name, (first, last) in spans.items():
        buffer = program.buffers[name]
        if name in outside or not buffer.nbytes:
            continue
        at = program.offsets.get(name)
        if at is None or at % BYTES[buffer.dtype] or at + buffer.nbytes > program.arena:
            raise Rejected(f"{name} does not lie in the arena")
        placed.append((at, at + buffer.nbytes, first, last, name))
    if set(program.offsets) & outside:
        raise Rejected(f"{min(set(program.offsets) & outside)} is given, and lies in the arena")
    _check_apart(placed)


def _check_apart(placed: list[tuple[int, int, int, int, str]]) -> None:
    """In the order of their addresses, each against those before it that reach so far."""
    reaching: list[tuple[int, int, int, int, str]] = []
    for each in sorted(placed):
        at, _, first, last, name = each
        reaching = [other for other in reaching if other[1] > at]
        for _, _, start, end, other in reaching:
            if start <= last and first <= end:
                raise Rejected(f"{name} and {other} live at one time, and overlap")
        reaching.append(each)


def aliased(program: Program, call: Call) -> list[tuple[str, str]]:
    """Pairs of a kernel's buffers that are the same memory, of which one is written."""
    kernel = program.kernels[call.kernel]
    pairs = list(zip((b.name for b in kernel.buffers), call.arguments, strict=True))
    count = len(kernel.inputs)
    return [
        (name, other)
        for i, (name, (buffer, _)) in enumerate(pairs)
        for other, (same, _) in pairs[max(i + 1, count) :]
        if same == buffer
    ]
