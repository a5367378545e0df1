"""A data-parallel step that a device makes by itself: one call launches all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.backends.registry import backend
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.graph import OutputKind
from treadle.optim.append import Mode
from treadle.runtime.chain import RunningChain
from treadle.runtime.session import Session
from treadle.step.parallel.agree import check_batch_digests
from treadle.step.parallel.chain import UPDATE_KEY, ChainBuilder
from treadle.step.parallel.programs import ParallelPrograms
from treadle.step.parallel.run import ParallelProgram
from treadle.step.parallel.transport import StagedExchange, Transport


def can_chain(programs: ParallelPrograms) -> bool:
    """Whether the device can make a step without the host looking at anything in it.

    It looks where a loss that is not finite is refused, and where programs print or check indices.
    """
    options = programs.recipe.options
    looks = options.detect_anomaly and not programs.plan.scales_loss
    prints = any(o.kind is OutputKind.PRINT for o in programs.shard_graph.outputs)
    device, comm = backend(programs.report.device), programs.parallel.communicator
    if device.chaining is None or looks or prints or options.debug:
        return False
    if device.chaining.connecting is not None:
        return not programs.shards_parameters
    # Machine code of the processor calls MPI, and waits where somebody keeps the time.
    return comm.size == 1 or (comm.waiting() != 0 and comm.calls() is not None)


class ChainedStep(ParallelProgram):
    """What a session runs as one program, all ranks at the same time; nothing is waited for."""

    def __init__(
        self,
        programs: ParallelPrograms,
        mode: Mode,
        grad_norms: bool,
        transport: Transport,
    ):
        super().__init__(programs, mode, grad_norms)
        device = backend(programs.report.device).chaining
        assert device is not None
        ranks, direct = programs.share.ranks, transport.direct
        self.chain = ChainBuilder(programs, mode, grad_norms, transport.exchanges).build()
        staged = None if direct is not None else StagedExchange(self.communicator, programs.report)
        self.running: RunningChain = device.chained(self.chain, ranks, direct, staged)

    @property
    def runs(self) -> int:
        return self.running.calls_made

    def run_on(
        self,
        owner: Session,
        version: int,
        values: Mapping[str, np.ndarray],
        inputs: Mapping[str, Any],
        wanted: Sequence[int],
        stays: bool = False,
    ) -> tuple[Any, ...]:
        """Loss, metrics and norms, which are waited for when they are looked at."""
        programs = self.programs
        if not self.runs and self.share.ranks > 1 and not programs.is_local:
            check_batch_digests(self.communicator, inputs)
        before = self.communicator.waited
        rows = [programs.shard_arrays(inputs, shard) for shard in self.share.own]
        if UPDATE_KEY in self.chain.inputs:
            rows = [row | {UPDATE_KEY: inputs[RANDOM_STATE]} for row in rows]
        self.communicator.waiting()  # another step's waits may have another time limit
        found = self.running.run(owner.values, version, rows)
        programs.report.add_exchange("waiting", self.communicator.waited - before)
        names, _ = self.results
        return tuple(found[names[i]] for i in wanted)
