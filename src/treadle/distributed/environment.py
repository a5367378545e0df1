"""What launchers tell the processes that they start, by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from treadle.base.errors import DistributedError

# MPICH and Intel, Open MPI, PMIx; SLURM's srun sets those of the MPI that it is told to start.
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    found = (environment.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), None)


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank that a launcher gave this process; 0 where none has started it."""
    return _number(environment, RANKS) or 0


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes a launcher has started; 1 where none has."""
    if _number(environment, RANKS) is None:
        return 1
    return _number(environment, SIZES) or 1


def refuse_srun_without_mpi(environment: Mapping[str, str] = os.environ) -> None:
    """Tasks of one srun that do not know of each other would each train alone."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2 or _number(environment, RANKS) is not None:
        return
    raise DistributedError(
        "DataParallel",
        f"srun has started {tasks} tasks without MPI: each of them would train alone",
        "Use srun --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI; srun --mpi=list shows what there "
        'is. For runs that are independent say DataParallel(transport="self").',
    )
