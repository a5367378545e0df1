"""The programs of a data-parallel step for one batch shape, each compiled when first needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from treadle.backends.registry import backend
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, BatchError, GradientError
from treadle.distributed.communicator import Communicator
from treadle.distributed.config import DataParallel
from treadle.distributed.shards import Merge, Pieces, Share, merges
from treadle.domains.philox import key_of_shard
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.composites import BATCH_NORM
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.nn.tracing import INPUT_PREFIX, Inputs
from treadle.optim.append import SCALAR, Mode, UpdatePlan
from treadle.pipeline import CompileReport, StepRecipe, load, optimized
from treadle.rules.canonical import canonicalise
from treadle.runtime.executable import Executable
from treadle.runtime.session import select
from treadle.step.index_checks import IndexChecks, checks_of
from treadle.step.parallel.graphs import (
    Names,
    fold_graph,
    merge_graph,
    narrow_gradients,
    shard_graph,
    squares_graph,
    whole_update,
    with_narrow_leaves,
)
from treadle.step.parallel.parts import Part, parts_of
from treadle.step.parallel.pieces import in_rows, with_norm_given
from treadle.step.parallel.stages import stages_of


@dataclass(frozen=True, slots=True)
class Parallel:
    """What a step needs to know of its ranks."""

    config: DataParallel
    communicator: Communicator
    share: Share

    @staticmethod
    def of(config: DataParallel, communicator: Communicator) -> Parallel:
        return Parallel(
            config, communicator, Share(config.shards, communicator.size, communicator.rank)
        )

    def given_inputs(self, inputs: Inputs) -> Inputs:
        """What a call is given on this rank, for a batch of these types."""
        return self._cut(inputs, self.share.ranks) if self.config.local else inputs

    def shard_inputs(self, given: Inputs) -> Inputs:
        """What one shard is given."""
        return self._cut(given, self.parts)

    def whole_inputs(self, shard: Inputs) -> Inputs:
        """The whole batch, of what one shard is given."""
        types = [
            (n, t.with_shape((t.shape[0] * self.share.shards, *t.shape[1:])))
            if self.is_cut(n, t)
            else (n, t)
            for n, t in shard.types
        ]
        return replace(shard, types=tuple(types))

    @property
    def parts(self) -> int:
        """Shards in what a call is given."""
        return self.share.each if self.config.local else self.share.shards

    def is_cut(self, name: str, type_: TensorType) -> bool:
        return type_.rank > 0 and name.removeprefix(INPUT_PREFIX) not in self.config.whole

    def _cut(self, inputs: Inputs, parts: int) -> Inputs:
        names = [n.removeprefix(INPUT_PREFIX) for n in inputs.names]
        unknown = [n for n in self.config.whole if n not in names]
        if unknown:
            raise ArgumentError(
                "DataParallel",
                f"whole names {', '.join(unknown)}, which the batch does not have",
                f"It has {', '.join(names)}.",
            )
        types = [(n, self._cut_type(n, t, parts)) for n, t in inputs.types]
        return replace(inputs, types=tuple(types))

    def _cut_type(self, name: str, type_: TensorType, parts: int) -> TensorType:
        if not self.is_cut(name, type_):
            return type_
        rows, rest = divmod(type_.shape[0], parts)
        if rest or not rows:
            shown = name.removeprefix(INPUT_PREFIX) or "the array"
            raise BatchError(
                "DataParallel",
                f"{shown} {type_} cannot be cut into {parts} parts of equal length: "
                f"{type_.shape[0]} rows",
                f"Use a batch of a multiple of {parts} rows; what every shard needs whole is named "
                "in DataParallel(whole=…).",
            )
        return type_.with_shape((rows, *type_.shape[1:]))

    def part(self, name: str, array: np.ndarray, type_: TensorType, shard: int) -> np.ndarray:
        """The rows of a shard; `type_` is that of what is given."""
        if not self.is_cut(name, type_):
            return array
        at = shard - self.share.own[0] if self.config.local else shard
        rows = type_.shape[0] // self.parts
        return array[at * rows : (at + 1) * rows]


def canonical(graph: Graph) -> Graph:
    """The graph in canonical form, whatever it costs: shapes of rows must not decide."""
    return canonicalise(graph, Counter())


class PartChecks(IndexChecks):
    """Checks of indices, on the parts of a batch that this rank computes."""

    def __init__(self, checks: IndexChecks, parallel: Parallel, given: Inputs):
        self._checks, self._parallel, self._given = checks, parallel, given
        self.checks = checks.checks

    def are_there(self, arrays: Mapping[str, Any]) -> bool:
        """Parts are looked at on the host, also of arrays that are on a device."""
        return False

    def check(self, operation: str, arrays: Mapping[str, Any]) -> None:
        if self.checks:
            for shard in self._parallel.share.own:
                self._checks.check(
                    operation, shard_parts(self._parallel, self._given, arrays, shard)
                )


def shard_parts(
    parallel: Parallel, given: Inputs, arrays: Mapping[str, Any], shard: int
) -> dict[str, Any]:
    """The arrays of one shard; what is no part of the batch stays as it is.

    Arrays on a device are copied to the host, to be cut.
    """
    types = dict(given.types)
    return {
        n: parallel.part(n, np.asarray(a), types[n], shard) if n in types else a
        for n, a in arrays.items()
    }


class ParallelPrograms:
    """Graphs and programs of one batch shape."""

    def __init__(
        self,
        graph: Graph,
        recipe: StepRecipe,
        plan: UpdatePlan,
        parallel: Parallel,
        given: Inputs,
        report: CompileReport,
    ):
        self.recipe, self.plan, self.parallel, self.given = recipe, plan, parallel, given
        self.report, self.share = report, parallel.share
        self.names = Names(recipe.prefix)
        found = dict(zip(graph.outputs, graph.output_types, strict=True))
        whole = {o.name: t for o, t in found.items() if o.kind is OutputKind.GRADIENT}
        self.whole = whole  # types of gradients by parameter
        self.pieces = {n: Pieces(t.shape, self.share.shards) for n, t in whole.items()}
        self.single = [n for n, t in whole.items() if not t.shape]
        self.gradients = {
            n: t.with_shape((self.share.shards, self.pieces[n].length)) for n, t in whole.items()
        }
        self.metrics = [o.name for o in graph.outputs if o.kind is OutputKind.METRIC]
        self.states = {o.name: t for o, t in found.items() if o.kind is OutputKind.UPDATE}
        chaining = backend(report.device).chaining
        # Rows that devices send to each other are as narrow as they may be.
        narrow = narrow_gradients(graph) if chaining and chaining.connecting else None
        self.narrow = narrow or {}
        self.places_gradients = narrow is not None  # what computes them writes where they are
        shard = shard_graph(graph, self.names, self.share.shards, plan.scales_loss, narrow)
        self.shard_graph = optimized(shard, report, recipe.options)
        self.stages = stages_of(self.shard_graph)
        self.results = [o.name for o in self.shard_graph.outputs if o.kind is OutputKind.RESULT]
        checks = checks_of(self.shard_graph, recipe.options.check_indices)
        self.indices = PartChecks(checks, parallel, given)
        self.has_batch_norm = any(n.op is BATCH_NORM for n in graph.nodes)
        self.is_random = RANDOM_STATE in self.shard_graph.leaves
        self._built: dict[object, Executable] = {}

    def shard_arrays(self, arrays: Mapping[str, Any], shard: int) -> dict[str, Any]:
        """What a shard's program is given: its rows, and its key."""
        found = shard_parts(self.parallel, self.given, arrays, shard)
        if RANDOM_STATE in found:
            found[RANDOM_STATE] = key_of_shard(found[RANDOM_STATE], shard)
        return found

    def compile(self, mode: Mode, grad_norms: bool) -> None:
        """Everything that a call needs: errors and seconds belong to the compilation."""
        for stage in range(len(self.stages)):
            self.shard(stage)
        for merge in merges(self.share.each):
            if merge.levels or merge.waits_at is not None:
                self.merge(merge)
        self.fold(mode)
        if mode is not Mode.ACCUMULATE:
            self.update()
            if self.shards_optimizer or grad_norms:
                self.squares()

    def columns(self) -> list[str]:
        """Numbers that a shard gives, by "kind:name"."""
        found = [f"result:{n}" for n in self.results]
        return found + [f"{k}:{m}" for m in self.metrics for k in ("metric", "weight")]

    @property
    def is_local(self) -> bool:
        return self.parallel.config.local

    @property
    def shards_optimizer(self) -> bool:
        return self.parallel.config.shard_optimizer

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank holds its rows of the parameters alone; one by itself has all."""
        return self.parallel.config.shard_parameters and self.share.ranks > 1

    @property
    def arrays(self) -> list[str]:
        """Parameters that have rows: all but single numbers."""
        return [n for n in self.gradients if n not in self.single]

    @property
    def gathers_rows(self) -> bool:
        """Whether ranks gather the parameters when each has updated its rows."""
        return self.shards_optimizer and self.share.ranks > 1 and not self.shards_parameters

    def sum_name(self, name: str) -> str:
        """What this rank's shards add up to, of a gradient."""
        is_apart = name in self.narrow and self.share.each > 1
        return self.names.summed(name) if is_apart else self.names.gradient(name)

    def sent_type(self, name: str) -> TensorType:
        """This rank's rows of such a sum, as they are sent."""
        own = self.own_type(name)
        return own.with_dtype(self.narrow.get(name, own.dtype)) if self.share.each == 1 else own

    def _narrow_leaves(self) -> dict[str, DType]:
        """Leaves of sums that are stored in narrow types."""
        found = {self.names.gradient(n): dtype for n, dtype in self.narrow.items()}
        if self.share.each == 1:
            found |= {self.names.received(n): dtype for n, dtype in self.narrow.items()}
        return found

    def own_type(self, name: str) -> TensorType:
        """This rank's rows of a gradient or a parameter."""
        type_ = self.gradients[name]
        return type_.with_shape((self.share.each, type_.shape[1]))

    def held(self) -> dict[str, TensorType]:
        """Types of everything that is held beside the session's own values."""
        names, ranks, found = self.names, self.share.ranks, {}
        waiting = {m.waits_at for m in merges(self.share.each)} - {None}
        for name, type_ in self.gradients.items():
            found[names.gradient(name)] = type_.with_dtype(self.narrow.get(name, type_.dtype))
            found.setdefault(self.sum_name(name), type_)
            found |= {names.level(w, name): type_ for w in waiting if w is not None}
            own = self.own_type(name)
            found[names.total(name)] = own
            if ranks > 1:
                shape = (ranks, *own.shape)
                found[names.received(name)] = self.sent_type(name).with_shape(shape)
                if self.shards_optimizer:
                    found[names.rows(name)] = own.with_dtype(self.plan.parameters[name].dtype)
            if not self.shards_optimizer or name in self.single:
                found[names.gathered(name)] = type_
        found |= {names.state(n): t for n, t in self.states.items()}
        return found

    def accumulators(self) -> dict[str, TensorType]:
        """What micro-steps leave for the next, by the names that a step of one process has."""
        if not self.plan.accumulates:
            return {}
        numbers = ["total", "weight"]
        numbers += [f"{k}:{m}" for m in self.metrics for k in ("metric", "metric_weight")]
        found = {self.plan.name("accumulator", n): SCALAR for n in numbers}
        own = {n: self.own_type(n) for n in self.gradients}
        return found | {self.plan.name("accumulator", "gradient", n): t for n, t in own.items()}

    @cached_property
    def update_graph(self) -> Graph:
        """The update of what this rank updates."""
        if self.shards_optimizer:
            return self.rows_update(self.share)
        return optimized(self._whole_update(self.pieces), self.report, self.recipe.options)

    def _whole_update(self, source: Mapping[str, Pieces] | None) -> Graph:
        try:
            with self.recipe.naming():
                return whole_update(self.plan, self.whole, self.metrics, source, self.names)
        except GradientError as error:
            raise ArgumentError(
                "compile_step",
                f"the optimizer {self.plan.optimizer.name} asks for further gradients of the loss, "
                "which shards do not give",
                "Use an optimizer that needs one gradient, or compile without parallel.",
            ) from error

    def rows_update(self, share: Share) -> Graph:
        """The update of one rank's rows."""
        given = canonical(with_norm_given(self._whole_update(None)))
        return in_rows(given, share, self.names, self.plan.optimizer.name, self.single)

    def squares_graph(self, is_host: bool = True) -> Graph:
        if is_host:
            return canonical(squares_graph(self.gradients, self.plan))
        own = {n: self.own_type(n) for n in self.gradients}
        return canonical(squares_graph(own, self.plan, self.names))

    def program(
        self, key: object, make: Callable[[], Graph], name: str, is_strict: bool = False
    ) -> Executable:
        """What is known by a key, compiled when it is first asked for.

        One whose shapes depend on the number of ranks is strict: its ops are rounded one by one,
        however they are fused.
        """
        if key not in self._built:
            options = self.recipe.options
            options = replace(options, numerics="strict") if is_strict else options
            self._built[key] = load(make(), self.report, options, name)
            self.report.compiles += 1
        return self._built[key]

    def shard(self, stage: int = -1) -> Executable:
        """A stage of what a shard computes, or the last."""
        number = stage % len(self.stages)
        name = "shard" if len(self.stages) == 1 else f"shard, stage {number}"
        return self.program(("shard", number), lambda: self.stages[number].graph, name)

    def merge(self, merge: Merge) -> Executable:
        def graph() -> Graph:
            found = merge_graph(self.gradients, merge, self.names, self.narrow)
            return with_narrow_leaves(found, self._narrow_leaves())

        return self.program(merge, graph, "merge")

    def fold(self, mode: Mode) -> Executable:
        def graph() -> Graph:
            sums = {n: self.sum_name(n) for n in self.gradients}
            found = fold_graph(self.gradients, self.share, self.names, self.plan, mode, sums)
            return with_narrow_leaves(found, self._narrow_leaves())

        return self.program(("fold", mode), graph, "fold", is_strict=True)

    def squares(self) -> Executable:
        is_host = backend(self.report.device).memory.is_host
        return self.program("squares", lambda: self.squares_graph(is_host), "squares")

    def update_parts(self, in_several: bool = False) -> list[Part]:
        """The update, in parts if each of them is sent on its way while the next is computed."""
        sizes = {n: p.size for n, p in self.pieces.items() if n not in self.single}
        if not in_several or not self.gathers_rows:
            return [Part(self.update_graph, tuple(sizes))]
        return parts_of(self.update_graph, sizes, self.names)

    def update(self, part: int = 0, in_several: bool = False, of_shard: bool = False) -> Executable:
        """The update; with `of_shard` its gradients are those of the one shard there is."""

        def graph() -> Graph:
            kinds, parts = {OutputKind.UPDATE}, self.update_parts(in_several)
            found = select(parts[part].graph, kinds, ["updated", "grad_norm"])
            narrow = {self.names.total(n): dtype for n, dtype in self.narrow.items()}
            narrow |= {self.names.gathered(n): dtype for n, dtype in self.narrow.items()}
            return with_narrow_leaves(found, narrow if of_shard else {})

        key = "update", in_several, part, of_shard
        return self.program(key, graph, "update", is_strict=True)
