"""MPI through mpi4py: exchanges that begin at once, and are waited for with a time limit."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.base.errors import DistributedError
from treadle.distributed.mpi_calls import MpiCalls
from treadle.distributed.mpi_start import start
from treadle.distributed.watch import watching

SPINS = 2000  # looks without a pause
PAUSE = 50e-6  # seconds between later ones: other ranks may need this core
MOST_TEXT = 1 << 16  # bytes that a rank tells the others


def _mpi(timeout: float) -> Any:
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI

        start(MPI, timeout)
    except (ImportError, RuntimeError) as error:
        raise DistributedError(
            "DataParallel",
            f"MPI cannot be used: {error}",
            "pip install 'treadle[distributed]', which brings mpi4py and an mpiexec. If mpi4py is "
            "there, it was built for another MPI than the one that is installed.",
        ) from error
    return MPI


_own: list[Any] = []  # all processes with messages of their own: once, as there are only so many


class MpiCommunicator:
    """The processes that a launcher has started."""

    name = "mpi"

    def __init__(self, timeout: float):
        self._mpi = _mpi(timeout)
        world = self._mpi.COMM_WORLD
        self.rank, self.size = int(world.Get_rank()), int(world.Get_size())
        self.timeout, self.waited = timeout, 0.0
        _refuse_alone(self.size)
        self._watch = watching(world, timeout)
        if not _own:
            comm, begun = world.Idup()  # ranks that come late are waited for with a limit
            self.wait([begun])
            _own.append(comm)
        self._comm = _own[0]

    def all_to_all(self, given: np.ndarray, taken: np.ndarray) -> Any:
        return self._comm.Ialltoall(_bytes(given), _bytes(taken))

    def all_gather(self, given: np.ndarray, taken: np.ndarray) -> Any:
        return self._comm.Iallgather(_bytes(given), _bytes(taken))

    def wait(self, pending: Sequence[Any]) -> None:
        requests = list(pending)
        if self._watch is not None:
            self._watch.begin_wait()
        start = time.monotonic()
        end = start + self.timeout
        looks = 0
        while not self._mpi.Request.Testall(requests):
            looks += 1
            if looks < SPINS:
                os.sched_yield()
            else:
                time.sleep(PAUSE)
            if looks % 64 == 0 and time.monotonic() > end:
                self._give_up()
        if self._watch is not None:
            self._watch.end_wait()
        self.waited += time.monotonic() - start

    def _give_up(self) -> None:
        if self._watch is not None:
            self._watch.late(self.timeout)  # names who is missing, and ends all ranks
        # Finalizing would wait for the rank that does not come.
        atexit.register(self._mpi.COMM_WORLD.Abort, 1)
        raise DistributedError(
            "step",
            f"rank {self.rank} of {self.size} has waited {self.timeout:g} s for the others: a "
            "rank has died, hangs, or calls something else",
            "Look at the output of the other ranks, or allow more with DataParallel(timeout=…).",
        )

    def calls(self) -> MpiCalls | None:
        try:
            return MpiCalls(self._mpi, self._comm, self.waiting())
        except (AttributeError, OSError):  # an mpi4py that does not tell where its MPI is
            return None

    def waiting(self) -> int:
        """The address of two words for machine code that waits; 0 where nobody would notice it."""
        if self._watch is None:
            return 0
        self._watch.limit = self.timeout
        return int(self._watch.native.ctypes.data)

    def texts(self, text: str) -> list[str]:
        own = text.encode()[:MOST_TEXT]
        lengths = np.zeros(self.size, np.int64)
        self.wait([self.all_gather(np.array([len(own)], np.int64), lengths)])
        most = int(lengths.max())
        if not most:
            return [""] * self.size
        given, taken = np.zeros(most, np.uint8), np.zeros((self.size, most), np.uint8)
        given[: len(own)] = np.frombuffer(own, np.uint8)
        self.wait([self.all_gather(given, taken)])
        rows = zip(taken, lengths, strict=True)
        return [row[:n].tobytes().decode(errors="replace") for row, n in rows]


def _bytes(array: np.ndarray) -> np.ndarray:
    assert array.flags.c_contiguous, "MPI is given contiguous memory"
    return array.reshape(-1).view(np.uint8)


def _refuse_alone(size: int) -> None:
    """A launcher's process that finds itself alone has another MPI than the launcher."""
    declared = os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or ""
    if size == 1 and declared.isdigit() and int(declared) > 1:
        raise DistributedError(
            "DataParallel",
            f"the launcher has started {declared} processes, and MPI sees one",
            "mpi4py uses another MPI than the launcher's. Launch with the mpiexec of the package "
            "mpich, or install mpi4py for yours.",
        )
