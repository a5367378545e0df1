"""Batched matmuls: weight gradients of equal layers in one phase, so that they are one batch.

One such matmul has hardly more tiles than a GPU has multiprocessors: most of these would idle while
the last tiles are computed. No kernel of the backward pass reads a weight's gradient, so those of
several layers can be postponed. Their matrices have to lie at one distance in memory, which a
program's series ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.kernel.launch import matmul_call_of
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Call, Phase, Program, Step, calls_in
from treadle.kernel.target import Matmuls


@dataclass(frozen=True)
class Member:
    """A call that can be postponed: its step and index, and the last step that it can move to."""

    call: Call
    step: int
    index: int  # among the calls of its phase
    limit: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.buffer for a in self.call.arguments)


Run = list[Member]  # equal matmuls of several layers


def batch_matmuls(program: Program, limits: Matmuls, limit: int | None = None) -> Program:
    """Moves equal matmuls of several phases into that of the last, as many as memory allows.

    `limit` are bytes of a budget.
    """
    uses = _Uses(program)
    chains = _chains(program, uses, limits)
    peak = uses.peak([])
    most = peak + max(peak // limits.batch_memory_part, limits.batch_memory)
    most = most if limit is None else min(most, limit)
    for parts in limits.batch_counts if chains else ():
        runs, series = with_series([r for c in chains for r in _runs(c, parts)])
        if uses.peak(runs) <= most:
            return replace(program, steps=_moved(program, runs), series=series)
    return program


class _Uses:
    """In which steps buffers of the arena are touched and written."""

    def __init__(self, program: Program):
        outside = {n for n, _ in program.leaves} | {n for n, _ in program.constants}
        outside |= {name for _, name, _ in program.outputs}
        self.sizes = {b.name: b.nbytes for b in program.buffers if b.name not in outside}
        self.touched: dict[str, list[int]] = {}
        self.written: dict[str, list[int]] = {}
        self.count = len(program.steps)
        for position, step in enumerate(program.steps):
            for call in calls_in(step):
                for argument in call.arguments:
                    self.touched.setdefault(argument.buffer, []).append(position)
                for argument in call.written:
                    self.written.setdefault(argument.buffer, []).append(position)

    def are_in_arena(self, call: Call) -> bool:
        """Whether a call's buffers are the arena's, each as large as the kernel says."""
        pairs = zip(call.arguments, call.kernel.buffers, strict=True)
        return all(self.sizes.get(a.buffer) == b.nbytes and not a.row for a, b in pairs)

    def limit(self, call: Call, step: int) -> int:
        """The last step before those that need its result or overwrite its operands."""
        given = call.arguments[: len(call.kernel.inputs)]
        needed = [s for a in call.written for s in self.touched[a.buffer] if s > step]
        needed += [s for a in given for s in self.written.get(a.buffer, ()) if s > step]
        return min(needed, default=self.count) - 1

    def peak(self, runs: Sequence[Run]) -> int:
        """The most live bytes at one time, if each run moves to the step of its last member."""
        first = {n: steps[0] for n, steps in self.touched.items() if n in self.sizes}
        last = {n: self.touched[n][-1] for n in first}
        for run in runs:
            for member in run:
                *given, made = member.names
                first[made] = run[-1].step
                last |= {n: max(last[n], run[-1].step) for n in given}
        change = np.zeros(self.count + 1, np.int64)
        for name, size in self.sizes.items():
            if name in first:
                change[first[name]] += size
                change[last[name] + 1] -= size
        return int(change.cumsum().max(initial=0))


def _chains(program: Program, uses: _Uses, limits: Matmuls) -> list[Run]:
    """Calls of one matmul kernel that play one part in their layers, in the order of steps.

    How often operands are touched tells parts from each other: queries share theirs with keys.
    Equal calls of one phase are in chains of their own.
    """
    known: dict[int, bool] = {}
    found: dict[tuple[object, ...], Run] = {}
    for position, step in enumerate(program.steps):
        seen: Counter[tuple[object, ...]] = Counter()
        for index, call in enumerate(step.calls if isinstance(step, Phase) else ()):
            number = id(call.kernel)
            if number not in known:
                known[number] = _is_small(call.kernel, limits)
            if not known[number] or not uses.are_in_arena(call):
                continue
            key = (number, *(len(uses.touched[a.buffer]) for a in call.arguments))
            member = Member(call, position, index, uses.limit(call, position))
            found.setdefault((*key, seen[key]), []).append(member)
            seen[key] += 1
    return [c for c in found.values() if len(c) > 1]


def _is_small(kernel: Kernel, limits: Matmuls) -> bool:
    """Whether a kernel is one plain matmul of few tiles: no batch, no bias, nothing added to.

    Those of 8-bit floats go by themselves: they are of large layers.
    """
    matmul = matmul_call_of(kernel)
    if matmul is None or matmul.batch > 1 or matmul.bias >= 0 or matmul.adds:
        return False
    if "float8" in matmul.left.dtype:
        return False
    rows, columns = (-(-n // limits.tile) for n in (matmul.m, matmul.n))
    return rows * columns < limits.busy_tiles


def _runs(chain: Run, parts: int) -> list[Run]:
    """A chain cut into parts, and where a result is read before the next matmul can be computed."""
    most = -(-len(chain) // parts)
    found: list[Run] = [[]]
    for member in chain:
        run = found[-1]
        if len(run) == most or any(m.limit < member.step for m in run):
            found.append([member])
        else:
            run.append(member)
    return [run for run in found if len(run) > 1]


def with_series(runs: Sequence[Run]) -> tuple[list[Run], tuple[tuple[str, ...], ...]]:
    """Runs whose matrices can lie at one distance, and the buffers that have to.

    A buffer has one address: it is in one series, which several runs may share.
    """
    known: dict[str, tuple[str, ...]] = {}
    chosen: list[Run] = []
    for run in runs:
        columns = list(zip(*(m.names for m in run), strict=True))
        wanted = [c for c in columns if len(set(c)) > 1]  # one that all read is at no distance
        is_new = len({n for c in wanted for n in c}) == sum(map(len, wanted))
        if is_new and all(known.get(n, c) == c for c in wanted for n in c):
            chosen.append(run)
            known |= {n: c for c in wanted for n in c}
    return chosen, tuple(dict.fromkeys(known.values()))


def _moved(program: Program, runs: Sequence[Run]) -> tuple[Step, ...]:
    gone = {(m.step, m.index) for run in runs for m in run}
    added: dict[int, list[Call]] = {}
    for run in runs:
        added.setdefault(run[-1].step, []).extend(m.call for m in run)
    found: list[Step] = []
    for position, step in enumerate(program.steps):
        if not isinstance(step, Phase):
            found.append(step)
            continue
        stay = [c for i, c in enumerate(step.calls) if (position, i) not in gone]
        calls = (*stay, *added.get(position, ()))
        found += [Phase(calls)] if calls else []
    return tuple(found)
