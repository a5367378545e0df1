"""Many processes, one step: how work is cut into shards, and what processes exchange."""

from treadle.distributed.environment import launched_rank as rank
from treadle.distributed.environment import launched_size as size
from treadle.distributed.placed import ray

__all__ = ["rank", "ray", "size"]
