"""Exchanges that programs begin themselves, while they go on computing.

A program has touched an output for the last time at some point of its plan. There it begins the
exchange of its rows with a call of MPI by its address, and between later kernels it lets MPI go on:
a message takes several looks of both sides, however long it is. The last shard's program sends
gradients so, after it has added what waits of earlier shards. What is left is waited for at the
end. This is for steps that are no chain: `runtime/cpu/chain.py` does the same for those that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from treadle.base.errors import DistributedError
from treadle.distributed.communicator import Communicator
from treadle.distributed.mpi_calls import MpiCalls
from treadle.distributed.shards import merges
from treadle.kernel.plan import START, Plan, Point, last_uses, points_after
from treadle.runtime.chain import LOOKS
from treadle.runtime.executable import CallingProgram
from treadle.runtime.session import Session
from treadle.step.parallel.programs import ParallelPrograms

Row = tuple[int, ...]
Values = Mapping[str, np.ndarray]
Begin = Callable[[MpiCalls, Values, str], list[Row]]  # the calls for a parameter


class Exchanges:
    """What one program begins, for the arrays that a session holds."""

    def __init__(self, communicator: Communicator, begin: Begin):
        self._communicator, self._begin = communicator, begin
        self._prepared: tuple[object, int] = (None, -1)  # a session, and its version
        self._tables: list[np.ndarray] = []
        self._calls: MpiCalls | None = None

    def prepare(
        self, program: object, session: Session, outputs: Mapping[str, str]
    ) -> CallingProgram:
        """The program with its calls, for the arrays that there are now.

        `outputs` are parameters by the names of the outputs that are exchanged.
        """
        assert isinstance(program, CallingProgram)
        if self._prepared != (session, session.version):
            self._calls = self._communicator.calls()
            assert self._calls is not None
            ends = last_uses(program.plan, program.threads)
            by_point: dict[Point, list[Row]] = {}
            for output, parameter in outputs.items():
                rows = self._begin(self._calls, session.values, parameter)
                by_point.setdefault(ends.get(output, START), []).extend(rows)
            program.call_after(self._tables_of(program.plan, by_point, self._calls))
            self._prepared = (session, session.version)
        return program

    def _tables_of(
        self, plan: Plan, by_point: Mapping[Point, list[Row]], calls: MpiCalls
    ) -> dict[Point, tuple[int, int]]:
        # The code is compiled when ranks are first met.
        from treadle.runtime.cpu.exchange import CALL, exchange_address

        looks: list[Row] = [(CALL, *calls.progress())] * LOOKS
        progress = _table(looks)
        self._tables, found = [progress], {}
        for point in points_after(plan, min(by_point)):
            table = progress
            if point in by_point:
                table = _table([*by_point[point], *looks])
                self._tables.append(table)
            found[point] = exchange_address(), int(table.ctypes.data)
        return found

    def wait(self) -> None:
        """Until what the program began has arrived."""
        from treadle.runtime.cpu.exchange import CODE

        assert self._calls is not None
        codes = {int(code) for table in self._tables for code in table[:, CODE]} - {0}
        if codes:
            raise DistributedError("step", f"MPI could not begin an exchange: error {min(codes)}")
        self._communicator.wait(self._calls.pending())


def _table(rows: list[Row]) -> np.ndarray:
    from treadle.runtime.cpu.exchange import WORDS

    table = np.zeros((len(rows) + 1, WORDS), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


class Overlap:
    """A step's exchanges of gradients, by the last shard's program."""

    def __init__(self, programs: ParallelPrograms):
        self.programs, self.names = programs, programs.names
        communicator = programs.parallel.communicator
        self.gradients = Exchanges(communicator, self._sum_and_send)

    def sending(self, session: Session) -> CallingProgram:
        """The last shard's program, which sends gradients."""
        outputs = {self.names.gradient(n): n for n in self.programs.gradients}
        return self.gradients.prepare(self.programs.shard(), session, outputs)

    def _sum_and_send(self, calls: MpiCalls, values: Values, name: str) -> list[Row]:
        from treadle.runtime.cpu.exchange import ADD, CALL

        given, rows = values[self.names.gradient(name)], []
        for level in merges(self.programs.share.each)[-1].levels:
            waiting = values[self.names.level(level, name)]
            rows.append((ADD, given.ctypes.data, waiting.ctypes.data, given.size))
        return [*rows, (CALL, *calls.all_to_all(given, values[self.names.received(name)]))]
