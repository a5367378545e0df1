"""MPI's functions by their addresses, for programs that call them without Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

Call = tuple[int, ...]  # a function's address, and its arguments as words
STATUS = 64  # bytes, at least as many as a status of MPI has


class MpiCalls:
    """Calls of one communicator.

    Handles of MPICH are integers of 32 bits and those of Open MPI pointers: as words both are
    passed alike.
    """

    def __init__(self, mpi: Any, comm: Any, waiting: int = 0):
        self._mpi, self._comm, self._waiting = mpi, comm, waiting
        library = ctypes.CDLL(mpi.__file__)
        names = ("MPI_Ialltoall", "MPI_Iallgather", "MPI_Iprobe", "MPI_Testall")
        self._address = {n: ctypes.cast(getattr(library, n), ctypes.c_void_p).value for n in names}
        self._handle = _signed(mpi._handleof(comm))
        self._float = _signed(mpi._handleof(mpi.FLOAT))
        self._byte = _signed(mpi._handleof(mpi.BYTE))
        self._in_place = _signed(int(mpi.IN_PLACE))
        self.request_bytes = int(mpi._sizeof(mpi.Request))
        self._statuses: list[np.ndarray] = []
        self._probed = np.zeros(64, np.int64)  # a flag, then room for a status

    def begin(self, gathers: bool, given: int, taken: int, nbytes: int, request: int) -> Call:
        """Begin to gather, or to swap, rows of some bytes by their addresses.

        What is gathered in its own place, and the handle of the request, are addresses too.
        """
        kind, count = (self._float, nbytes // 4) if nbytes % 4 == 0 else (self._byte, nbytes)
        assert count < 2**31, "MPI counts with 32 bits"
        own = taken + self._comm.Get_rank() * nbytes
        given = self._in_place if gathers and given == own else given
        address = self._address["MPI_Iallgather" if gathers else "MPI_Ialltoall"]
        assert address is not None
        return (address, given, count, kind, taken, count, kind, self._handle, request)

    def test_all(self, count: int, requests: int, flag: int) -> Call:
        """Let requests go on, and tell at an address whether all are done."""
        address = self._address["MPI_Testall"]
        assert address is not None
        self._statuses.append(np.zeros(STATUS * max(1, count), np.uint8))
        return (address, count, requests, flag, self._statuses[-1].ctypes.data)

    def waiting(self) -> int:
        """The address of what machine code notes its waits in."""
        return self._waiting

    def progress(self) -> Call:
        """Let what has begun go on: a look for messages, which nobody sends."""
        address, flag = self._address["MPI_Iprobe"], self._probed.ctypes.data
        assert address is not None
        anyone = self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        return (address, *anyone, self._handle, flag, flag + 16)


def _signed(handle: int) -> int:
    """A handle as a word."""
    return handle - 2**64 if handle >= 2**63 else handle
