"""Tables of the exchange function: what a chain adds, copies, begins to exchange and waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from treadle.base.errors import DistributedError
from treadle.runtime.chain import LOOKS, Gather, NativeCalls, Place, Swap
from treadle.runtime.cpu import exchange as calls


@dataclass(slots=True)
class Table:
    """Rows for the exchange function, some words of which are addresses of places."""

    rows: list[list[int]] = field(default_factory=list)
    places: list[tuple[int, int, Place]] = field(default_factory=list)  # row, word
    begun: list[tuple[int, Gather | Swap, int]] = field(default_factory=list)  # and its request
    words: np.ndarray = field(default_factory=lambda: np.zeros((0, calls.WORDS), np.int64))

    def add(self, *row: int) -> int:
        self.rows.append(list(row))
        return len(self.rows) - 1

    def copy(self, target: Place, source: Place | int, nbytes: int) -> None:
        row = self.add(calls.COPY, 0, source if isinstance(source, int) else 0, nbytes)
        self.places.append((row, 1, target))
        if isinstance(source, Place):
            self.places.append((row, 2, source))

    def sum(self, target: Place, source: Place, count: int) -> None:
        row = self.add(calls.ADD, 0, 0, count)
        self.places += [(row, 1, target), (row, 2, source)]

    def finish(self) -> int:
        """The address of the words, which stay where they are."""
        if not self.words.size:
            self.words = np.zeros((len(self.rows) + 1, calls.WORDS), np.int64)
            for i, row in enumerate(self.rows):
                self.words[i, : len(row)] = row
        return int(self.words.ctypes.data)


class Tables:
    """All tables of a chain, with the handles of what they begin, in the order of its script."""

    def __init__(self, native: NativeCalls | None, requests: int, names: Iterable[str]):
        """There are at most as many requests in a call; `names` are those of what is waited for."""
        self.native, self.all = native, list[Table]()
        self._width = 4 if native is None else native.request_bytes
        self._requests = np.zeros(max(1, requests) * self._width, np.uint8)
        self._flag = np.zeros(1, np.int64)
        self.taken = {name: np.zeros(1, np.int64) for name in names}  # nanoseconds
        self._given = 0  # requests of a call so far
        self._open_from = 0  # the first that is not waited for

    def new(self) -> Table:
        self.all.append(Table())
        return self.all[-1]

    @property
    def is_quiet(self) -> bool:
        """Whether all that has begun is waited for."""
        return self._open_from == self._given

    def begin(self, table: Table, part: Gather | Swap) -> int:
        """Begin an exchange; the address of its request."""
        request = int(self._requests.ctypes.data) + self._given * self._width
        self._given += 1
        table.begun.append((table.add(calls.CALL), part, request))
        return request

    def wait_for(self, table: Table, request: int, name: str, count: int = 1) -> None:
        assert self.native is not None
        test = self.native.test_all(count, request, int(self._flag.ctypes.data))
        noted, taken = self.native.waiting(), int(self.taken[name].ctypes.data)
        table.add(calls.WAIT, *test, noted, taken)

    def wait(self, table: Table, name: str) -> None:
        """Wait for all that has begun and was not waited for; what has ended is nothing to wait."""
        first = int(self._requests.ctypes.data) + self._open_from * self._width
        self.wait_for(table, first, name, self._given - self._open_from)
        self._open_from = self._given

    def look(self, table: Table) -> None:
        """Let what has begun go on."""
        assert self.native is not None
        for _ in range(LOOKS):
            table.add(calls.CALL, *self.native.progress())

    def bind(self, places: Mapping[str, int], later: Iterable[str]) -> None:
        """Addresses of buffers, but for those that are bound with each call."""
        skipped = set(later)
        for table in self.all:
            table.finish()
            for row, word, place in table.places:
                if place.buffer not in skipped:
                    table.words[row, word] = places[place.buffer] + place.offset
            for row, part, request in table.begun:
                assert self.native is not None
                given = places[part.given.buffer] + part.given.offset
                taken = places[part.taken.buffer] + part.taken.offset
                is_gather = isinstance(part, Gather)
                begun = self.native.begin(is_gather, given, taken, part.nbytes, request)
                table.words[row, : 1 + len(begun)] = calls.CALL, *begun

    def look_for_errors(self) -> None:
        for table in self.all:
            codes = table.words[:, calls.CODE]
            if codes.any():
                raise DistributedError(
                    "step",
                    f"MPI could not exchange: error {codes[codes.nonzero()][0]}",
                    "The step went on without what did not arrive: go on from a checkpoint.",
                )
