"""Parameters of which each rank holds its rows: gathered while a program uses them, then freed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treadle.runtime.executable import Executable
from treadle.runtime.held import ALIGNMENT, Pages
from treadle.step.parallel.programs import ParallelPrograms
from treadle.step.parallel.run import ParallelProgram


class ShardedParameters:
    """The rows of this rank are all that it holds. All ranks gather together.

    Whole arrays have addresses that stay, so that programs are bound to them once; their pages go
    back to the system when they are freed.
    """

    def __init__(self, programs: ParallelPrograms):
        self._communicator, self._share = programs.parallel.communicator, programs.share
        arrays = programs.arrays
        self._pieces = {n: programs.pieces[n] for n in arrays}
        self._rows = {n: programs.names.rows(n) for n in arrays}
        self.names = frozenset(arrays)
        self._pages: Pages | None = None
        self._every: dict[str, np.ndarray] = {}  # (shards, length), filled up as rows are

    def is_read_by(self, program: Executable) -> bool:
        """A data-parallel program gathers them itself, for as long as its shards need them."""
        if isinstance(program, ParallelProgram):
            return False
        return not self.names.isdisjoint(program.graph.leaves)

    def rows_name(self, name: str) -> str:
        """What the rows of a parameter are called; every other value is called what it is."""
        return self._rows.get(name, name)

    def gather(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = {n: values[own] for n, own in self._rows.items()}
        self._make_room(rows)
        gather = self._communicator.all_gather
        pending = [gather(np.ascontiguousarray(a), self._every[n]) for n, a in rows.items()]
        self._communicator.wait(pending)
        return {n: self._pieces[n].glue(every) for n, every in self._every.items()}

    def _make_room(self, rows: Mapping[str, np.ndarray]) -> None:
        if self._pages is not None:
            return
        starts, end = {}, 0
        for name, array in rows.items():
            starts[name] = end
            end += -(-array.nbytes * self._share.ranks // ALIGNMENT) * ALIGNMENT
        self._pages = Pages(end)
        for name, array in rows.items():
            shape = (self._share.shards, array.shape[1])
            found = self._pages.array(starts[name], array.nbytes * self._share.ranks)
            self._every[name] = found.view(array.dtype).reshape(shape)

    def free(self) -> None:
        if self._pages is not None:
            self._pages.give_back()

    def part(self, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        own = slice(self._share.own.start, self._share.own.stop)
        return self._rows[name], self._pieces[name].cut(array)[own]
