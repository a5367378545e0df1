"""One arena for all temporary buffers: two that live at the same time never overlap."""

from __future__ import annotations

from dataclasses import dataclass

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
    placed: list[tuple[int, int, Span]] = []
    for buffer in sorted(temporary, key=lambda b: (-b.nbytes, spans[b.name].first)):
        span = spans[buffer.name]
        offset = _lowest(padded(buffer), sorted(p[:2] for p in placed if p[2].meets(span)))
        offsets[buffer.name] = offset
        placed.append((offset, offset + padded(buffer), span))
    size = max((end for _, end, _ in placed), default=0)
    plan = BufferPlan(offsets, spans, size)
    check_plan(plan, {b.name: b for b in temporary})
    return plan


def padded(buffer: Buffer) -> int:
    """The bytes a buffer takes, whole lines."""
    return -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT


def _lowest(size: int, taken: list[tuple[int, int]]) -> int:
    """The lowest place of a size between intervals sorted by their start."""
    offset = 0
    for start, end in taken:
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


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
    events = sorted(plan.offsets, key=lambda n: plan.spans[n].first)
    live: list[str] = []
    for name in events:
        span, start = plan.spans[name], plan.offsets[name]
        live = [n for n in live if plan.spans[n].last >= span.first]
        for other in live:
            begin = plan.offsets[other]
            is_apart = (
                start + buffers[name].nbytes <= begin or begin + buffers[other].nbytes <= start
            )
            assert is_apart, f"{name} and {other} overlap"
        live.append(name)
