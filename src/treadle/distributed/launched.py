"""Which processes this one trains with: those that a launcher has started, or none."""

from __future__ import annotations

import os

from treadle.distributed.communicator import Communicator, SelfCommunicator
from treadle.distributed.environment import refuse_srun_without_mpi

# What launchers tell the processes that they start: MPICH and Intel, Open MPI, PMIx.
_LAUNCHED = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MPI_LOCALRANKID")


def is_launched() -> bool:
    """Whether a launcher of MPI has started this process."""
    return any(name in os.environ for name in _LAUNCHED)


def open_communicator(transport: str, timeout: float) -> Communicator:
    """The processes that this one trains with."""
    is_given = transport in ("self", "mpi")
    if not is_given:
        refuse_srun_without_mpi()
    if transport == "self" or (not is_given and not is_launched()):
        return SelfCommunicator()
    # It starts MPI: a process that trains alone does without.
    from treadle.distributed.mpi import MpiCommunicator

    return MpiCommunicator(timeout)
