"""What is different about a step that several ranks make: its programs, and who holds what."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from treadle.backends.registry import backend
from treadle.base.errors import ArgumentError, DistributedError, LoadError
from treadle.distributed.communicator import Communicator, SelfCommunicator
from treadle.distributed.shards import Pieces
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.nn.tracing import Inputs
from treadle.optim.append import Mode, UpdatePlan, state_types
from treadle.pipeline import CompileReport, StepRecipe, build_step
from treadle.runtime.executable import Executable
from treadle.runtime.session import Session
from treadle.step.index_checks import Looking
from treadle.step.loading import save_step
from treadle.step.parallel.agree import check_facts, facts_of, graph_facts
from treadle.step.parallel.building import build_programs
from treadle.step.parallel.chained import ChainedStep, can_chain
from treadle.step.parallel.programs import Parallel, ParallelPrograms
from treadle.step.parallel.run import ParallelProgram
from treadle.step.parallel.sharded import ShardedParameters
from treadle.step.parallel.transport import Transport, choose_transport
from treadle.step.programs import Variants, Watched
from treadle.step.results import EvalResult
from treadle.step.watching import run_watched

Arrays = dict[str, np.ndarray]
Given = TypeVar("Given")


class StepPrograms(Looking, Protocol):
    """The programs of a step for one batch shape."""

    @property
    def graphs(self) -> Mapping[Mode, Graph]: ...

    @property
    def is_random(self) -> bool: ...

    def states(self) -> dict[str, TensorType]: ...

    def step(self, mode: Mode, watched: Watched) -> Executable: ...

    def gradients(self) -> Executable: ...

    def main(self, mode: Mode) -> Executable: ...

    def main_inputs(self, arrays: Arrays) -> Arrays: ...


class Alone:
    """A step of one process: it holds everything, and asks nobody."""

    communicator: Communicator = SelfCommunicator()

    is_parallel = False

    def __init__(self, recipe: StepRecipe, plan: UpdatePlan, session: Session):
        self.recipe, self.plan, self.session = recipe, plan, session

    def given(self, inputs: Inputs) -> Inputs:
        """What a call is given, for a batch of these types."""
        return inputs

    def build(self, inputs: Inputs, report: CompileReport) -> StepPrograms:
        with self.recipe.naming():
            graphs = build_step(self.recipe, self.plan, inputs, report)
        return Variants(graphs, report, self.recipe.options, not self.session.memory.is_host)

    def own_types(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        """Types of the optimizer's state as it is held here."""
        return dict(types)

    @property
    def sharded(self) -> dict[str, Pieces]:
        """What is held in rows, of which this rank has its own."""
        return {}

    def held_name(self, name: str) -> str:
        """What a value of the session is called as it is held here."""
        return name

    def own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values as they are held here, of those that are everyone's."""
        return dict(values)

    def whole(self, values: Arrays) -> Arrays:
        """Values that are everyone's, of those that are held here. All ranks ask together."""
        return values

    def save(self, path: str | Path, state: Arrays) -> None:
        """Write everyone's state to a file."""
        save_step(path, state)

    def agreed(self, operation: str, call: Callable[[], Given]) -> Given:
        """What a call gives, unless it fails on any rank."""
        return call()

    @property
    def repeats(self) -> bool:
        """Whether several steps can be one native call."""
        return not self.recipe.options.detect_anomaly

    def run(self, program: Executable, graph: Graph, inputs: Mapping[str, Any]) -> Arrays:
        """One call of a step's program."""
        if self.recipe.options.detect_anomaly:
            return run_watched(self.session, program, graph, inputs, self.plan.scales_loss)
        return self.session.run(program, inputs)

    def evaluated(self, result: EvalResult) -> EvalResult:
        """The evaluation of what all ranks were given."""
        return result


class Ranks(Alone):
    """A step of several processes, or of several shards in one."""

    is_parallel = True

    def __init__(
        self,
        recipe: StepRecipe,
        plan: UpdatePlan,
        session: Session,
        parallel: Parallel,
        seed: int,
    ):
        super().__init__(recipe, plan, session)
        self.seed = seed
        self.parallel, self.share = parallel, parallel.share
        self.communicator = parallel.communicator
        self.transport = choose_transport(
            parallel.config, parallel.communicator, backend(session.device)
        )
        self._pieces: dict[str, Pieces] = {}  # of what is sharded, by the session's names
        self._types: dict[str, TensorType] = {}  # their types as a whole
        self._parameters: ShardedParameters | None = None
        if parallel.config.shard_parameters:
            _refuse_parameters(session)

    def given(self, inputs: Inputs) -> Inputs:
        return self.agreed("compile_step", lambda: self.parallel.given_inputs(inputs))

    def build(self, inputs: Inputs, report: CompileReport) -> StepPrograms:
        comm, config = self.parallel.communicator, self.parallel.config
        check_facts(comm, facts_of(self.recipe, config, inputs, self.seed))
        programs = self.agreed("compile_step", lambda: self._programs(inputs, report))
        ranks = f"{comm.size} rank{'' if comm.size == 1 else 's'}"
        report.transport = f"{config.shards} shards on {ranks}; {self.transport.told}"
        hyper = self.plan.optimizer.hyper
        check_facts(comm, graph_facts(programs.shard_graph, programs.update_graph, hyper))
        held = programs.held()
        new = self.session.declare(held)
        zeros = {n: np.broadcast_to(held[n].dtype.numpy.type(0), held[n].shape) for n in new}
        self.session.write(zeros)
        if programs.shards_parameters and self._parameters is None:
            self._parameters = ShardedParameters(programs)
            self.session.shard(self._parameters)
            for name in self._parameters.names:
                self._shard(self._parameters.rows_name(name), self.session.types[name])
        for name, type_ in programs.whole.items() if self.recipe.accumulate > 1 else ():
            self._shard(self.plan.name("accumulator", "gradient", name), type_)
        return ParallelVariants(programs, self.transport)

    def _programs(self, inputs: Inputs, report: CompileReport) -> ParallelPrograms:
        found = build_programs(self.recipe, self.plan, self.parallel, inputs, report)
        if self.recipe.options.verify == "full":
            from treadle.step.parallel.gluing import checked_gluing

            with report.stage("verify"):
                report.claims.append(checked_gluing(found))
        return found

    def _shard(self, name: str, type_: TensorType) -> TensorType:
        """Note that a value is held in rows; the type of those of this rank."""
        pieces = self._pieces[name] = Pieces(type_.shape, self.share.shards)
        self._types[name] = type_
        return type_.with_shape((self.share.each, pieces.length))

    def own_types(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        if not self.parallel.config.shard_optimizer:
            return dict(types)
        return {n: self._shard(n, t) if t.shape else t for n, t in types.items()}

    @property
    def sharded(self) -> dict[str, Pieces]:
        return self._pieces

    def held_name(self, name: str) -> str:
        return name if self._parameters is None else self._parameters.rows_name(name)

    def own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(values)
        rows = slice(self.share.own.start, self.share.own.stop)
        for name in self._pieces.keys() & found.keys():
            array = np.asarray(found[name])
            if array.shape != self._types[name].shape:
                raise LoadError(
                    "load_state_dict",
                    f"{name} has the shape {array.shape}, not {self._types[name].shape}",
                    "Check that it is the same model.",
                )
            found[name] = self._pieces[name].cut(array)[rows]
        return found

    def whole(self, values: Arrays) -> Arrays:
        found, comm = dict(values), self.parallel.communicator
        taken, pending = {}, []
        for name, pieces in self._pieces.items():
            if name in found:
                given = np.ascontiguousarray(found[name])
                taken[name] = np.empty((self.share.shards, pieces.length), given.dtype)
                pending.append(comm.all_gather(given, taken[name]))
        comm.wait(pending)
        return found | {n: self._pieces[n].glue(rows) for n, rows in taken.items()}

    def save(self, path: str | Path, state: Arrays) -> None:
        """The first rank writes; all learn whether it could."""

        def write() -> bool:
            if self.share.rank == 0:
                save_step(path, state)
            return True

        self.agreed("save", write)

    def agreed(self, operation: str, call: Callable[[], Given]) -> Given:
        comm = self.parallel.communicator
        if comm.size == 1:
            return call()
        found, error = None, None
        try:
            found = call()
        except Exception as own:  # a user's function may raise anything
            error = own
        told = comm.texts("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        wrong = [(rank, text) for rank, text in enumerate(told) if text]
        if wrong:
            rank, text = wrong[0]
            raise DistributedError(
                operation,
                f"rank {rank} refused, so that nothing was done on any rank: {text}",
                "All ranks are given what fits, and do the same.",
            )
        return found  # type: ignore[return-value]

    @property
    def repeats(self) -> bool:
        return False

    def run(self, program: Executable, graph: Graph, inputs: Mapping[str, Any]) -> Arrays:
        return self.session.run(program, inputs)

    def evaluated(self, result: EvalResult) -> EvalResult:
        """Ranks that are given the same batch have evaluated all of it."""
        comm = self.parallel.communicator
        if comm.size == 1 or not self.parallel.config.local:
            return result
        own = [result.loss, result.weight]
        own += [n for m in result.metrics for n in (result.metrics[m], result.weights[m])]
        every = np.zeros((comm.size, len(own)))
        comm.wait([comm.all_gather(np.array(own), every)])
        pairs = every.reshape(comm.size, -1, 2)  # (ranks, loss and metrics, value and weight)
        weights = pairs[:, :, 1].sum(0)
        totals = np.where(pairs[:, :, 1] == 0, 0, pairs[:, :, 0] * pairs[:, :, 1]).sum(0)
        means = [float(t / w) if w else math.nan for t, w in zip(totals, weights, strict=True)]
        return replace(
            result,
            loss=means[0],
            weight=float(weights[0]),
            metrics=dict(zip(result.metrics, means[1:], strict=True)),
            weights=dict(zip(result.metrics, map(float, weights[1:]), strict=True)),
        )


def _refuse_parameters(session: Session) -> None:
    """Sharded parameters are one step's, in the host's memory."""
    if not session.memory.is_host:
        raise ArgumentError(
            "compile_step",
            f"shard_parameters=True on {session.device!r}: parameters are gathered in the host's "
            "memory",
            'Use device="cpu", or shard_optimizer=True alone.',
        )
    if session.owners > 1:
        raise ArgumentError(
            "compile_step",
            "shard_parameters=True with share=: another step updates whole parameters",
            "Compile the steps without shard_parameters.",
        )


def ranks_of(
    recipe: StepRecipe, plan: UpdatePlan, session: Session, parallel: Parallel | None, seed: int
) -> Alone:
    """Who makes a step."""
    if parallel is None:
        return Alone(recipe, plan, session)
    return Ranks(recipe, plan, session, parallel, seed)


class ParallelVariants:
    """The programs of one batch shape, as a step asks for them."""

    def __init__(self, programs: ParallelPrograms, transport: Transport):
        self.programs, self.indices = programs, programs.indices
        self._transport = transport
        self._chains = can_chain(programs)
        self.graphs = dict.fromkeys(Mode, programs.shard_graph)
        self.is_random = programs.is_random
        self._built: dict[object, ParallelProgram] = {}

    def states(self) -> dict[str, TensorType]:
        return self.programs.accumulators() | state_types([self.programs.shard_graph])

    def step(self, mode: Mode, watched: Watched) -> Executable:
        asked = [n for n in ("captures", "histograms") if getattr(watched, n)]
        if asked:
            raise ArgumentError(
                "step",
                f"{asked[0]}=True in a data-parallel step, whose shards are computed apart",
                "Attach a forward that returns them: step.attach(…).",
            )
        key = mode, watched.grad_norms
        if key not in self._built:
            self._built[key] = self._program(mode, watched.grad_norms)
        return self._built[key]

    def _program(self, mode: Mode, grad_norms: bool) -> ParallelProgram:
        programs = self.programs
        if self._chains:
            return ChainedStep(programs, mode, grad_norms, self._transport)
        programs.compile(mode, grad_norms)
        return ParallelProgram(programs, mode, grad_norms)

    def gradients(self) -> Executable:
        return ParallelProgram(self.programs, Mode.UPDATE, only_gradients=True)

    def main(self, mode: Mode) -> Executable:
        """The program that most of the time goes to."""
        return self.programs.shard()

    def main_inputs(self, arrays: Arrays) -> Arrays:
        """What that program is given: this rank's first shard."""
        if len(self.programs.stages) > 1:
            raise ArgumentError(
                "profile",
                "batch norms over all shards cut the step into stages",
                'Look at a step with DataParallel(batch_norm="per shard").',
            )
        return self.programs.shard_arrays(arrays, self.programs.share.own[0])
