"""A chain on the processor: the scripts of its programs, one after the other, in one native call.

Copies and exchanges are calls between them, of a function that calls MPI by its addresses. An
exchange begins inside the program that gives it, after the kernel that touches its array for the
last time, and every later kernel is followed by looks for messages: a message takes several looks
of both sides, however long it is. Machine code waits for what has not arrived, and notes that it
does where the thread that keeps the time sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from treadle.base.errors import DistributedError
from treadle.ir.graph import OutputKind
from treadle.kernel.plan import START, Point, last_uses, points_after
from treadle.runtime.chain import (
    LOOKS,
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
from treadle.runtime.cpu.program import BoundScript, NativeProgram
from treadle.runtime.cpu.script import CALL, LINE, PHASE, RUNS, WORDS, with_calls
from treadle.runtime.cpu.threads import pool
from treadle.runtime.held import aligned
from treadle.runtime.memory import Values


@dataclass(slots=True)
class _Table:
    """Rows for the exchange function, some words of which are addresses of places."""

    rows: list[list[int]] = field(default_factory=list)
    places: list[tuple[int, int, Place]] = field(default_factory=list)  # row, word
    begun: list[tuple[int, Gather | Swap, int]] = field(default_factory=list)  # and its request
    words: np.ndarray = field(default_factory=lambda: np.zeros((0, calls.WORDS), np.int64))

    def add(self, *row: int) -> int:
        self.rows.append(list(row))
        return len(self.rows) - 1

    def finish(self) -> int:
        """The address of the words, which stay where they are."""
        self.words = np.zeros((len(self.rows) + 1, calls.WORDS), np.int64)
        for i, row in enumerate(self.rows):
            self.words[i, : len(row)] = row
        return int(self.words.ctypes.data)


class NativeChain:
    """A chain with its memory and one script. One call runs at a time."""

    def __init__(self, chain: Chain, ranks: int, staged: Staged | None):
        self.chain, self.ranks, self._staged = chain, ranks, staged
        runs = [k.program for k in chain.links if isinstance(k, Run)]
        programs = [p for p in runs if isinstance(p, NativeProgram)]
        assert len(programs) == len(runs)
        self.threads = max(p.threads for p in programs)
        self._own = {n: aligned(max(1, size)) for n, size in chain.buffers.items()}
        for array in self._own.values():
            array[...] = 0
        self._bound: list[tuple[BoundScript, Run]] = []
        self._tables: list[_Table] = []
        has_exchanges = any(isinstance(k, Exchange) for k in chain.links)
        self._calls = staged.native() if staged is not None and has_exchanges else None
        self._prepare_requests()
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

    def _prepare_requests(self) -> None:
        exchanges = [k for k in self.chain.links if isinstance(k, Exchange)]
        count = sum(len(k.parts) for k in exchanges)
        width = 4 if self._calls is None else self._calls.request_bytes
        self._requests = np.zeros(max(1, count) * width, np.uint8)
        self._flag = np.zeros(1, np.int64)
        self._taken = {k.name: np.zeros(1, np.int64) for k in exchanges}
        self._given_requests = 0  # of this call so far
        self._open_from = 0  # the first request that is not waited for
        self._begun: set[int] = set()  # parts that began inside a program, by identity

    def _words(self) -> Iterator[np.ndarray]:
        links, skipped = self.chain.links, -1
        for i, link in enumerate(links):
            match link:
                case Run(program=program):
                    if i == skipped:
                        continue
                    assert isinstance(program, NativeProgram)
                    bound = program.script()
                    self._bound.append((bound, link))
                    inside, skipped_next = self._inside(i, program)
                    skipped = skipped_next if skipped_next >= 0 else skipped
                    words = bound.script.words
                    if inside:
                        words = with_calls(words, bound.script.ends, inside)
                    yield words[:-WORDS]  # without its end
                    yield from self._copies_of(bound, link)
                case Copy(target, source, nbytes):
                    table = _Table()
                    row = table.add(calls.COPY, 0, 0, nbytes)
                    table.places += [(row, 1, target), (row, 2, source)]
                    yield self._call(table)
                case Exchange():
                    yield self._call(self._exchange(link))
        assert self._open_from == self._given_requests, "all that has begun is waited for"

    def _call(self, table: _Table) -> np.ndarray:
        """All threads meet; then the first calls."""
        self._tables.append(table)
        address = table.finish()
        meets = [PHASE, 1, 0, *[0] * (WORDS - 3)]
        called = [CALL, calls.exchange_address(), 0, 0, address, 0, -1, 0]
        return np.array([*meets, *called], np.int64)

    def _copies_of(self, bound: BoundScript, link: Run) -> Iterator[np.ndarray]:
        """Outputs that are no memory of their own, or one of several that are the same."""
        program = link.program
        assert isinstance(program, NativeProgram)
        table, taken = _Table(), set[int]()
        for output in program.plan.outputs:
            place = link.results.get(f"{output.kind.value}:{output.name}")
            if place is None:
                continue
            if output.slot in bound.own and output.slot not in taken:
                taken.add(output.slot)
                continue
            row = table.add(calls.COPY, 0, int(bound.table[output.slot]), output.type.nbytes)
            table.places.append((row, 1, place))
            first = self._place_of(program, link, output.slot)
            if first is not None:
                table.places.append((row, 2, first))
        if table.rows:
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

    def _request(self) -> int:
        width = self._calls.request_bytes if self._calls is not None else 4
        address = int(self._requests.ctypes.data) + self._given_requests * width
        self._given_requests += 1
        return address

    def _begin(self, table: _Table, part: Gather | Swap) -> None:
        row = table.add(calls.CALL)
        table.begun.append((row, part, self._request()))

    def _exchange(self, link: Exchange) -> _Table:
        """What has not begun inside a program begins; then all is waited for."""
        assert self._calls is not None
        table = _Table()
        for part in link.parts:
            if id(part) not in self._begun:
                self._begin(table, part)
        if link.is_open:
            return table
        width = self._calls.request_bytes
        first = int(self._requests.ctypes.data) + self._open_from * width
        count = self._given_requests - self._open_from
        self._open_from = self._given_requests
        test = self._calls.test_all(count, first, int(self._flag.ctypes.data))
        noted, taken = self._calls.waiting(), int(self._taken[link.name].ctypes.data)
        table.add(calls.WAIT, *test, noted, taken)
        return table

    def _inside(self, i: int, program: NativeProgram) -> tuple[dict[Point, tuple[int, int]], int]:
        """Calls in the middle of a program: what it gives is on its way as soon as it is there.

        Sums that follow it are made there too, by the one thread there is; which link they are.
        """
        links, run = self.chain.links, self.chain.links[i]
        assert isinstance(run, Run)
        following = links[i + 1 : i + 3]
        sums = following[0] if following and isinstance(following[0], Run) else None
        if sums is not None and not sums.sums:
            return {}, -1
        exchange = following[-1] if sums is not None else following[0] if following else None
        if self._calls is None or not self.chain.overlaps or not isinstance(exchange, Exchange):
            return {}, -1
        if self.threads > 1 and (sums is not None or not _is_swapped(exchange)):
            return {}, -1  # several threads add faster by a program, and update in one long phase
        added: dict[str, list[tuple[str, int]]] = {}
        for target, source, count in () if sums is None else sums.sums:
            added.setdefault(target, []).append((source, count))
        outputs = {
            run.leaves.get(o.name, Place(o.name)): o.name
            for o in program.plan.outputs
            if o.kind is OutputKind.UPDATE
        }
        ends = last_uses(program.plan, self.threads)
        by_point: dict[Point, list[Gather | Swap]] = {}
        for part in exchange.parts:
            if part.given in outputs:
                by_point.setdefault(ends.get(outputs[part.given], START), []).append(part)
        if not by_point:
            return {}, -1
        begun = {p.given.buffer for parts in by_point.values() for p in parts}
        assert added.keys() <= begun, "what is added up is what is sent"
        return self._points(program, by_point, added), -1 if sums is None else i + 1

    def _points(
        self,
        program: NativeProgram,
        by_point: Mapping[Point, Sequence[Gather | Swap]],
        added: Mapping[str, Sequence[tuple[str, int]]],
    ) -> dict[Point, tuple[int, int]]:
        assert self._calls is not None
        look = (calls.CALL, *self._calls.progress())
        quiet = _Table([list(look) for _ in range(LOOKS)])
        self._tables.append(quiet)
        found = {}
        for point in points_after(program.plan, min(by_point)):
            table = quiet
            if point in by_point:
                table = _Table()
                self._tables.append(table)
                for part in by_point[point]:
                    for source, count in added.get(part.given.buffer, ()):
                        row = table.add(calls.ADD, 0, 0, count)
                        table.places += [(row, 1, part.given), (row, 2, Place(source))]
                    self._begin(table, part)
                    self._begun.add(id(part))
                for _ in range(LOOKS):
                    table.add(*look)
            address = table.finish() if not table.words.size else int(table.words.ctypes.data)
            found[point] = calls.exchange_address(), address
        return found

    # Addresses

    def _bind(self, values: Values) -> None:
        """Programs and tables find the arrays that there are now."""
        places = {n: int(a.ctypes.data) for n, a in values.items()}
        places |= {n: int(a.ctypes.data) for n, a in self._own.items()}

        def at(place: Place) -> int:
            return places[place.buffer] + place.offset

        for bound, run in self._bound:
            program = run.program
            assert isinstance(program, NativeProgram)
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
        for table in self._tables:
            for row, word, where in table.places:
                if where.buffer not in self._inputs:
                    table.words[row, word] = at(where)
            for row, part, request in table.begun:
                self._bind_begun(table, row, part, request, places)

    def _bind_begun(
        self,
        table: _Table,
        row: int,
        part: Gather | Swap,
        request: int,
        places: Mapping[str, int],
    ) -> None:
        assert self._calls is not None
        given = places[part.given.buffer] + part.given.offset
        taken = places[part.taken.buffer] + part.taken.offset
        begun = self._calls.begin(isinstance(part, Gather), given, taken, part.nbytes, request)
        words = (calls.CALL, *begun)
        table.words[row, : len(words)] = words

    def _uses_of_inputs(self) -> dict[str, list[Callable[[int], None]]]:
        """What is told the address of each input, by its buffer: programs, and copies of it."""
        found: dict[str, list[Callable[[int], None]]] = {
            input_name(i, n): [] for i in range(self.chain.rows) for n in self.chain.inputs
        }
        for bound, run in self._bound:
            program = run.program
            assert isinstance(program, NativeProgram)
            for name, slot, _ in program.plan.leaves:
                place = run.leaves.get(name)
                if place is not None and place.buffer in found:
                    found[place.buffer].append(partial(bound.bind, slot))
        for table in self._tables:
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
        before = {n: int(t[0]) for n, t in self._taken.items()}
        pool(self.threads).run(self._script.ctypes.data)
        self._look_for_errors()
        for name, taken in self._taken.items():
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

    def _look_for_errors(self) -> None:
        for table in self._tables:
            codes = table.words[:, calls.CODE]
            if codes.any():
                cause = f"MPI could not exchange: error {codes[codes.nonzero()][0]}"
                raise DistributedError(
                    "step",
                    cause,
                    "The step went on without what did not arrive: go on from a checkpoint.",
                )


def _is_swapped(exchange: Exchange) -> bool:
    return any(isinstance(p, Swap) for p in exchange.parts)
