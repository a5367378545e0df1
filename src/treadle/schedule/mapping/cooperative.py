"""Phases of small kernels as one cooperative launch: blocks share out a phase, then synchronize.

A launch costs more than what a small kernel does. Where all of a program is small, its kernels are
parts of one function: every block takes blocks of the phase's kernels in turn, then waits until all
have arrived. Such a wait is shorter than a launch, and kernels of one phase run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from treadle.kernel import cost, target
from treadle.kernel.launch import CooperativeLaunch
from treadle.kernel.mapped import blocks_of, geometry_of, shared_bytes
from treadle.kernel.nodes import Kernel, library_call_of, standalone_matmul
from treadle.kernel.program import Phase, Program, Step
from treadle.kernel.scatter import is_scatter


def cooperative_runs(program: Program, mapping: target.Mapping) -> tuple[CooperativeLaunch, ...]:
    """Runs of phases that are one launch, by kernels' numbers; none if some phase is not small."""
    if not all(_is_light(phase, mapping) for phase in _phases(program.steps)):
        return ()
    runs = _Runs(mapping, {id(k): i for i, k in enumerate(program.distinct())})
    found = runs.of(program.steps, ())
    return tuple(replace(b, symbol=f"cooperative_{i}") for i, b in enumerate(found))


def _phases(steps: Sequence[Step]) -> Iterator[Phase]:
    for step in steps:
        if isinstance(step, Phase):
            yield step
        else:
            yield from _phases(step.steps)


def _is_light(phase: Phase, mapping: target.Mapping) -> bool:
    own = [call.kernel for call in phase.calls]
    if any(library_call_of(k) is not None or standalone_matmul(k) is not None for k in own):
        return False
    return sum(map(cost.work, own)) <= mapping.light


class _Runs:
    """Runs of phases, as long as what a launch takes: pointers, and functions to compile."""

    def __init__(self, mapping: target.Mapping, numbers: Mapping[int, int]):
        self.mapping, self.numbers = mapping, numbers
        self.most = mapping.arguments // 8  # pointers

    def of(self, steps: Sequence[Step], path: tuple[int, ...]) -> Iterator[CooperativeLaunch]:
        run: list[tuple[tuple[int, int], ...]] = []
        first, pointers = 0, 0
        for i, step in enumerate(steps):
            if not isinstance(step, Phase):
                yield from _done(path, first, run)
                run, first, pointers = [], i + 1, 0
                yield from self.of(step.steps, (*path, i))
                continue
            calls, wanted = self._calls(step), self._pointers(step)
            is_full = pointers + wanted > self.most
            if is_full or sum(map(len, run)) + len(calls) > self.mapping.most_parts:
                yield from _done(path, first, run)
                run, first, pointers = [], i, 0
            if wanted > self.most:
                first = i + 1
                continue
            run.append(tuple(calls.items()))
            pointers += wanted
        yield from _done(path, first, run)

    def _calls(self, phase: Phase) -> dict[int, int]:
        """How often a phase calls each kernel, the longest first: what is left at the end is
        short."""
        found: dict[int, int] = {}
        for call in sorted(phase.calls, key=lambda c: -cost.work(c.kernel)):
            number = self.numbers[id(call.kernel)]
            found[number] = found.get(number, 0) + 1
        return found

    def _pointers(self, phase: Phase) -> int:
        if any(is_scatter(call.kernel, self.mapping) for call in phase.calls):
            return self.most + 1  # blocks of a scattered sum are larger
        return sum(len(call.arguments) for call in phase.calls)


def _done(
    path: tuple[int, ...], first: int, run: Sequence[tuple[tuple[int, int], ...]]
) -> Iterator[CooperativeLaunch]:
    if sum(map(len, run)) > 1:
        yield CooperativeLaunch("", path, first, tuple(run))


def shares(
    found: Sequence[CooperativeLaunch], kernels: Sequence[Kernel], mapping: target.Mapping
) -> dict[int, int]:
    """Blocks that each kernel gets beside the others of its phase."""
    given: dict[int, int] = {}
    for phase in (p for b in found for p in b.phases):
        work = {i: n * cost.work(kernels[i]) for i, n in phase}
        for i, own in work.items():
            share = _share(own, sum(work.values()), mapping)
            given[i] = min(given.get(i, mapping.blocks), share)
    return given


def _share(work: int, total: int, mapping: target.Mapping) -> int:
    """Blocks for a kernel beside others that run at the same time."""
    if 8 * work >= 7 * total:
        return mapping.blocks
    return max(mapping.fewest_blocks, mapping.blocks * work // max(1, total))


def sized(run: CooperativeLaunch, kernels: Sequence[Kernel]) -> CooperativeLaunch:
    """The launch with the blocks that its largest phase can use, and its shared memory."""
    entries = {i for phase in run.phases for i, _ in phase}
    grid = max(sum(blocks_of(kernels[i]) * n for i, n in phase) for phase in run.phases)
    shared = max(shared_bytes(kernels[i]) for i in entries)
    threads = max(geometry_of(kernels[i]).threads for i in entries)
    return replace(run, grid=max(1, grid), block=threads, shared=shared)
