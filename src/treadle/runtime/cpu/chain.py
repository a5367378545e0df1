"""A chain on the processor: the scripts of its programs, one after the other, in one native call.

Copies and exchanges are calls between them, of a function that calls MPI by its addresses. An
exchange begins inside the program that gives it, after the kernel that touches its array for the
last time, and every later kernel is followed by looks for messages: a message takes several looks
of both sides, however long it is. Machine code waits for what has not arrived, and notes that it
does where the thread that keeps the time sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.ir.graph import OutputKind
from treadle.kernel.plan import START, Point, last_uses, points_after, slots_touched
from treadle.runtime.chain import (
    RESULTS,
    Chain,
    Copy,
    Exchange,
    Gather,
    Place,
    Run,
    Staged,
    Swap,
    input_name,
)
from treadle.runtime.cpu import exchange as calls
from treadle.runtime.cpu.fetching import fetching_of
from treadle.runtime.cpu.program import BoundScript, NativeProgram
from treadle.runtime.cpu.script import CALL, LINE, PHASE, RUNS, WORDS, with_calls
from treadle.runtime.cpu.tables import Table, Tables
from treadle.runtime.cpu.threads import pool
from treadle.runtime.executable import Executable
from treadle.runtime.held import Pages, aligned
from treadle.runtime.memory import Values

FETCHED = "parameters"  # what waits for fetched buffers are counted as
Sent = dict[Point, list[Gather | Swap]]
Added = dict[str, list[tuple[str, int]]]


class NativeChain:
    """A chain with its memory and one script. One call runs at a time."""

    def __init__(self, chain: Chain, ranks: int, staged: Staged | None):
        self.chain, self.ranks, self._staged = chain, ranks, staged
        programs = [_native(k.program) for k in chain.links if isinstance(k, Run)]
        self.threads = max(p.threads for p in programs)
        self._own = {n: aligned(max(1, size)) for n, size in chain.buffers.items()}
        for array in self._own.values():
            array[...] = 0
        self._bound: list[tuple[BoundScript, Run]] = []
        self._begun: set[int] = set()  # parts that began inside a program, by identity
        exchanges = [k for k in chain.links if isinstance(k, Exchange)]
        waits = dict.fromkeys([*([FETCHED] if chain.fetched else []), *(k.name for k in exchanges)])
        self._positions = self._positions_of_uses()
        self._fetching = fetching_of(
            [names for *_, names in self._positions],
            {n: ranks * part.nbytes for n, part in chain.fetched.items()},
        )
        self._arena = Pages(self._fetching.nbytes) if chain.fetched else None
        self._requested: dict[int, int] = {}  # requests of fetches, by number
        requests = sum(len(k.parts) for k in exchanges) + len(self._fetching.fetches)
        native = staged.native() if staged is not None and waits else None
        self._tables = Tables(native, requests, waits)
        words = np.concatenate([*self._words(), np.zeros(WORDS, np.int64)])
        self._script = np.concatenate([self._head(programs), words])
        self._inputs = self._uses_of_inputs()
        self._held: tuple[object, int] = (None, -1)

    # The script

    def _head(self, programs: Sequence[NativeProgram]) -> np.ndarray:
        scratch = max(p.plan.scratch for p in programs)
        most = max(bound.script.most_calls for bound, _ in self._bound)
        self._scratch = aligned(scratch * self.threads)
        self._counters = aligned((2 * most + 1) * self.threads * LINE)
        self._counters[...] = 0
        head = np.zeros(WORDS, np.int64)
        head[:4] = self._scratch.ctypes.data, scratch, self._counters.ctypes.data, most * LINE
        return head

    def _words(self) -> Iterator[np.ndarray]:
        links, skipped = self.chain.links, -1
        for i, link in enumerate(links):
            match link:
                case Run(program=program):
                    if i == skipped:
                        continue
                    bound = _native(program).script()
                    self._bound.append((bound, link))
                    yield from self._fetched_before(i)
                    sent, added = self._sent_inside(i)
                    if added is not None:
                        skipped = i + 1
                    inside = self._inside(i, sent, added or {})
                    words = bound.script.words
                    if inside:
                        words = with_calls(words, bound.script.ends, inside)
                    yield words[:-WORDS]  # without its end
                    yield from self._copies_of(bound, link)
                case Copy(target, source, nbytes):
                    table = self._tables.new()
                    table.copy(target, source, nbytes)
                    yield self._call(table)
                case Exchange():
                    yield self._call(self._exchange(link))
        assert self._tables.is_quiet, "all that has begun is waited for"

    def _call(self, table: Table) -> np.ndarray:
        """All threads meet; then the first calls."""
        meets = [PHASE, 1, 0, *[0] * (WORDS - 3)]
        called = [CALL, calls.exchange_address(), 0, 0, table.finish(), 0, -1, 0]
        return np.array([*meets, *called], np.int64)

    def _copies_of(self, bound: BoundScript, link: Run) -> Iterator[np.ndarray]:
        """Outputs that are no memory of their own, or one of several that are the same."""
        program, taken = _native(link.program), set[int]()
        copies: list[tuple[Place, Place | int, int]] = []
        for output in program.plan.outputs:
            place = link.results.get(f"{output.kind.value}:{output.name}")
            if place is None:
                continue
            if output.slot in bound.own and output.slot not in taken:
                taken.add(output.slot)
                continue
            source = self._place_of(program, link, output.slot)
            assert source is None or source.buffer not in self.chain.fetched
            constant = int(bound.table[output.slot])
            copies.append((place, constant if source is None else source, output.type.nbytes))
        if copies:
            table = self._tables.new()
            for copy in copies:
                table.copy(*copy)
            yield self._call(table)

    def _place_of(self, program: NativeProgram, link: Run, slot: int) -> Place | None:
        """Where a slot is bound to a place: a leaf's, or an earlier output's."""
        for name, found, _ in program.plan.leaves:
            if found == slot:
                return link.leaves.get(name, Place(name))
        for output in program.plan.outputs:
            place = link.results.get(f"{output.kind.value}:{output.name}")
            if output.slot == slot and place is not None:
                return place
        return None

    # Exchanges

    def _exchange(self, link: Exchange) -> Table:
        """What has not begun inside a program begins; then all is waited for."""
        table = self._tables.new()
        for part in link.parts:
            if id(part) not in self._begun:
                self._tables.begin(table, part)
        if not link.is_open:
            self._tables.wait(table, link.name)
        return table

    def _sent_inside(self, i: int) -> tuple[Sent, Added | None]:
        """What a program sends as soon as it is there, by point of its plan.

        Sums that follow it are made there too, by the one thread there is: which these are, by the
        buffer that they are added to.
        """
        links, run = self.chain.links, self.chain.links[i]
        assert isinstance(run, Run)
        following = links[i + 1 : i + 3]
        sums = following[0] if following and isinstance(following[0], Run) else None
        if sums is not None and not sums.sums:
            return {}, None
        exchange = following[-1] if sums is not None else following[0] if following else None
        has_calls = self._tables.native is not None and self.chain.overlaps
        if not has_calls or not isinstance(exchange, Exchange):
            return {}, None
        if self.threads > 1 and (sums is not None or not _is_swapped(exchange)):
            return {}, None  # several threads add faster by a program, and update in one long phase
        plan = _native(run.program).plan
        outputs = {
            run.leaves.get(o.name, Place(o.name)): o.name
            for o in plan.outputs
            if o.kind is OutputKind.UPDATE
        }
        ends = last_uses(plan, self.threads)
        found: Sent = {}
        for part in exchange.parts:
            if part.given in outputs:
                found.setdefault(ends.get(outputs[part.given], START), []).append(part)
        if not found or sums is None:
            return found, None
        added: Added = {}
        for target, source, count in sums.sums:
            added.setdefault(target, []).append((source, count))
        begun = {p.given.buffer for parts in found.values() for p in parts}
        assert added.keys() <= begun, "what is added up is what is sent"
        return found, added

    def _inside(self, i: int, sent: Sent, added: Added) -> dict[Point, tuple[int, int]]:
        """Calls in the middle of a program: what is sent and fetched there, and looks."""
        fetched = self._fetched_inside(i)
        if not sent and not fetched:
            return {}
        run = self.chain.links[i]
        assert isinstance(run, Run)
        quiet = self._tables.new()
        self._tables.look(quiet)
        found = {}
        for point in points_after(_native(run.program).plan, min([*sent, *fetched])):
            table = quiet
            if point in sent or point in fetched:
                table = self._tables.new()
                for part in sent.get(point, ()):
                    for source, count in added.get(part.given.buffer, ()):
                        table.sum(part.given, Place(source), count)
                    self._tables.begin(table, part)
                    self._begun.add(id(part))
                self._fetch(table, fetched.get(point))
                self._tables.look(table)
            found[point] = calls.exchange_address(), table.finish()
        return found

    # Buffers that are gathered before they are used

    def _positions_of_uses(self) -> list[tuple[int, Point, frozenset[str]]]:
        """Links and calls of their programs' plans, with the fetched buffers that they read.

        Several threads share the calls of a step, which is then one.
        """
        found = []
        for i, link in enumerate(self.chain.links if self.chain.fetched else ()):
            if not isinstance(link, Run):
                continue
            plan = _native(link.program).plan
            places = {slot: link.leaves.get(n, Place(n)).buffer for n, slot, _ in plan.leaves}
            buffers = {s: b for s, b in places.items() if b in self.chain.fetched}
            for number, step in enumerate(plan.steps if buffers else ()):
                parts = slots_touched(step)
                if self.threads > 1:
                    parts = [set()] * (len(parts) - 1) + [set[int]().union(*parts)]
                for call, slots in enumerate(parts):
                    if self.threads == 1 or call == len(parts) - 1:
                        names = frozenset(buffers[s] for s in slots if s in buffers)
                        found.append((i, Point(number, call), names))
        return found

    def _before(self, position: int) -> tuple[int, Point | None]:
        """The link, and the point of its plan after which a position is next; None at the start."""
        link = self._positions[position][0]
        is_first = position == 0 or self._positions[position - 1][0] != link
        return link, None if is_first else self._positions[position - 1][1]

    def _fetched_before(self, i: int) -> Iterator[np.ndarray]:
        """A call before a program, of what is fetched there."""
        for position in {p for f in self._fetching.fetches for p in (f.begin, f.first)}:
            if self._before(position) == (i, None):
                table = self._tables.new()
                self._fetch(table, position)
                yield self._call(table)

    def _fetched_inside(self, i: int) -> dict[Point, int]:
        """Positions before which something is fetched, by the points of a program that precede."""
        found = {}
        for position in {p for f in self._fetching.fetches for p in (f.begin, f.first)}:
            link, point = self._before(position)
            if link == i and point is not None:
                found[point] = position
        return found

    def _fetch(self, table: Table, position: int | None) -> None:
        """What is used next is waited for, when what is used later has begun to come."""
        some = [(n, f) for n, f in enumerate(self._fetching.fetches) if f.begin == position]
        for number, fetch in sorted(some, key=lambda pair: pair[1].first):
            part = self.chain.fetched[fetch.buffer]
            self._requested[number] = self._tables.begin(table, part)
        for number, fetch in enumerate(self._fetching.fetches):
            if fetch.first == position:
                self._tables.wait_for(table, self._requested[number], FETCHED)

    # Addresses

    def _bind(self, values: Values) -> None:
        """Programs and tables find the arrays that there are now."""
        places = {n: int(a.ctypes.data) for n, a in values.items()}
        places |= {n: int(a.ctypes.data) for n, a in self._own.items()}
        if self._arena is not None:
            arena = self._arena.array(0, 1).ctypes.data
            offsets = self._fetching.offsets  # of what a kernel reads
            places |= {n: arena + offsets.get(n, 0) for n in self.chain.fetched}

        def at(place: Place) -> int:
            return places[place.buffer] + place.offset

        for bound, run in self._bound:
            program = _native(run.program)
            for name, slot, _ in program.plan.leaves:
                leaf = run.leaves.get(name, Place(name))
                if leaf.buffer not in self._inputs:  # which are bound with each call
                    bound.bind(slot, at(leaf))
            taken = set[int]()
            for output in program.plan.outputs:
                place = run.results.get(f"{output.kind.value}:{output.name}")
                if place is not None and output.slot in bound.own and output.slot not in taken:
                    taken.add(output.slot)
                    bound.bind(output.slot, at(place))
        self._tables.bind(places, self._inputs)

    def _uses_of_inputs(self) -> dict[str, list[Callable[[int], None]]]:
        """What is told the address of each input, by its buffer: programs, and copies of it."""
        found: dict[str, list[Callable[[int], None]]] = {
            input_name(i, n): [] for i in range(self.chain.rows) for n in self.chain.inputs
        }
        for bound, run in self._bound:
            for name, slot, _ in _native(run.program).plan.leaves:
                place = run.leaves.get(name)
                if place is not None and place.buffer in found:
                    found[place.buffer].append(partial(bound.bind, slot))
        for table in self._tables.all:
            for row, word, place in table.places:
                if place.buffer in found:
                    found[place.buffer].append(partial(table.words.__setitem__, (row, word)))
        return found

    def run(
        self, values: Values, version: int, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """One native call; results are copies."""
        if self._held[0] is not values or self._held[1] != version:
            self._bind(values)
            self._held = (values, version)
        held: list[np.ndarray] = []  # until the call is over
        for i, row in enumerate(rows):
            for name, type_ in self.chain.inputs.items():
                array = np.ascontiguousarray(row[name], type_.dtype.numpy)
                held.append(array)
                for bind in self._inputs[input_name(i, name)]:
                    bind(array.__array_interface__["data"][0])
        before = {n: int(t[0]) for n, t in self._tables.taken.items()}
        pool(self.threads).run(self._script.ctypes.data)
        if self._arena is not None:
            self._arena.give_back()
        self._tables.look_for_errors()
        for name, taken in self._tables.taken.items():
            if self._staged is not None:
                self._staged.note(name, 1e-9 * (int(taken[0]) - before[name]))
        found = self._own[RESULTS]
        return {
            n: found[at : at + t.nbytes].copy().view(t.dtype.numpy).reshape(t.shape)
            for n, (at, t) in self.chain.results.items()
        }

    @property
    def calls_made(self) -> int:
        """How often the script was followed to its end: once for each call."""
        return int(self._script[RUNS])


def _is_swapped(exchange: Exchange) -> bool:
    return any(isinstance(p, Swap) for p in exchange.parts)


def _native(program: Executable) -> NativeProgram:
    assert isinstance(program, NativeProgram)
    return program
