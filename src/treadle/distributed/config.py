"""`DataParallel`: into how many shards a step's batch is cut, and what ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.base.numbers import POSITIVE, check_choice, check_number, check_whole

SYNCHRONISED, PER_SHARD = "synchronised", "per shard"
NCCL, HOST = "nccl", "host"
TRANSPORTS = ("auto", "self", "mpi", NCCL, HOST)
MOST_SHARDS = 2**15


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The batch is cut into `shards` parts, however many ranks there are to compute them.

    Each rank computes shards / ranks of them, one after the other, and gradients are summed in a
    tree that is fixed by the number of shards: any number of ranks gives the same bits.
    `shard_optimizer` leaves each rank the optimizer's state of its own part of every parameter.
    `shard_parameters` leaves it its own part of the parameters too: they are gathered when a
    program uses them, and freed when it is done. `batch_norm` is over all shards, or with "per
    shard" over each by itself. With `local` a rank is given the rows of its own shards,
    otherwise every rank the whole batch. Arrays of the batch that are named in `whole` are for
    all shards. `overlap` sends gradients while others are computed. `timeout` is how many
    seconds ranks wait for each other. `transport` is MPI where a launcher has started this
    process, or "self". GPUs exchange by NCCL where each rank has one of its own, otherwise through
    the host's memory by MPI; "nccl" and "host" ask for one of them.
    """

    shards: int = 8
    shard_optimizer: bool = True
    shard_parameters: bool = False
    batch_norm: str = SYNCHRONISED
    local: bool = False
    whole: tuple[str, ...] = ()
    overlap: bool = True
    timeout: float = 300.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        check_whole("DataParallel", "shards", self.shards)
        if self.shards > MOST_SHARDS:
            cause = f"shards is {self.shards}"
            raise ArgumentError("DataParallel", cause, f"At most {MOST_SHARDS}.")
        check_number("DataParallel", "timeout", self.timeout, POSITIVE)
        check_choice("DataParallel", "batch_norm", self.batch_norm, (SYNCHRONISED, PER_SHARD))
        check_choice("DataParallel", "transport", self.transport, TRANSPORTS)
        if isinstance(self.whole, str):
            object.__setattr__(self, "whole", (self.whole,))
        elif not isinstance(self.whole, (tuple, list)) or not all(
            isinstance(name, str) for name in self.whole
        ):
            raise ArgumentError(
                "DataParallel",
                f"whole is {self.whole!r}",
                'Give the names of arrays of the batch: whole=("mask",).',
            )
        object.__setattr__(self, "whole", tuple(self.whole))
        if self.shard_parameters and not self.shard_optimizer:
            raise ArgumentError(
                "DataParallel",
                "shard_parameters=True with shard_optimizer=False: a rank updates the rows that "
                "it holds",
                "Leave shard_optimizer=True, or hold whole parameters.",
            )

    @property
    def synchronises(self) -> bool:
        """Whether batch norms look at all shards."""
        return self.batch_norm == SYNCHRONISED and self.shards > 1
