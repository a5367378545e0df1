"""Sums that are sent while the backward pass goes on: the last shard's program does it itself.

The program of a shard has written a gradient for the last time after some step of its plan. There
it adds what waits of earlier shards, and begins the exchange of that gradient's rows with a call of
MPI by its address. Between later kernels it lets MPI go on. What is left is waited for at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import DistributedError
from treadle.distributed.mpi_calls import MpiCalls
from treadle.distributed.shards import merges
from treadle.kernel.plan import Plan, PlannedPhase, PlannedStep
from treadle.runtime.executable import CallingProgram
from treadle.runtime.session import Session
from treadle.step.parallel.programs import ParallelPrograms

Table = list[tuple[int, ...]]


def last_uses(plan: Plan) -> dict[str, int]:
    """The last step of a plan that touches each of its outputs' buffers."""
    touched: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        touched |= dict.fromkeys(_slots(step), number)
    return {o.name: touched[o.slot] for o in plan.outputs if o.slot in touched}


def _slots(step: PlannedStep) -> set[int]:
    if isinstance(step, PlannedPhase):
        return {s for c in step.calls for s in c.slots}
    return {s for inner in step.steps for s in _slots(inner)}


class Overlap:
    """The calls of the last shard's program, for the arrays that a session holds."""

    def __init__(self, programs: ParallelPrograms):
        self.programs, self.names, self.share = programs, programs.names, programs.share
        self._prepared: tuple[object, int] = (None, -1)  # a session, and its version
        self._tables: list[np.ndarray] = []
        self._calls: MpiCalls | None = None

    def is_possible(self, session: Session) -> bool:
        """On the processor, of float32; several threads add faster by a program of their own."""
        parallel, program = self.programs.parallel, self.programs.shard()
        return (
            parallel.config.overlap
            and parallel.communicator.size > 1
            and isinstance(program, CallingProgram)
            and session.memory.is_host
            and all(t.dtype is dtypes.float32 for t in self.programs.gradients.values())
            and (program.threads == 1 or self.share.each == 1)
            and parallel.communicator.calls() is not None
        )

    def prepare(self, session: Session) -> CallingProgram:
        """The program, whose calls are for the arrays that there are now."""
        program = self.programs.shard()
        assert isinstance(program, CallingProgram)
        if self._prepared != (session, session.version):
            self._calls = self.programs.parallel.communicator.calls()
            assert self._calls is not None
            program.call_after(self._tables_of(program.plan, self._calls, session.values))
            self._prepared = (session, session.version)
        return program

    def _tables_of(
        self, plan: Plan, calls: MpiCalls, values: Mapping[str, np.ndarray]
    ) -> dict[int, tuple[int, int]]:
        # The code is compiled when ranks are first met.
        from treadle.runtime.cpu.exchange import exchange_address

        ends = last_uses(plan)
        by_step: dict[int, list[str]] = {}
        for name in self.programs.gradients:
            by_step.setdefault(ends[self.names.gradient(name)], []).append(name)
        self._tables, found = [], {}
        for step in range(min(by_step), len(plan.steps)):
            table = self._table(by_step.get(step, []), calls, values)
            self._tables.append(table)
            found[step] = exchange_address(), int(table.ctypes.data)
        return found

    def _table(
        self, names: Sequence[str], calls: MpiCalls, values: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Sums and the exchange of what is final; where nothing is, MPI goes on."""
        from treadle.runtime.cpu.exchange import ADD, CALL, WORDS

        rows: Table = []
        for name in names:
            given = values[self.names.gradient(name)]
            for level in merges(self.share.each)[-1].levels:
                waiting = values[self.names.level(level, name)]
                rows.append((ADD, given.ctypes.data, waiting.ctypes.data, given.size))
            rows.append((CALL, *calls.all_to_all(given, values[self.names.received(name)])))
        if not names:
            rows.append((CALL, *calls.progress()))
        table = np.zeros((len(rows) + 1, WORDS), np.int64)
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
        return table

    def wait(self) -> None:
        """Until what the program began has arrived."""
        from treadle.runtime.cpu.exchange import CODE

        assert self._calls is not None
        codes = {int(code) for table in self._tables for code in table[:, CODE]} - {0}
        if codes:
            raise DistributedError("step", f"MPI could not begin an exchange: error {min(codes)}")
        self.programs.parallel.communicator.wait(self._calls.pending())
