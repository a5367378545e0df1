"""One arena for all temporary buffers: two that live at the same time never overlap."""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass

import numpy as np

from treadle.kernel.nodes import Buffer
from treadle.kernel.program import Phase, Program, Step

ALIGNMENT = 64  # a cache line, and the widest vector


@dataclass(frozen=True, slots=True)
class Span:
    """The first and the last step that touches a buffer."""

    first: int
    last: int

    def meets(self, other: Span) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Offsets of temporary buffers in the arena, and its size: the peak of temporary memory."""

    offsets: dict[str, int]
    spans: dict[str, Span]
    size: int


def plan_buffers(program: Program) -> BufferPlan:
    """Place the largest first, each as low as its neighbours in time allow; checked afterwards."""
    spans = lifetimes(program)
    outside = {n for n, _ in program.leaves} | {n for n, _ in program.constants}
    outside |= {name for _, name, _ in program.outputs}
    temporary = [
        b for b in program.buffers if b.name in spans and b.name not in outside and b.nbytes
    ]
    offsets: dict[str, int] = {}
    # Of those placed so far: first and last step, start and end.
    placed = np.zeros((4, len(temporary)), np.int64)
    ordered = sorted(temporary, key=lambda b: (-b.nbytes, spans[b.name].first))
    for i, buffer in enumerate(ordered):
        span, known = spans[buffer.name], placed[:, :i]
        meets = (known[0] <= span.last) & (known[1] >= span.first)
        offset = _lowest(padded(buffer), known[2:, meets])
        offsets[buffer.name] = offset
        placed[:, i] = span.first, span.last, offset, offset + padded(buffer)
    size = int(placed[3].max(initial=0))
    plan = BufferPlan(offsets, spans, size)
    check_plan(plan, {b.name: b for b in temporary})
    return plan


def padded(buffer: Buffer) -> int:
    """The bytes a buffer takes, whole lines."""
    return -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT


def _lowest(size: int, taken: np.ndarray) -> int:
    """The lowest place of a size between intervals, given by their starts and ends."""
    order = np.argsort(taken[0])
    starts, ends = taken[0][order], np.maximum.accumulate(taken[1][order])
    before = np.concatenate([[0], ends])
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
