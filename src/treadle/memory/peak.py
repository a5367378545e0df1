"""What is in memory when most is: temporary buffers that live at the peak, and who made them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.kernel.program import Program, Rerun, calls_in
from treadle.memory.plan import BufferPlan, padded


@dataclass(frozen=True, slots=True)
class BufferView:
    """A temporary buffer: its size, the kernel that writes it first, and the steps of its life.

    `lines` are those of the model that the kernel computes; `readers` are kernels, in order.
    """

    name: str
    dtype: str
    elements: int
    nbytes: int
    kernel: str
    lines: tuple[str, ...]
    readers: tuple[str, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class MemoryView:
    """A program's temporary memory: bytes alive at its peak, and of the arena that has room for it.

    `held` are bytes of its leaves: parameters, states, what the optimizer keeps, and inputs. `step`
    of `steps` phases is the peak's; `buffers` live then, the largest first. `alive` are bytes by
    step. Under a memory budget `again` is what runs a second time, and `uncut` the arena without.
    """

    live: int
    arena: int
    held: int
    step: int
    steps: int
    buffers: tuple[BufferView, ...]
    alive: tuple[int, ...] = ()  # bytes, by step
    again: tuple[Rerun, ...] = ()
    uncut: int = 0

    def __str__(self) -> str:
        """Buffers of one size that like kernels made are one row."""
        heads = ("MB", "buffers", "elements", "dtype", "made by")
        lines = [
            f"{self.live / 1e6:,.1f} MB alive at step {self.step} of {self.steps}, in an arena of "
            f"{self.arena / 1e6:,.1f} MB, beside {self.held / 1e6:,.1f} MB of parameters, states "
            "and inputs",
            "{:>10}{:>9}{:>12}  {:<10}{}".format(*heads),
        ]
        rows: dict[tuple[object, ...], list[BufferView]] = {}
        for b in self.buffers:
            rows.setdefault((b.kernel.rpartition("_")[0], b.dtype, b.elements), []).append(b)
        for same in sorted(rows.values(), key=lambda s: -sum(b.nbytes for b in s)):
            first, total = same[0], sum(b.nbytes for b in same) / 1e6
            made = f"{first.kernel} {' '.join(first.lines[:1])}"
            size = f"{first.elements:>12}  {first.dtype:<10}{made}"
            lines.append(f"{total:>10.2f}{len(same):>9}{size}")
        return "\n".join(lines)


def memory_view(program: Program, plan: BufferPlan) -> MemoryView:
    """The peak of a program whose buffers have their places."""
    buffers = {b.name: b for b in program.buffers if b.name in plan.offsets}
    change = np.zeros(len(program.steps) + 1, np.int64)
    for name, buffer in buffers.items():
        change[plan.spans[name].first] += padded(buffer)
        change[plan.spans[name].last + 1] -= padded(buffer)
    live = change.cumsum()
    peak = int(live.argmax())
    makers: dict[str, tuple[str, tuple[str, ...]]] = {}
    readers: dict[str, dict[str, None]] = {}
    for step in program.steps:
        for call in calls_in(step):
            for argument in call.written:
                lines = tuple(map(str, call.origins))
                makers.setdefault(argument.buffer, (call.kernel.name, lines))
            for argument in call.arguments[: len(call.kernel.inputs)]:
                readers.setdefault(argument.buffer, {})[call.kernel.name] = None
    found = [
        BufferView(
            name,
            b.dtype.name,
            b.size,
            b.nbytes,
            *makers.get(name, ("", ())),
            tuple(readers.get(name, ())),
            plan.spans[name].first,
            plan.spans[name].last,
        )
        for name, b in buffers.items()
        if plan.spans[name].first <= peak <= plan.spans[name].last
    ]
    ordered = tuple(sorted(found, key=lambda b: -b.nbytes))
    held = sum(type_.nbytes for _, type_ in program.leaves)
    by_step = tuple(int(n) for n in live[:-1])
    cut = program.again, program.uncut
    return MemoryView(int(live[peak]), plan.size, held, peak, len(by_step), ordered, by_step, *cut)
