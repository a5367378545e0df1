"""Statements of a group of threads: loops shared out, and barriers where threads meet in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treadle.kernel.access import accesses
from treadle.kernel.index import Var
from treadle.kernel.nodes import (
    Accumulate,
    Barrier,
    For,
    Kernel,
    Role,
    Statement,
    Update,
)
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import map_statements
from treadle.schedule.mapping.shapes import is_parallel, is_sum, nested
from treadle.schedule.mapping.staging import lanes_of


def in_order(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Statements of one thread, which runs every loop in order."""
    return map_statements(
        body, lambda s: [replace(s, role=Role.SEQUENTIAL) if isinstance(s, For) else s]
    )


def nest(
    loops: Sequence[Var], role: Role, body: Sequence[Statement], lanes: int = 1, unroll: int = 1
) -> tuple[Statement, ...]:
    """Loops of one role around statements; a thread takes lanes of the innermost."""
    inner = tuple(body)
    for i, var in enumerate(reversed(loops)):
        inner = (For(var, role, inner, None, 1 if i else lanes, 1 if i else unroll),)
    return inner


@dataclass
class Group:
    """What the threads of a group do with statements of theirs, one after the other.

    A barrier stands before a statement that touches what other threads may have written since the
    last one, or writes what they may have read.
    """

    kernel: Kernel
    mapping: Mapping
    share: int  # threads
    is_aligned: bool
    is_cooperative: bool = False
    ignored: frozenset[str] = frozenset()  # buffers of which nothing is read back
    held: dict[str, int] = field(default_factory=dict)  # rows of sums, and their lanes
    in_shared: frozenset[str] = frozenset()  # rows that are staged in shared memory
    written: set[str] = field(default_factory=set)  # since the last barrier
    touched: set[str] = field(default_factory=set)

    @property
    def role(self) -> Role:
        return Role.SUBGROUP if self.share == self.mapping.warp else Role.GROUP

    def statements(
        self, body: Sequence[Statement], staged: Sequence[Statement] | None = None
    ) -> list[Statement]:
        """The statements mapped; `staged` are the same, with rows where they are staged."""
        found: list[Statement] = []
        for s, moved in zip(body, body if staged is None else staged, strict=True):
            if isinstance(s, For) and not is_parallel(s) and not is_sum(s):
                found += self._in_sequence(s)
                continue
            found += self._barrier_before(s)
            if isinstance(s, For) and isinstance(moved, For):
                found += self._shared(s, moved)
            else:
                found.append(moved)
        return found

    def barrier(self) -> list[Statement]:
        """A barrier, if anything was touched since the last."""
        if not self.written and not self.touched:
            return []
        self.written, self.touched = set(), set()
        return [Barrier(self.role)]

    def _barrier_before(self, statement: Statement) -> list[Statement]:
        every = [a for a in accesses([statement]) if a.buffer not in self.ignored]
        touched = {a.buffer for a in every}
        written = {a.buffer for a in every if a.writes}
        meets = touched & self.written or written & self.touched
        found = self.barrier() if meets else []
        self.touched |= touched
        self.written |= written
        return found

    def _in_sequence(self, loop: For) -> list[Statement]:
        """Iterations one after the other, each the whole group's."""
        before = self.barrier()
        body = self.statements(loop.body)
        body += self.barrier()
        return [*before, replace(loop, role=Role.SEQUENTIAL, body=tuple(body))]

    def _lanes(self, loop: For, share: int) -> int:
        if not self.is_aligned:
            return 1
        held = {self.held[a.buffer] for a in accesses([loop]) if a.buffer in self.held}
        return held.pop() if held else lanes_of(self.kernel, loop, share, self.mapping)[2]

    def _shared(self, loop: For, moved: For) -> tuple[Statement, ...]:
        """Iterations of a loop shared out among threads; among warps if they are few and long."""
        loops, _ = nested(loop)
        body = nested(moved)[1]
        role, share = self.role, self.share
        if self.is_cooperative and role is Role.GROUP:
            if is_parallel(loop) and self._is_for_warps(loops, body):
                return self._by_warps(loops, body)
            if is_sum(loop) and _count(loops) <= 2 * self.mapping.warp:
                # So few that each warp sums all of them: nobody waits for the others.
                role, share = Role.SUBGROUP, self.mapping.warp
        unroll = self.mapping.ahead if _touches(moved, self.in_shared) else 1
        return nest(loops, role, in_order(body), self._lanes(loop, share), unroll)

    def _is_for_warps(self, loops: Sequence[Var], body: Sequence[Statement]) -> bool:
        """Whether iterations are fewer than threads, and each is one sum worth sharing."""
        inner = [s for s in body if isinstance(s, For)]
        if len(inner) != 1 or not is_sum(inner[0]):
            return False
        if any(isinstance(s, (Update, Accumulate)) for s in body):
            return False
        depth = _count(nested(inner[0])[0])
        return 2 * _count(loops) <= self.share and depth >= self.mapping.warp

    def _by_warps(self, loops: Sequence[Var], body: Sequence[Statement]) -> tuple[Statement, ...]:
        """Each iteration a warp's: one thread stores what all of the warp may have read."""
        warp = replace(
            self, share=self.mapping.warp, is_cooperative=False, written=set(), touched=set()
        )
        return nest(loops, Role.GROUP, warp.statements(body))


def _touches(loop: For, buffers: frozenset[str]) -> bool:
    return bool(buffers) and any(a.buffer in buffers for a in accesses([loop]))


def _count(loops: Sequence[Var]) -> int:
    return math.prod(v.extent for v in loops)
