"""Many processes, one step: how work is cut into shards, and what processes exchange."""

from typing import NoReturn

from treadle.base.errors import DistributedError
from treadle.distributed.environment import launched_rank as rank
from treadle.distributed.environment import launched_size as size

__all__ = ["rank", "ray", "size"]


def ray(*_: object, **__: object) -> NoReturn:
    """Refused: ranks are processes of MPI, and the workers of Ray are not."""
    raise DistributedError(
        "distributed.ray",
        "workers of Ray are started without MPI's process manager, so that they cannot be ranks "
        "of one step",
        "Let one Ray task with as many CPUs as ranks run `treadle launch -n N FILE.py`.",
    )
