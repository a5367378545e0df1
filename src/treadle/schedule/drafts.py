"""Kernels before they are finished, in phases and repeats, and calls that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treadle.kernel.held import Passed, Touch
from treadle.kernel.program import Argument, Call, Phase, Repeat, Step
from treadle.schedule.order import Bound, Memo, Order


@dataclass
class RepeatDraft:
    """A repeat whose kernels are not finished."""

    length: int
    reverse: bool
    drafts: list[Draft]
    scope: str = ""  # of the scan whose iterations it makes; the one around it if it is none


Draft = list[Bound] | RepeatDraft


class Finisher:
    """Kernels as calls: what only one of them touches is its own, equal ones are one."""

    def __init__(
        self,
        drafts: list[Draft],
        outside: set[str],
        rows: dict[str, Argument],
        memo: Memo,
        with_parts: bool = False,
    ):
        self.rows, self.memo, self.with_parts = rows, memo, with_parts
        users = Counter(n for bound in _bounds_in(drafts) for n in set(bound.names))
        outside = outside | {a.buffer for a in rows.values()} | set(rows)
        self.own = frozenset(n for n, count in users.items() if count == 1 and n not in outside)

    def steps(self, drafts: list[Draft]) -> list[Step]:
        found: list[Step] = []
        for draft in drafts:
            if isinstance(draft, RepeatDraft):
                inner = tuple(self.steps(draft.drafts))
                found.append(Repeat(draft.length, draft.reverse, inner, draft.scope))
            else:
                calls = tuple(c for c in map(self.call, draft) if c.kernel.outputs)
                found += [Phase(calls)] if calls else []
        return found

    def call(self, bound: Bound) -> Call:
        parts = self._parts(bound) if self.with_parts and bound.fused else ()
        return replace(self._call(bound, self.own), parts=parts)

    def _call(self, bound: Bound, own: frozenset[str]) -> Call:
        kernel, names = self.memo.finished(bound, own)
        arguments = tuple(self.rows.get(n, Argument(n)) for n in names)
        return Call(kernel, arguments, bound.origins)

    def _parts(self, bound: Bound) -> tuple[Call, ...]:
        """Each large result that stays in memory by itself, from others that do."""
        inside = {n for b in bound.fused for n in b.names} & self.own
        least, found = self.memo.target.recomputation.least_bytes, list[Call]()
        sizes = {n: b.nbytes for n, b in zip(bound.names, bound.kernel.buffers, strict=True)}
        for name in dict.fromkeys(n for b in bound.fused for n in b.outputs):  # makers first
            is_made = any(name == a.buffer for c in found for a in c.written)
            if name in inside or sizes.get(name, 0) < least or is_made:
                continue
            order = Order(True, self.memo)
            for b in _makers(bound.fused, name, inside):
                order.add_bound(b)
            bounds = [b for phase in order.phases() for b in phase]
            users = Counter(n for b in bounds for n in set(b.names))
            own = frozenset(n for n in inside if users[n] == 1)
            found += [c for c in (self._call(b, own) for b in bounds) if c.kernel.outputs]
        return tuple(found)


def _makers(parts: Sequence[Bound], name: str, inside: set[str]) -> list[Bound]:
    """The kernels that make a buffer of those that are in memory; others are `inside`."""
    needed, found = {name}, list[Bound]()
    for part in reversed(parts):
        if needed & set(part.outputs):
            found.append(part)
            needed |= set(part.inputs) & inside
    return found[::-1]


def _bounds_in(drafts: list[Draft]) -> list[Bound]:
    found: list[Bound] = []
    for draft in drafts:
        found += _bounds_in(draft.drafts) if isinstance(draft, RepeatDraft) else draft
    return found


def touches(drafts: list[Draft]) -> Iterator[Touch | Passed]:
    """What kernels read and write, each by itself: what fusing hides is still seen."""
    for draft in drafts:
        if isinstance(draft, RepeatDraft):
            yield frozenset(n for bound in _bounds_in(draft.drafts) for n in bound.outputs)
            continue
        for part in (part for bound in draft for part in bound.parts):
            yield Touch(part.kernel.name, part.origins, part.inputs, part.outputs)
