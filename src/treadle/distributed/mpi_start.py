"""The start of MPI, which waits for all ranks: with a time limit."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from treadle.base.errors import DistributedError
from treadle.distributed.environment import launched_rank, launched_size

APART = 0.5  # seconds between the limits of ranks, so that one speaks first


def start(mpi: Any, timeout: float) -> None:
    """Start MPI unless it runs. The call is made without Python's lock: a thread keeps the time."""
    if mpi.Is_initialized():
        return
    rank = launched_rank()
    limit = threading.Timer(timeout + APART * rank, _give_up, (rank, timeout))
    limit.daemon = True
    limit.start()
    try:
        given = ctypes.c_int()
        library = ctypes.CDLL(mpi.__file__)
        wrong = library.MPI_Init_thread(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(given))
    except (AttributeError, OSError):  # an mpi4py that does not tell where its MPI is
        wrong = mpi.Init_thread() and 0
    finally:
        limit.cancel()
    if wrong:
        raise DistributedError("DataParallel", f"MPI does not start: error {wrong}")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors become exceptions


def _give_up(rank: int, timeout: float) -> None:
    text = (
        f"rank {rank} of {launched_size()} has waited {timeout:g} s for MPI to start: another rank "
        "has not joined. All ranks were ended. Every rank compiles the step; allow more with "
        "DataParallel(timeout=…)"
    )
    print(f"treadle: {text}.", file=sys.stderr, flush=True)
    os._exit(1)
