"""What a program touches and when, and which of its calls can be made a second time.

Time is counted in slots: step s of the program is slot 2s, and what is run again before it is in
slot 2s − 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from treadle.kernel import cost
from treadle.kernel.program import Call, Program, Repeat, Step, calls_in
from treadle.kernel.target import Target
from treadle.memory.plan import lifetimes, padded

Slot = int
Name = str
NEVER = 1 << 60
Splits = dict[int, dict[Name, Slot]]  # by unit: the last slot in which a result itself is read


@dataclass(frozen=True, slots=True)
class Unit:
    """A call that can be made once more, by its number in the order of the program."""

    number: int
    call: Call
    step: int
    reads: tuple[Name, ...]
    writes: tuple[Name, ...]
    price: int  # modelled time
    is_part: bool  # of a call that does more

    def is_moved(self, splits: Mapping[Name, Slot]) -> bool:
        """Whether nothing reads its results before it is run again: it need not run before."""
        return not self.is_part and all(splits.get(n) == 2 * self.step for n in self.writes)


class Uses:
    """What a program touches and when, and what could be run again."""

    def __init__(self, program: Program, target: Target):
        self.sizes, self.least = target.recomputation, target.recomputation.least_bytes
        self.costs = target.costs
        outside = {n for n, _ in program.leaves} | {n for n, _ in program.constants}
        outside |= {name for _, name, _ in program.outputs}
        self.spans, self.slots = lifetimes(program), 2 * len(program.steps)
        known = {b.name: b for b in program.buffers}
        self.arena = {n: b for n, b in known.items() if n in self.spans and n not in outside}
        self.arena = {n: b for n, b in self.arena.items() if b.nbytes}
        self.touched: dict[Name, list[Slot]] = defaultdict(list)
        self.written: dict[Name, list[Slot]] = defaultdict(list)
        self.units: list[Unit] = []
        self.maker: dict[Name, Unit] = {}
        self._prices: dict[int, int] = {}
        self._nbytes: dict[Name, int] = {}
        for position, step in enumerate(program.steps):
            self._note(position, step)
        self._drop_partial()

    def _note(self, position: int, step: Step) -> None:
        touched = {a.buffer for c in calls_in(step) for a in c.arguments}
        for name in touched:
            self.touched[name].append(2 * position)
        for name in {a.buffer for c in calls_in(step) for a in c.written}:
            self.written[name].append(2 * position)
        if isinstance(step, Repeat):
            return
        for call in step.calls:
            for part in call.parts or (call,):
                self._add(part, position, bool(call.parts))

    def _add(self, call: Call, position: int, is_part: bool) -> None:
        """A call as a unit, if nothing that it writes is read by itself or large without use."""
        reads = tuple(dict.fromkeys(a.buffer for a in call.read))
        writes = tuple(a.buffer for a in call.written)
        is_plain = not set(reads) & set(writes) and not any(a.row for a in call.arguments)
        if not is_plain or any(n in self.maker for n in writes):
            for name in writes:
                self.maker.pop(name, None)
            return
        price = self._price(call)
        unit = Unit(len(self.units), call, position, reads, writes, price, is_part)
        self.units.append(unit)
        for name, buffer in zip(writes, call.kernel.outputs, strict=True):
            self.maker[name] = unit
            if name not in self.touched:  # between the parts of a call
                self.arena.setdefault(name, replace(buffer, name=name))

    def _price(self, call: Call) -> int:
        key = id(call.kernel)
        if key not in self._prices:
            is_narrow = any(b.dtype.itemsize == 2 for b in call.kernel.inputs)
            work = cost.flops(call.kernel), cost.traffic(call.kernel)
            self._prices[key] = cost.picoseconds(*work, is_narrow, self.costs)
        return self._prices[key]

    def _drop_partial(self) -> None:
        """Only what one call of one step makes all of can be made again, in the arena."""
        for unit in self.units:
            is_whole = all(
                n in self.arena
                and self.maker.get(n) is unit
                and all(w == 2 * unit.step for w in self.written.get(n, ()))
                for n in unit.writes
            )
            if not is_whole:
                for name in unit.writes:
                    if self.maker.get(name) is unit:
                        del self.maker[name]

    def is_unchanged(self, name: Name, unit: Unit, slot: Slot) -> bool:
        """Whether an operand of a unit has the same value in a slot, if it is still there."""
        # A leaf may be updated by another part of the same call; what is temporary is made once.
        first = 2 * unit.step + (name in self.arena)
        return not any(first <= w < slot for w in self.written.get(name, ()))

    def waits(self, unit: Unit) -> bool:
        """Whether a unit can be run again, and something large that it makes waits for a while."""
        if not all(n in self.maker for n in unit.writes):
            return False
        for name in unit.writes:
            touched = self.touched.get(name, [])
            longest = max((b - a for a, b in pairwise(touched)), default=0)
            if longest > (2 if unit.is_part else 1) and self.nbytes(name) >= self.least:
                return True
        return False

    def nbytes(self, name: Name) -> int:
        if name not in self._nbytes:
            self._nbytes[name] = padded(self.arena[name])
        return self._nbytes[name]

    def last(self, unit: Unit) -> Slot:
        """When something that a unit makes is touched last."""
        return max((self.touched[n][-1] for n in unit.writes if n in self.touched), default=-1)
