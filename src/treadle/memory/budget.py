"""A program that holds fewer bytes: kernels run a second time, shortly before their results are
read again.

What waits from the forward pass to the backward pass is most of what a training step holds. Under
a budget some of it does not wait: its buffer ends with the forward pass, and the call that made it
is made once more before the backward pass reads a copy. It is the same kernel on the same operands,
so that the copy has the same bits, whatever the kernel computes: matmuls, attention, dropout.

Of what lives at the peak that is taken first which saves the most bytes for what
running it again costs; at the end whatever turned out not to be needed is kept after all. The equal
blocks of a model have equal ratios, so that of each the same is recomputed, the first blocks first:
they wait longest.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from treadle.kernel.program import Call, Phase, Program, Repeat, Step, calls_in
from treadle.kernel.target import Target
from treadle.memory.copies import Copies
from treadle.memory.uses import NEVER, Name, Slot, Splits, Unit, Uses


def reduced(program: Program, most: int, target: Target) -> Program:
    """The program with at most that many bytes alive at one time, or the fewest that were found."""
    program = _with_late_updates(program, target)
    search = _Search(Uses(program, target))
    search.run(most)
    if search.state.peak > most:  # calls one by one take less, and threads share fewer of them
        tight = {int(slot + 1) // 2 for slot in np.flatnonzero(search.state.live > most)}
        in_turn = _one_by_one(program, tight, target)
        again = _Search(Uses(in_turn, target))
        again.run(most)
        if again.state.peak < search.state.peak:
            program, search = in_turn, again
    return Copies(search.uses, search.chosen, search.state.at).program(program)


def _one_by_one(program: Program, tight: set[int], target: Target) -> Program:
    """Large calls of some steps in phases of their own: first who leaves least behind."""
    last: dict[Name, int] = {}
    for position, step in enumerate(program.steps):
        last |= {a.buffer: position for c in calls_in(step) for a in c.arguments}
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        if isinstance(step, Repeat) or position not in tight:
            steps.append(step)
            continue
        left: list[tuple[int, int, Call]] = []  # bytes that a call makes, less those that it frees
        for i, call in enumerate(step.calls):
            pairs = list(zip(call.arguments, call.kernel.buffers, strict=True))
            if sum(b.nbytes for _, b in pairs) >= target.recomputation.least_bytes:
                ended = sum(b.nbytes for a, b in pairs if last[a.buffer] == position)
                made = sum(b.nbytes for b in call.kernel.outputs)
                left.append((made - ended, i, call))
        large = [call for _, _, call in sorted(left, key=lambda found: found[:2])]
        small = tuple(c for c in step.calls if not any(c is other for other in large))
        steps += [Phase(small)] if small else []
        steps += [Phase((call,)) for call in large]
    return replace(program, steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class _State:
    """What a choice gives: in which slot each unit is run again, and what is touched then."""

    at: Mapping[int, Slot]
    added: Mapping[Name, Sequence[Slot]]
    live: np.ndarray  # bytes, by slot

    @property
    def peak(self) -> int:
        return int(self.live.max(initial=0))


@dataclass(frozen=True, slots=True)
class _Candidate:
    units: tuple[tuple[Unit, dict[Name, Slot]], ...]
    saved: int
    price: int


class _Search:
    """Units chosen one by one, at the peak of those before."""

    def __init__(self, uses: Uses):
        self.uses = uses
        self.chosen: Splits = {}
        self.base = np.zeros(uses.slots + 1, np.int64)
        for name, span in uses.spans.items():
            if name in uses.arena:
                self.base[2 * span.first] += uses.nbytes(name)
                self.base[2 * span.last + 1] -= uses.nbytes(name)
        self.worthy = [(u, uses.last(u)) for u in uses.units if uses.waits(u)]
        state = self.placed(self.chosen)
        assert state is not None
        self.state = state

    def run(self, most: int) -> None:
        """Choose until no slot has more bytes, or nothing helps in the one that has most.

        At a peak all that is needed there is chosen together, or half of it if that does not help.
        """
        refused: set[tuple[int, Slot]] = set()  # what saves nothing in a slot
        best, best_state = dict(self.chosen), self.state
        trials, slot, batch = self.uses.sizes.trials, -1, list[_Candidate]()
        while self.state.peak > most and trials:
            if not batch:
                slot = int(self.state.live.argmax())
                batch = self._candidates(slot, int(self.state.live[slot]) - most, refused)
            if not batch:
                break
            wanted, trials = _merged(self.chosen, batch), trials - 1
            state = self.placed(wanted)
            if state is not None and state.live[slot] < self.state.live[slot]:
                self.chosen, self.state, batch = wanted, state, []
                if state.peak < best_state.peak:
                    best, best_state = dict(wanted), state
                continue
            if len(batch) == 1:
                refused.add((batch[0].units[0][0].number, slot))
            batch = batch[: len(batch) // 2]
        self.chosen, self.state = best, best_state
        self._give_up_needless(max(most, self.state.peak))

    def _give_up_needless(self, most: int) -> None:
        """Without units that later choices made superfluous: many together, the dearest first."""
        dearest = sorted(self.chosen, key=lambda n: -self._price_of(n, self.chosen[n]))
        size = max(1, len(dearest) // 8)
        pending = [dearest[i : i + size] for i in range(0, len(dearest), size)][::-1]
        for _ in range(self.uses.sizes.trials):
            if not pending:
                break
            group = pending.pop()
            fewer = {n: s for n, s in self.chosen.items() if n not in group}
            state = self.placed(fewer)
            if state is not None and state.peak <= most and self._is_cheaper(state, fewer):
                self.chosen, self.state = fewer, state
            elif len(group) > 1:
                half = len(group) // 2
                pending += [group[half:], group[:half]]
        self.chosen = {n: s for n, s in self.chosen.items() if n in self.state.at}

    def _is_cheaper(self, state: _State, chosen: Splits) -> bool:
        return self._price(state, chosen) < self._price(self.state, self.chosen)

    def _price(self, state: _State, chosen: Splits) -> int:
        return sum(self._price_of(n, chosen[n]) for n in state.at)

    def _price_of(self, number: int, splits: Mapping[Name, Slot]) -> int:
        unit = self.uses.units[number]
        share = self.uses.sizes.moved_share if unit.is_moved(splits) else 1
        return 1 + unit.price // share

    def placed(self, chosen: Splits) -> _State | None:
        """When each unit is run again, latest makers first: they say when others are read.

        None where an operand would be gone, or changed.
        """
        uses, change = self.uses, self.base.copy()
        at: dict[int, Slot] = {}
        added: dict[Name, list[Slot]] = defaultdict(list)
        for number in sorted(chosen, reverse=True):
            unit, splits = uses.units[number], chosen[number]
            late = {n: self._late(n, splits.get(n, NEVER), added) for n in unit.writes}
            slots = [min(found) for found in late.values() if found]
            if not slots:
                continue
            slot = min(slots)
            at[number] = slot = slot if slot % 2 else slot - 1
            for name, found in late.items():
                self._split(change, name, slot, found, added)
                if unit.is_moved(splits):
                    change[2 * unit.step] -= uses.nbytes(name)
                    change[2 * unit.step + 1] += uses.nbytes(name)
            for name in unit.reads:
                if not uses.is_unchanged(name, unit, slot):
                    return None
                if name in uses.arena:
                    added[name].append(slot)
        again = {n for number in at for n in uses.units[number].writes}
        for name in added.keys() - again:
            if name not in uses.touched:
                return None  # it was never in memory by itself
            self._lengthen(change, name, max(added[name]))
        return _State(at, added, change.cumsum()[:-1])

    def _late(self, name: Name, split: Slot, added: Mapping[Name, list[Slot]]) -> list[Slot]:
        touched = (*self.uses.touched.get(name, ()), *added.get(name, ()))
        return [t for t in touched if t > split]

    def _split(
        self,
        change: np.ndarray,
        name: Name,
        slot: Slot,
        late: list[Slot],
        added: Mapping[Name, list[Slot]],
    ) -> None:
        """The original ends where it is read last itself; a copy lives from a slot on."""
        size = self.uses.nbytes(name)
        change[slot] += size
        change[max(late, default=slot) + 1] -= size
        own = self.uses.touched.get(name)
        if own and late:
            early = [t for t in (*own, *added.get(name, ())) if t not in late]
            change[own[-1] + 1] += size
            change[max(early) + 1] -= size
        elif own:
            self._lengthen(change, name, max((*own, *added.get(name, ()))))

    def _lengthen(self, change: np.ndarray, name: Name, slot: Slot) -> None:
        last = self.uses.touched[name][-1]
        if slot > last:
            change[last + 1] += self.uses.nbytes(name)
            change[slot + 1] -= self.uses.nbytes(name)

    def _candidates(
        self, slot: Slot, wanted: int, refused: set[tuple[int, Slot]]
    ) -> list[_Candidate]:
        """What saves the most bytes in a slot for its price, as many as are wanted there.

        Of equals those that wait longest.
        """
        found = list[_Candidate]()
        for unit, last in self.worthy:
            if not 2 * unit.step <= slot < last:
                continue
            if unit.number in self.chosen or (unit.number, slot) in refused:
                continue
            candidate = self._candidate(unit, slot)
            if candidate is not None and candidate.saved > 0:
                found.append(candidate)
        found.sort(key=lambda c: c.price / c.saved)
        saved = [0, *accumulate(c.saved for c in found)]
        return found[: bisect.bisect_left(saved, wanted)]

    def _candidate(self, unit: Unit, peak: Slot) -> _Candidate | None:
        """A unit with all that has to be run again for it, if a result waits over a slot."""
        splits: dict[Name, Slot] = {}
        made, saved, first = 2 * unit.step, 0, NEVER
        for name in unit.writes:
            touched = sorted((*self.uses.touched.get(name, ()), *self.state.added.get(name, ())))
            before = [t for t in touched if t < peak or t == made == peak]
            after = touched[len(before) :]
            if before and after and after[0] - 1 > peak:
                splits[name] = before[-1]
                saved, first = saved + self.uses.nbytes(name), min(first, after[0])
        if saved < self.uses.least or (made >= peak and not unit.is_moved(splits)):
            return None
        found = self._closure(unit, splits, first if first % 2 else first - 1, peak)
        if found is None:
            return None
        units, longer = found
        price = sum(self._price_of(u.number, splits) for u, splits in units)
        return _Candidate(units, saved - longer, price)

    def _closure(
        self, unit: Unit, splits: dict[Name, Slot], slot: Slot, peak: Slot
    ) -> tuple[tuple[tuple[Unit, dict[Name, Slot]], ...], int] | None:
        """What has to be run again with a unit in a slot, and bytes that wait for it at the peak.

        None where an operand has changed since.
        """
        uses, found, longer = self.uses, {unit.number: (unit, splits)}, 0
        pending = [unit]
        while pending:
            current = pending.pop()
            for name in current.reads:
                if not uses.is_unchanged(name, current, slot):
                    return None
                if name not in uses.arena:
                    continue
                touched = (*uses.touched.get(name, ()), *self.state.added.get(name, ()))
                last = max(touched, default=-1)
                if last >= slot:
                    continue
                maker = uses.maker.get(name)
                is_small = last >= 0 and uses.nbytes(name) < uses.least
                if maker is None and last < 0:
                    return None
                if maker is None or is_small or last >= peak or maker.number in self.chosen:
                    longer += uses.nbytes(name) if last < peak else 0
                elif maker.number in found:
                    found[maker.number][1][name] = last
                else:
                    found[maker.number] = maker, {name: last}
                    pending.append(maker)
        return tuple(found.values()), longer


def _merged(chosen: Splits, candidates: Sequence[_Candidate]) -> Splits:
    """What was chosen and more; of results that both split, the earlier end counts."""
    found = dict(chosen)
    for candidate in candidates:
        for unit, splits in candidate.units:
            known = found.get(unit.number, {})
            ends = {n: min(known.get(n, NEVER), splits.get(n, NEVER)) for n in known | splits}
            found[unit.number] = ends
    return found


def _with_late_updates(program: Program, target: Target) -> Program:
    """The program with small updates in place at its end, where nothing reads them before.

    A counter of random bits that is moved on early could not be read a second time.
    """
    inside = {n for n, _ in program.leaves}
    last_touch: dict[Name, int] = {}
    last_write: dict[Name, int] = {}
    for position, step in enumerate(program.steps):
        for call in calls_in(step):
            last_touch |= dict.fromkeys((a.buffer for a in call.arguments), position)
            last_write |= dict.fromkeys((a.buffer for a in call.written), position)
    steps, late = list[Step](), list[Call]()
    for position, step in enumerate(program.steps):
        calls = step.calls if isinstance(step, Phase) else ()
        moved = [
            c
            for c in calls
            if all(a.buffer in inside and last_touch[a.buffer] == position for a in c.written)
            and all(last_write.get(a.buffer, -1) <= position for a in c.read)
            and sum(b.nbytes for b in c.kernel.buffers) < target.recomputation.least_bytes
        ]
        late += moved
        stay = tuple(c for c in calls if not any(c is m for m in moved))
        steps += [step] if isinstance(step, Repeat) else [Phase(stay)] if stay else []
    return replace(program, steps=(*steps, Phase(tuple(late)))) if late else program
