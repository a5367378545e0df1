"""One arena for all temporary buffers: two that live at the same time never overlap."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.base.quick import quick
from treadle.kernel.nodes import Buffer
from treadle.kernel.program import Phase, Program, Step
from treadle.kernel.target import CPU, Target

ALIGNMENT = 64  # a cache line, and the widest vector


@quick
@dataclass(frozen=True, slots=True)
class Span:
    """The first and the last step that touches a buffer."""

    first: int
    last: int

    def overlaps(self, other: Span) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Offsets of temporary buffers in the arena, and its size: the peak of temporary memory."""

    offsets: dict[str, int]
    spans: dict[str, Span]
    size: int


def plan_buffers(program: Program, target: Target = CPU) -> BufferPlan:
    """Where every temporary buffer lies; checked afterwards.

    Series lie at one distance unless that takes much more memory than each buffer by itself.
    """
    spans = lifetimes(program)
    outside = {n for n, _ in program.leaves} | {n for n, _ in program.constants}
    outside |= {name for _, name, _ in program.outputs}
    temporary = {
        b.name: b for b in program.buffers if b.name in spans and b.name not in outside and b.nbytes
    }
    plan = _placed([[b] for b in temporary.values()], spans)
    if program.series:
        rows = [[temporary[n] for n in names] for names in program.series]
        in_series = {b.name for row in rows for b in row}
        rows += [[b] for b in temporary.values() if b.name not in in_series]
        found = _placed(rows, spans)
        room = target.arena
        most = plan.size + max(plan.size // room.part, room.nbytes)
        plan = found if found.size <= most else plan
    check_plan(plan, temporary)
    return plan


Row = Sequence[Buffer]  # of one size, one after the other; each keeps its own time


def _placed(rows: Sequence[Row], spans: dict[str, Span]) -> BufferPlan:
    """The better of two orders: the largest first, or of about one size who lives longest."""

    def nbytes(row: Row) -> int:
        return sum(b.nbytes for b in row)

    def by_size(row: Row) -> tuple[int, int]:
        return -nbytes(row), spans[row[0].name].first

    def by_life(row: Row) -> tuple[int, int, int]:
        lives = [spans[b.name] for b in row]
        life = max(s.last for s in lives) - min(s.first for s in lives)
        return -nbytes(row).bit_length(), -life, -nbytes(row)

    found = [_placed_in_order(sorted(rows, key=key), spans) for key in (by_size, by_life)]
    return min(found, key=lambda plan: plan.size)


def _placed_in_order(rows: Sequence[Row], spans: dict[str, Span]) -> BufferPlan:
    """One after the other, each as low as its neighbours in time allow."""
    offsets: dict[str, int] = {}
    # Of those placed so far: first and last step, start and end.
    placed = np.zeros((4, sum(map(len, rows))), np.int64)
    for row in rows:
        known, size = placed[:, : len(offsets)], padded(row[0])
        # What is in the way of a buffer, as far down as the row's first is before it.
        taken = [known[2:, _meets(known, spans[b.name])] - i * size for i, b in enumerate(row)]
        lowest = _lowest(size, np.concatenate(taken, axis=1))
        for i, buffer in enumerate(row):
            span, offset = spans[buffer.name], lowest + i * size
            placed[:, len(offsets)] = span.first, span.last, offset, offset + size
            offsets[buffer.name] = offset
    return BufferPlan(offsets, spans, int(placed[3].max(initial=0)))


def _meets(known: np.ndarray, span: Span) -> np.ndarray:
    """Which of those placed live in a span."""
    found: np.ndarray = (known[0] <= span.last) & (known[1] >= span.first)
    return found


def padded(buffer: Buffer) -> int:
    """The bytes a buffer takes, in full cache lines."""
    return -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT


def _lowest(size: int, taken: np.ndarray) -> int:
    """The lowest offset of a size between intervals, given by their starts and ends."""
    order = np.argsort(taken[0])
    starts, ends = taken[0][order], np.maximum.accumulate(taken[1][order])
    before = np.maximum(np.concatenate([[0], ends]), 0)
    after = np.concatenate([starts, [np.iinfo(np.int64).max]])
    return int(before[np.argmax(after - before >= size)])


def lifetimes(program: Program) -> dict[str, Span]:
    """When each buffer is touched; whatever a repeat touches lives as long as the repeat."""
    spans: dict[str, Span] = {}
    for position, step in enumerate(program.steps):
        for name in buffers_of(step):
            first = spans[name].first if name in spans else position
            spans[name] = Span(first, position)
    return spans


def buffers_of(step: Step) -> set[str]:
    if isinstance(step, Phase):
        return {a.buffer for call in step.calls for a in call.arguments}
    return set().union(*(buffers_of(s) for s in step.steps))


def check_plan(plan: BufferPlan, buffers: dict[str, Buffer]) -> None:
    """No two buffers that live at one time share a byte."""
    ends: list[tuple[int, str]] = []  # a heap: who is gone first
    live: list[tuple[int, str]] = []  # by offset; apart from each other, so neighbours tell all
    for name in sorted(plan.offsets, key=lambda n: plan.spans[n].first):
        span, start = plan.spans[name], plan.offsets[name]
        while ends and ends[0][0] < span.first:
            _, gone = heapq.heappop(ends)
            del live[bisect.bisect_left(live, (plan.offsets[gone], gone))]
        at = bisect.bisect_left(live, (start, name))
        if at:
            begin, other = live[at - 1]
            assert begin + buffers[other].nbytes <= start, f"{name} and {other} overlap"
        if at < len(live):
            begin, other = live[at]
            assert start + buffers[name].nbytes <= begin, f"{name} and {other} overlap"
        live.insert(at, (start, name))
        heapq.heappush(ends, (span.last, name))
