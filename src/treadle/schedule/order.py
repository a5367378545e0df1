"""Which kernels depend on which, which are fused, and when each runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.kernel.nodes import For, Kernel, Multiply, Statement
from treadle.schedule.fuse import fused


@dataclass
class Group:
    """A kernel in the making, and the groups that must come before it, as bits of an integer."""

    kernel: Kernel
    before: int = 0
    direct: set[int] = field(default_factory=set)


@dataclass
class Order:
    """Groups as kernels are added. Positions are kept: a group that was fused away is empty."""

    fuses: bool
    groups: list[Group] = field(default_factory=list)
    writers: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)

    def add(self, kernel: Kernel) -> None:
        direct = self._direct(kernel)
        joined = self._join(kernel, direct) if self.fuses and not kernel.is_whole else None
        if joined is None:
            joined = len(self.groups)
            self.groups.append(Group(kernel))
        self._note(joined, kernel)
        self._put_before(joined, direct - {joined})

    def _direct(self, kernel: Kernel) -> set[int]:
        """Groups that this kernel must follow."""
        found: set[int] = set()
        for buffer in kernel.buffers:
            found.update(self.writers.get(buffer.name, ()))
        for buffer in kernel.outputs:
            found.update(self.readers.get(buffer.name, ()))
        return found

    def _join(self, kernel: Kernel, direct: set[int]) -> int | None:
        """The group that the kernel was fused into, the latest that takes it."""
        near = {g for b in kernel.inputs for g in self.readers.get(b.name, ()) if b.size > 64}
        for position in sorted(direct | near, reverse=True):
            group = self.groups[position]
            if group.kernel.is_whole or any(
                self.groups[d].before >> position & 1 for d in direct if d != position
            ):
                continue
            if position not in direct and (
                has_product(kernel.body) or has_product(group.kernel.body)
            ):
                continue  # what only reads the same does not gain from a product between
            found = fused(group.kernel, kernel, position in direct)
            if found is not None:
                group.kernel = found
                return position
        return None

    def _note(self, position: int, kernel: Kernel) -> None:
        for buffer in kernel.inputs:
            self.readers.setdefault(buffer.name, []).append(position)
        for buffer in kernel.outputs:
            self.writers.setdefault(buffer.name, []).append(position)

    def _put_before(self, position: int, direct: set[int]) -> None:
        """New groups before one, and before all that come after it."""
        self.groups[position].direct |= direct
        found = self.groups[position].before
        for d in direct:
            found |= self.groups[d].before | 1 << d
        if found == self.groups[position].before:
            return
        self.groups[position].before = found
        for group in self.groups:
            if group.before >> position & 1:
                group.before |= found

    def phases(self) -> list[list[Kernel]]:
        """Kernels by when they can run; those that wait for nothing run as late as they may."""
        count = len(self.groups)
        level = [0] * count
        ordered = sorted(range(count), key=lambda i: self.groups[i].before.bit_count())
        first_use: dict[int, int] = {}
        for i in ordered:
            level[i] = 1 + max((level[j] for j in self.groups[i].direct), default=-1)
            for j in self.groups[i].direct:
                first_use[j] = min(level[i], first_use.get(j, level[i]))
        for i in first_use:
            if not self.groups[i].direct:
                level[i] = first_use[i] - 1
        found: list[list[Kernel]] = [[] for _ in range(max(level, default=-1) + 1)]
        for i in sorted(range(count), key=lambda i: (level[i], i)):
            found[level[i]].append(self.groups[i].kernel)
        return [phase for phase in found if phase]


def has_product(body: Sequence[Statement]) -> bool:
    return any(
        isinstance(s, Multiply) or (isinstance(s, For) and has_product(s.body)) for s in body
    )
