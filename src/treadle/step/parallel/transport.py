"""How what ranks give each other gets from one to the other, as all of them agree."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.backends.protocol import Backend, Connecting
from treadle.base.errors import ArgumentError, DistributedError
from treadle.compile_report import CompileReport
from treadle.distributed.communicator import Communicator
from treadle.distributed.config import HOST, NCCL, DataParallel
from treadle.distributed.mpi_calls import MpiCalls

_communicators: dict[tuple[int, int], Any] = {}  # of a device, by rank and size: one for all steps


@dataclass(frozen=True, slots=True)
class Transport:
    """`direct` is a device's own communicator; without one bytes go through the host's memory."""

    told: str  # what the report says
    direct: Any = None
    exchanges: bool = True  # a rank by itself exchanges nothing, unless a way is asked for


def choose_transport(config: DataParallel, comm: Communicator, device: Backend) -> Transport:
    """What is asked for, or the best that all ranks can do. All of them ask together."""
    asked, chaining = config.transport, device.chaining
    connecting = None if chaining is None else chaining.connecting
    if connecting is None:
        if asked == NCCL:
            raise ArgumentError(
                "compile_step",
                f'transport="nccl" on {device.name!r}: NCCL connects NVIDIA GPUs',
                'Use device="cuda", or transport="auto".',
            )
        return Transport("MPI") if comm.size > 1 else Transport("one process", exchanges=False)
    if comm.size == 1 and asked not in (NCCL, HOST):
        return Transport("one process", exchanges=False)
    cause = _obstacle(comm, connecting)
    if cause is None and asked in ("auto", NCCL):
        told = f"{connecting.direct_name()}, in the step's graph"
        return Transport(told, _direct(comm, connecting))
    if asked == NCCL:
        remedy = (
            'Give every rank a GPU of its own, and install NCCL on all hosts; transport="host" '
            "exchanges through the host's memory."
        )
        raise DistributedError("compile_step", f'transport="nccl": {cause}', remedy)
    why = cause if asked == "auto" else f'transport="{asked}"'
    carrier = "MPI" if comm.size > 1 else "no other rank"
    return Transport(f"the host's memory and {carrier} ({why})")


def _obstacle(comm: Communicator, device: Connecting) -> str | None:
    """Why GPUs cannot exchange by themselves; None if they can."""
    own = json.dumps([device.where(), device.why_not_direct()])
    told = [json.loads(text) for text in comm.texts(own)]
    for rank, (_, cause) in enumerate(told):
        if cause is not None:
            return f"rank {rank}: {cause}"
    seen: dict[str, int] = {}
    for rank, (where, _) in enumerate(told):
        if where in seen:
            return f"ranks {seen[where]} and {rank} have the same GPU"
        seen[where] = rank
    return None


def _direct(comm: Communicator, device: Connecting) -> Any:
    """The communicator of all ranks: the first tells the others what it is known by."""
    key = comm.rank, comm.size
    if key not in _communicators:
        own = device.new_identity().hex() if comm.rank == 0 else ""
        identity = bytes.fromhex(comm.texts(own)[0])
        _communicators[key] = device.direct(identity, comm.rank, comm.size)
    return _communicators[key]


class StagedExchange:
    """Exchanges of a device's chain by what connects the processes, timed for the report."""

    def __init__(self, comm: Communicator, report: CompileReport):
        self._comm, self._report = comm, report

    def exchange(self, name: str, parts: Sequence[tuple[bool, np.ndarray, np.ndarray]]) -> None:
        start = time.perf_counter()
        pending = []
        for gathers, given, taken in parts:
            begin = self._comm.all_gather if gathers else self._comm.all_to_all
            pending.append(begin(given, taken))
        self._comm.wait(pending)
        self.note(name, time.perf_counter() - start)

    def native(self) -> MpiCalls | None:
        return self._comm.calls()

    def note(self, name: str, seconds: float) -> None:
        self._report.add_exchange(f"exchange of {name}", seconds)
