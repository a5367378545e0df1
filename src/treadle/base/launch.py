"""What a launcher says about the place of this process on its host."""

from __future__ import annotations

import os
from collections.abc import Mapping

# MPICH and Intel, Open MPI, SLURM.
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this process among those of its host; 0 where no launcher has started it."""
    found = (environment.get(name, "") for name in LOCAL_RANKS)
    return next((int(text) for text in found if text.isdecimal()), 0)
