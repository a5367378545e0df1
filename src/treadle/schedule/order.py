"""Which kernels depend on which, which are fused, and when each runs; equal work is done once.

A model's layers give the same kernels again and again on other buffers. What is done to a kernel
(fusing, finishing, checking) depends on the kernel alone, and on which buffers two kernels share:
kernels are apart from the buffers they are used on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from treadle.base.origin import Origin
from treadle.base.quick import quick
from treadle.kernel.nodes import Kernel, Matmul
from treadle.kernel.rowsums import row_sums_of
from treadle.kernel.target import CPU, Target
from treadle.kernel.traverse import walk
from treadle.kernel.verify import verify
from treadle.schedule.finish import finished
from treadle.schedule.fuse import fused, is_serial, localised, outer_iterations, spread, staged
from treadle.schedule.nests import anonymous, with_buffer_names

LEAST_DELAYED = 64 << 10  # bytes: what is smaller is not worth another try


@quick
@dataclass(frozen=True, slots=True)
class Bound:
    """A kernel, and the buffers it is used on in the order of its own.

    `fused` are the kernels that it was fused from, if there were several.
    """

    kernel: Kernel
    names: tuple[str, ...]
    origins: tuple[Origin, ...]
    fused: tuple[Bound, ...] = ()

    @property
    def parts(self) -> tuple[Bound, ...]:
        """The kernels that it was fused from, or itself."""
        return self.fused or (self,)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.names[: len(self.kernel.inputs)]

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.names[len(self.kernel.inputs) :]


Fused = tuple[Kernel, tuple[int, ...]]
How = tuple[tuple[int, ...], bool, bool]  # buffers that both have; needed; as one iteration


@dataclass
class Memo:
    """What was done before. Kernels are known by identity: equal ones are made one first."""

    target: Target = CPU
    kernels: dict[Kernel, Kernel] = field(default_factory=dict)
    pairs: dict[tuple[int, int, How], Fused | None] = field(default_factory=dict)
    calls: dict[tuple[int, tuple[int, ...]], Fused] = field(default_factory=dict)

    def bound(self, kernel: Kernel) -> Bound:
        plain = anonymous(kernel)
        known = self.kernels.setdefault(plain, plain)
        # Equality ignores whether a kernel stays by itself.
        if known.is_standalone != plain.is_standalone:
            known = plain
        return Bound(known, tuple(b.name for b in kernel.buffers), kernel.origins)

    def fused(self, first: Bound, second: Bound, is_needed: bool, is_single: bool) -> Bound | None:
        """Both as one, if that pays. `is_single`: as one iteration."""
        positions = {n: i for i, n in enumerate(first.names)}
        shared = tuple(positions.get(n, -1) for n in second.names)
        key = (id(first.kernel), id(second.kernel), (shared, is_needed, is_single))
        if key not in self.pairs:
            self.pairs[key] = self._fused(first.kernel, second.kernel, key[2])
        found = self.pairs[key]
        if found is None:
            return None
        every = first.names + second.names
        origins = tuple(dict.fromkeys((*first.origins, *second.origins)))
        parts = (*first.parts, *second.parts)
        return Bound(found[0], tuple(every[i] for i in found[1]), origins, parts)

    def _fused(self, first: Kernel, second: Kernel, how: How) -> Fused | None:
        """Both kernels as one, and where each of its buffers is among the buffers of both."""
        shared, is_needed, is_single = how
        every = [b.name for b in first.buffers]
        every += [every[at] if at >= 0 else f"q{len(every) + i}" for i, at in enumerate(shared)]
        own = zip(second.buffers, every[len(first.buffers) :], strict=True)
        renamed = with_buffer_names(second, {b.name: name for b, name in own})
        found = fused(first, renamed, is_needed, is_single, self.target)
        if found is None:
            return None
        # Names that the next fusing cannot meet.
        return anonymous(found), tuple(every.index(b.name) for b in found.buffers)

    def finished(self, bound: Bound, own: frozenset[str]) -> tuple[Kernel, tuple[str, ...]]:
        """The kernel as it is rendered, outputs of its own inside; and its buffers."""
        positions = tuple(i for i, n in enumerate(bound.names) if n in own)
        key = (id(bound.kernel), positions)
        if key not in self.calls:
            names = {bound.kernel.buffers[i].name for i in positions}
            outputs = {b.name for b in bound.kernel.outputs}
            kernel = self._localised(bound.kernel, names & outputs)
            order = {b.name: i for i, b in enumerate(bound.kernel.buffers)}
            done = verify(finished(anonymous(kernel), self.target))
            known = self.kernels.setdefault(done, done)
            self.calls[key] = known, tuple(order[b.name] for b in kernel.buffers)
        done, order_ = self.calls[key]
        return done, tuple(bound.names[i] for i in order_)

    def _localised(self, kernel: Kernel, names: set[str]) -> Kernel:
        """Outputs of its own inside: a thread's memory, or what a block's shared memory holds."""
        if not self.target.is_spmd:
            return localised(spread(kernel, self.target.fusion.shared_iterations), names)
        rows = row_sums_of(kernel)
        if rows is not None:
            return localised(kernel, names, rows)
        if is_serial(kernel) or kernel.is_standalone:
            return kernel
        iterations = outer_iterations(kernel)
        room, own = self.target.fusion.shared_memory, set[str]()
        for buffer in sorted(kernel.outputs, key=lambda b: b.nbytes):
            held = buffer.held(self.target.word) // iterations
            if buffer.name in names and held <= room:
                own.add(buffer.name)
                room -= held
        found = localised(kernel, own)
        return staged(found, room) if self.target.is_small else found


@dataclass
class Group:
    """A kernel in the making, and the groups that must come before it, as bits of an integer."""

    bound: Bound
    before: int = 0
    direct: set[int] = field(default_factory=set)
    level: int = 0  # kernels in a row that it waits for, as far as known
    is_gone: bool = False  # fused into another


@dataclass
class Order:
    """Groups as kernels are added. Positions stay: a group that was fused away is empty."""

    fuses: bool
    memo: Memo
    repeats: bool = False  # whether its kernels are those of each iteration of a loop
    groups: list[Group] = field(default_factory=list)
    writers: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)

    def add(self, *kernels: Kernel, after: str | None = None) -> None:
        """Kernels in their order; `after` is a buffer that must be there before they run."""
        for kernel in kernels:
            self.add_bound(self.memo.bound(kernel), after)

    def add_bound(self, bound: Bound, after: str | None = None) -> None:
        direct, awaited = self._direct(bound), set(self.writers.get(after or "", ()))
        may_join = self.fuses and not bound.kernel.is_standalone
        joined = self._join(bound, direct, awaited) if may_join else None
        is_new = joined is None
        if joined is None:
            joined = len(self.groups)
            self.groups.append(Group(bound))
        self._note(joined, bound)
        self._put_before(joined, (direct | awaited) - {joined}, is_new)

    def _direct(self, bound: Bound) -> set[int]:
        """Groups that this kernel must follow."""
        found: set[int] = set()
        for name in bound.names:
            found.update(self.writers.get(name, ()))
        for name in bound.outputs:
            found.update(self.readers.get(name, ()))
        return found

    def _join(self, bound: Bound, direct: set[int], awaited: set[int]) -> int | None:
        """The group that the kernel was fused into, the latest that takes it.

        Groups that it waits for without needing them are no reason to fuse.
        """
        kernel = bound.kernel
        least = self.memo.target.fusion.shared_input
        large = (n for n, b in zip(bound.inputs, kernel.inputs, strict=True) if b.size > least)
        sharing = {g for n in large for g in self.readers.get(n, ())}
        candidates = [
            p
            for p in sorted(direct | sharing, reverse=True)
            if self._may_join(p, kernel, direct) and not self._precedes(p, awaited)
        ]
        if self.memo.target.is_small:  # what is needed before what only reads the same
            candidates.sort(key=lambda p: p not in direct)
        for is_single in (False,) if self.memo.target.has_launches else (False, True):
            for position in candidates:
                group = self.groups[position]
                if is_single and self._delays(position, direct):
                    continue
                found = self.memo.fused(group.bound, bound, position in direct, is_single)
                if found is not None and not self._holds_up(found, position, direct):
                    group.bound = found
                    return position
        return None

    def _delays(self, position: int, direct: set[int]) -> bool:
        """Whether a kernel that joins a group lets the group wait, or waits for it itself.

        As one iteration of one thread that does not pay: others wait longer.
        """
        group = self.groups[position]
        others = max((self.groups[d].level for d in direct if d != position), default=-1)
        return others >= group.level or (position not in direct and group.level > others + 1)

    def _holds_up(self, found: Bound, position: int, direct: set[int]) -> bool:
        """Whether a block's small work would wait for more than it did: others may need it soon."""
        if not self.memo.target.is_small or outer_iterations(found.kernel) > 1:
            return False
        before = self.groups[position].before
        others = [d for d in direct if d != position and not before >> d & 1]
        return any(self.groups[d].direct for d in others)

    def _precedes(self, position: int, others: set[int]) -> bool:
        """Whether a group has to run before some of the others."""
        bit = 1 << position
        return any(self.groups[d].before & bit for d in others if d != position)

    def _may_join(self, position: int, kernel: Kernel, direct: set[int]) -> bool:
        group = self.groups[position]
        if group.bound.kernel.is_standalone or self._precedes(position, direct):
            return False
        # What only reads the same does not gain from a matmul between.
        both = walk(kernel.body + group.bound.kernel.body)
        return position in direct or not any(isinstance(s, Matmul) for s in both)

    def _note(self, position: int, bound: Bound) -> None:
        for name in bound.inputs:
            self.readers.setdefault(name, []).append(position)
        for name in bound.outputs:
            self.writers.setdefault(name, []).append(position)

    def _put_before(self, position: int, direct: set[int], is_new: bool) -> None:
        """New groups before one, and before all that come after it: none, if it is new.

        Positions do not tell what comes after what: a kernel may have joined an earlier group.
        """
        group = self.groups[position]
        group.direct |= direct
        group.level = max([group.level, *(self.groups[d].level + 1 for d in direct)])
        found = group.before
        for d in direct:
            found |= self.groups[d].before | 1 << d
        if found == group.before:
            return
        group.before = found
        if is_new:
            return
        bit = 1 << position
        for other in self.groups:
            if other.before & bit:
                other.before |= found

    def _merge(self) -> None:
        """Groups that need each other become one, where kernels that came later made it possible.

        Only while no third group must run between them.
        """
        pairs = [(a, b) for b, g in enumerate(self.groups) for a in g.direct]
        while pairs:
            a, b = pairs.pop()
            first, second = self.groups[a], self.groups[b]
            if first.is_gone or second.is_gone or a not in second.direct:
                continue
            kernel = second.bound.kernel
            if kernel.is_standalone or not self._may_join(a, kernel, second.direct):
                continue
            found = self.memo.fused(first.bound, second.bound, True, False)
            if found is not None and self._is_sooner(found, a, b):
                second.bound, second.direct = found, (second.direct | first.direct) - {a}
                second.before = (second.before | first.before) & ~(1 << a)
                first.is_gone = True
                self._replace(a, b)
                pairs += [(d, b) for d in second.direct]
                pairs += [(b, i) for i, g in enumerate(self.groups) if b in g.direct]

    def _is_sooner(self, found: Bound, a: int, b: int) -> bool:
        """Whether two groups as one are done sooner: rows; a block's work, if all wait for it."""
        if outer_iterations(found.kernel) > 1:
            return True
        others = {d for d in self.groups[b].direct if d != a}
        is_free = not any(a in g.direct for i, g in enumerate(self.groups) if i != b)
        level = self._levels()
        if is_free and level[a] > max((level[d] for d in others), default=-1):
            return True
        return not self._holds_up(found, a, self.groups[b].direct)

    def _ordered(self) -> list[int]:
        """Groups that are there, each after all that come before it."""
        there = [i for i, g in enumerate(self.groups) if not g.is_gone]
        return sorted(there, key=lambda i: self.groups[i].before.bit_count())

    def _levels(self) -> list[int]:
        """Kernels in a row that each group waits for."""
        level = [0] * len(self.groups)
        for i in self._ordered():
            level[i] = 1 + max((level[j] for j in self.groups[i].direct), default=-1)
        return level

    def _replace(self, old: int, new: int) -> None:
        """Whatever came after one group comes after another, and after all before that."""
        for group in self.groups:
            if old in group.direct:
                group.direct = (group.direct - {old}) | {new}
            if group is not self.groups[new] and group.before >> old & 1:
                group.before |= self.groups[new].before | 1 << new
                group.before &= ~(1 << old)
        for users in (*self.readers.values(), *self.writers.values()):
            users[:] = [new if i == old else i for i in users]

    def phases(self) -> list[list[Bound]]:
        """Kernels by when they can run; those that wait for nothing run as late as they may."""
        counts_launches = self.repeats and self.memo.target.has_launches
        if self.fuses and (self.memo.target.is_small or counts_launches):
            self._merge()
        level, ordered = self._levels(), self._ordered()
        first_use: dict[int, int] = {}
        for i in ordered:
            for j in self.groups[i].direct:
                first_use[j] = min(level[i], first_use.get(j, level[i]))
        for i in first_use:
            # Equal kernels of one phase share a launch: what only reads leaves comes first.
            bound = self.groups[i].bound
            is_first = self.memo.target.has_launches and bound.inputs and not self._decodes(bound)
            if not self.groups[i].direct and not is_first:
                level[i] = first_use[i] - 1
        if not self.memo.target.is_small:
            level = self._later(level, ordered)
        found: list[list[Bound]] = [[] for _ in range(max(level, default=-1) + 1)]
        for i in sorted(ordered, key=lambda i: (level[i], i)):
            found[level[i]].append(self.groups[i].bound)
        return [phase for phase in found if phase]

    def _decodes(self, bound: Bound) -> bool:
        """Whether a kernel's results are far larger than what it reads, and should live shortly."""
        sizes, kernel = self.memo.target.materialization, bound.kernel
        written = sum(b.nbytes for b in kernel.outputs)
        read = sum(b.nbytes for b in kernel.inputs)
        return written >= sizes.least_recomputed and read <= sizes.decoded_part * written

    def _later(self, level: list[int], ordered: Sequence[int]) -> list[int]:
        """Levels at which equal kernels share launches, unless too much lives longer for it."""
        target, found = self.memo.target, list(level)
        delayed = target.fusion.delayed_bytes
        self._put_off(found, ordered, delayed)
        if not target.has_launches:
            return found
        least, room = self._peak(level), target.arena
        most = least + max(least // room.part, room.nbytes)
        while delayed and self._peak(found) > most:
            # What is smaller may still live longer: sums of many parts are.
            delayed = delayed // 2 if delayed > LEAST_DELAYED else 0
            found = list(level)
            self._put_off(found, ordered, delayed)
        return found

    def _peak(self, level: Sequence[int]) -> int:
        """The most bytes that live at one level, of what groups write and read."""
        sizes = {
            n: b.nbytes
            for g in self.groups
            for n, b in zip(g.bound.names, g.bound.kernel.buffers, strict=True)
        }
        change = [0] * (max(level, default=0) + 2)
        for name, writers in self.writers.items():
            at = [level[g] for g in (*writers, *self.readers.get(name, ()))]
            change[min(at)] += sizes.get(name, 0)
            change[max(at) + 1] -= sizes.get(name, 0)
        return max(accumulate(change))

    def _put_off(self, level: list[int], ordered: Sequence[int], delayed: int) -> None:
        """Later, where nothing large lives longer for it.

        Equal kernels then share a launch in one phase; without launches what is large lives
        shorter.
        """
        has_launches, sizes = self.memo.target.has_launches, self.memo.target.fusion
        users: dict[int, list[int]] = {}
        for i in ordered:
            for j in self.groups[i].direct:
                users.setdefault(j, []).append(i)
        last = max(level, default=0)
        for i in reversed(ordered):
            bound = self.groups[i].bound
            if not self.groups[i].direct or (has_launches and bound.kernel.is_standalone):
                continue
            made = max(b.nbytes for b in bound.kernel.outputs)
            if not has_launches and (i not in users or made < sizes.moved_bytes):
                continue
            limit = min((level[u] - 1 for u in users.get(i, ())), default=last)
            light = delayed if has_launches else made // 8
            given = zip(bound.inputs, bound.kernel.inputs, strict=True)
            large = [n for n, b in given if b.nbytes > light and n in self.writers]
            is_kept = all(any(level[r] >= limit for r in self.readers[n] if r != i) for n in large)
            if limit > level[i] and is_kept:
                level[i] = limit
