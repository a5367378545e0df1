"""A program with calls that are made again, and readers of what they make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from treadle.kernel import cost
from treadle.kernel.nodes import Buffer
from treadle.kernel.program import (
    Argument,
    Call,
    Phase,
    Program,
    Repeat,
    Rerun,
    Step,
    calls_in,
)
from treadle.memory.uses import NEVER, Name, Slot, Splits, Unit, Uses


class Copies:
    """The program anew: units in their slots, and readers that read copies."""

    def __init__(self, uses: Uses, chosen: Splits, at: Mapping[int, Slot]):
        self.uses, self.at = uses, at
        units = [uses.units[n] for n in at]
        self.moved = {id(u.call) for u in units if u.is_moved(chosen[u.number])}
        self.splits: dict[Name, Slot] = {}
        for number in at:
            unit = uses.units[number]
            self.splits |= {n: chosen[number].get(n, NEVER) for n in unit.writes}

    def program(self, program: Program) -> Program:
        slots: dict[Slot, list[Unit]] = defaultdict(list)
        for number in sorted(self.at):
            slots[self.at[number]].append(self.uses.units[number])
        steps: list[Step] = []
        for position, step in enumerate(program.steps):
            steps += self._phases(slots.get(2 * position - 1, ()), 2 * position - 1)
            steps += self._renamed(step, 2 * position)
        known = {b.name: b for b in program.buffers}
        copies = [replace(self.uses.arena[n], name=_copy(n)) for n in self.splits]
        used = {a.buffer for s in steps for c in calls_in(s) for a in c.arguments}
        used |= known.keys() - self.uses.arena.keys()  # of what is outside everything stays
        kept = [b for n, b in known.items() if n in used]
        inner = [b for n, b in self.uses.arena.items() if n in used and n not in known]
        units = (self.uses.units[n] for n in sorted(self.at))
        again = tuple(self._rerun(u) for u in units if id(u.call) not in self.moved)
        buffers: tuple[Buffer, ...] = (*kept, *copies, *inner)
        changed = program.bindings.with_copies({n: _copy(n) for n in self.splits})
        bindings = changed.restricted(b.name for b in buffers)
        return replace(program, steps=tuple(steps), buffers=buffers, again=again, bindings=bindings)

    def _rerun(self, unit: Unit) -> Rerun:
        waited = [n for n in unit.writes if self.splits[n] != NEVER and n in self.uses.touched]
        return Rerun(
            unit.call.kernel.name,
            tuple(map(str, unit.call.origins)),
            sum(self.uses.nbytes(n) for n in waited),
            cost.flops(unit.call.kernel),
            cost.traffic(unit.call.kernel),
        )

    def _phases(self, units: Iterable[Unit], slot: Slot) -> list[Step]:
        """Units of one slot, each after those whose results it reads."""
        levels: dict[Name, int] = {}
        phases: list[list[Call]] = []
        for unit in units:
            level = max((levels.get(n, 0) for n in unit.reads), default=0)
            levels |= dict.fromkeys(unit.writes, level + 1)
            phases += [[]] * (level >= len(phases))
            read = tuple(self._argument(a, slot) for a in unit.call.read)
            written = tuple(Argument(_copy(a.buffer)) for a in unit.call.written)
            call = replace(unit.call, arguments=(*read, *written), parts=())
            phases[level] = [*phases[level], call]
        return [Phase(tuple(calls)) for calls in phases]

    def _renamed(self, step: Step, slot: Slot) -> list[Step]:
        """A step that reads copies, without what runs later; none if nothing is left."""
        if isinstance(step, Repeat):
            steps = (r for s in step.steps for r in self._renamed(s, slot))
            return [replace(step, steps=tuple(steps))]
        calls = tuple(self._call(c, slot) for c in step.calls if id(c) not in self.moved)
        return [Phase(calls)] if calls else []

    def _call(self, call: Call, slot: Slot) -> Call:
        read = tuple(self._argument(a, slot) for a in call.read)
        return replace(call, arguments=(*read, *call.written), parts=())

    def _argument(self, argument: Argument, slot: Slot) -> Argument:
        is_copy = slot > self.splits.get(argument.buffer, NEVER)
        return replace(argument, buffer=_copy(argument.buffer)) if is_copy else argument


def _copy(name: Name) -> Name:
    return f"{name}.again"
