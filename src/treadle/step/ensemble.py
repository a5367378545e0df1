"""`td.ensemble`: many models of one recipe, trained by one program with an axis of members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.base.numbers import check_seed, check_whole
from treadle.base.trees import Tree
from treadle.base.uncopied import uncopied
from treadle.batching.walk import batch_graph, with_axis
from treadle.compile_report import CompileReport
from treadle.domains.float64 import carrier
from treadle.domains.philox import make_key
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.graph import Graph
from treadle.nn.tracing import INPUT_PREFIX, Inputs
from treadle.optim.append import Mode, UpdatePlan, state_types, trace_eval_params, trace_init
from treadle.pipeline import (
    build_evaluation,
    build_forward,
    build_step,
    load,
    open_session,
    optimized,
)
from treadle.runtime.oracle import OracleProgram
from treadle.step.batches import Arrays, ByShape
from treadle.step.first_values import begin_model
from treadle.step.forward import Built
from treadle.step.index_guard import Guarded, Unlooked, refuse, run_guarded
from treadle.step.loading import (
    COUNTERS,
    OWN,
    Counters,
    Loaded,
    Terms,
    load_step,
    load_values,
    own_names,
    save_step,
)
from treadle.step.member_values import (
    EnsembleResult,
    MemberHyperparameters,
    MemberPredictions,
    by_member,
)
from treadle.step.native_runs import NativeRuns
from treadle.step.programs import UNWATCHED, Evaluation, Variants
from treadle.step.train_step import TrainStep


def ensemble(
    step: TrainStep,
    n: int,
    *,
    seeds: Sequence[int] | None = None,
    fresh: bool = True,
    own_batches: bool = False,
    **hyperparameters: object,
) -> Ensemble:
    """Train n models of a step's recipe as one program, which computes all of them side by side.

    Member i is what the step would be after `step.reset(seeds[i])`; seeds are the step's and those
    after it where none are given. `fresh=False` begins with the step's present values instead.
    Numbers of the optimizer (`lr=[…]`, see `step.hyperparameters`), `lr_scale` and `clip_norm` are
    one for all or one for each. Batches are for all members, or with `own_batches` have an axis of
    n in front. The step itself is left as it is.
    """
    if not isinstance(step, TrainStep):
        raise ArgumentError(
            "ensemble",
            f"the step is a {type(step).__name__}",
            "Compile one: td.ensemble(td.compile_step(model, loss, optimizer, batch), n).",
        )
    size = check_whole("ensemble", "n", n)
    if step.recipe.options.detect_anomaly:
        raise ArgumentError(
            "ensemble",
            "the step was compiled with detect_anomaly, which looks at one model",
            "Compile it without, and look at a member: ensemble.member(0).find_anomaly(batch).",
        )
    if step.recipe.is_parallel:
        raise ArgumentError(
            "ensemble",
            "the step was compiled with parallel=, which shares out one model",
            "Compile it without.",
        )
    state = step.state_dict()
    at = Counters.read(state, step.recipe.accumulate)
    given = [at.seed + i for i in range(size)] if seeds is None else list(seeds)
    if len(given) != size:
        raise ArgumentError(
            "ensemble", f"{len(given)} seeds for {size} members", "Give one for each."
        )
    checked = [check_seed("ensemble", seed) for seed in given]
    made = Ensemble(step, checked, at, None if fresh else state, bool(own_batches))
    for name, value in hyperparameters.items():
        made.hyperparameters[name] = value
    return made


@lru_cache(maxsize=64)
def _first_keys(seeds: tuple[int, ...], stream: int) -> np.ndarray:
    return np.stack([make_key(seed, stream=stream) for seed in seeds])


@uncopied("Make another of the step, and load a file of save() into it.")
class Ensemble:
    """Several models as one: every value has an axis of members in front."""

    def __init__(
        self,
        step: TrainStep,
        seeds: Sequence[int],
        at: Counters,
        state: Mapping[str, np.ndarray] | None,
        own_batches: bool,
    ):
        if not isinstance(step, TrainStep):
            cause = f"the step is a {type(step).__name__}"
            raise ArgumentError("Ensemble", cause, "Make one with td.ensemble(step, n).")
        self.recipe, self.seeds = step.recipe, list(seeds)
        self._at = replace(at, steps=0, micro=0) if state is None else at
        self._batches_own = own_batches
        self._plan = plan = self.recipe.plan()
        device, precision = step.report.device, step.report.precision
        self.report = CompileReport(device, precision, len(seeds) * step.report.parameters)
        self.session = open_session(device, None)
        self._on_device = not self.session.memory.is_host
        self._eval_params = trace_eval_params(plan)
        self._init = OracleProgram(self._batched(trace_init(plan)[0], False))
        self._single = inputs = step._inputs
        self._inputs = self._with_members(inputs) if own_batches else inputs
        options, session = self.recipe.options, self.session
        self._programs = ByShape(self._build, options, self._inputs, session)
        most = max(2, options.max_shapes)
        specialise = replace(options, on_new_shape="specialise", max_shapes=most)
        self._evaluations = ByShape(self._build_evaluation, specialise, self._inputs, session)
        self._native_runs = NativeRuns(
            self.session, self._programs, Unlooked(), self._key, self._add_steps
        )
        self._own: list[str] = []
        self._declare(plan)
        self._programs.built(self._inputs)
        self._start(state)
        self.hyperparameters = MemberHyperparameters(self.session, plan, self.recipe, len(self))
        self._programs.built(self._inputs).step(self._mode(), UNWATCHED)

    def __len__(self) -> int:
        """How many members there are."""
        return len(self.seeds)

    def _batched(self, graph: Graph, own_inputs: bool) -> Graph:
        """A graph of one member as the graph of all: each has its key, so noise is its own."""
        leaves = [n for n in graph.leaves if own_inputs or not n.startswith(INPUT_PREFIX)]
        every = frozenset(range(len(graph.outputs)))
        batched = batch_graph(graph, frozenset(leaves), len(self), "same", every)
        return optimized(batched, self.report, self.recipe.options)

    def _with_members(self, inputs: Inputs) -> Inputs:
        types = tuple((name, with_axis(type_, len(self))) for name, type_ in inputs.types)
        return Inputs(types, inputs.structure)

    def _of_one(self, inputs: Inputs) -> Inputs:
        """What one member is given of a batch."""
        if not self._batches_own:
            return inputs
        types = tuple((name, type_.with_shape(type_.shape[1:])) for name, type_ in inputs.types)
        return Inputs(types, inputs.structure)

    def _build(self, inputs: Inputs) -> Variants:
        with self.recipe.naming():
            graphs = build_step(self.recipe, self._plan, self._of_one(inputs), self.report)
        batched = {mode: self._batched(g, self._batches_own) for mode, g in graphs.items()}
        self.report.nodes["ensemble"] = len(batched[Mode.UPDATE].nodes)
        self._make_room(batched)
        return Variants(batched, self.report, self.recipe.options, self._on_device)

    def _build_evaluation(self, inputs: Inputs) -> Evaluation:
        one, recipe = self._of_one(inputs), self.recipe
        with self.report.stage("evaluation"):
            graph = build_evaluation(recipe, one, self._eval_params, self.report)
            graph = self._batched(graph, self._batches_own)
        return Evaluation(graph, self.report, recipe.options.without_budget, self._on_device)

    def _make_room(self, graphs: Mapping[Mode, Graph]) -> None:
        """State that a new shape brings with it: accumulators of its gradients and metrics."""
        found = state_types(list(graphs.values()))
        own = {n: t for n, t in found.items() if n.startswith(self.recipe.prefix)}
        new = self.session.declare(own)
        self.session.write({n: np.zeros(own[n].shape, own[n].dtype.numpy) for n in new})
        self._own += new

    def _declare(self, plan: UpdatePlan) -> None:
        """Room for everything, with an axis of members."""
        model = {n: d.type for n, d in self.recipe.model.declarations().items()}
        scalars = {n: t for n, (t, _) in plan.scalars().items()}
        types = {n: with_axis(t, len(self)) for n, t in (model | scalars).items()}
        first = self._init.graph
        types |= dict(zip((o.name for o in first.outputs), first.output_types, strict=True))
        new = self.session.declare(types)
        self._own += [n for n in new if n not in model]
        self.report.state_bytes = self.session.nbytes

    def _start(self, state: Mapping[str, np.ndarray] | None) -> None:
        """First values: of each seed, or those of a step for every member."""
        if state is not None:
            values = own_names(state, self.recipe.prefix)
            self.session.write({n: by_member([v] * len(self)) for n, v in values.items()})
            return
        declarations = self.recipe.model.declarations()
        for name, declared in declarations.items():
            firsts = [declared.first_value(seed, name) for seed in self.seeds]
            self.session.write({name: by_member(firsts)})
        types = self.session.types
        zeros = {n: np.zeros(types[n].shape, types[n].dtype.numpy) for n in self._own}
        scalars = {
            n: np.full(len(self), v, carrier(t.dtype))  # not rounded where the session is wide
            for n, (t, v) in self._plan.scalars().items()
        }
        self.session.write(zeros | scalars)
        self._run_init()

    def _run_init(self) -> None:
        """The optimizer's first state, which may be of the parameters."""
        first = self._init.run(self.session.values)
        outputs = self._init.graph.outputs
        self.session.write({o.name: value for o, value in zip(outputs, first, strict=True)})

    def _mode(self) -> Mode:
        if self.recipe.accumulate == 1:
            return Mode.UPDATE
        is_last = self._at.micro == self.recipe.accumulate - 1
        return Mode.ACCUMULATE_AND_UPDATE if is_last else Mode.ACCUMULATE

    def _key(self, later: int = 0) -> np.ndarray:
        """The random keys of the step that comes so many steps later, one for each member."""
        at = self._at
        keys = _first_keys(tuple(self.seeds), at.stream).copy()
        keys[:, 2:4] = make_key(0, at.steps + later, at.micro)[2:4]  # the step and the micro-step
        return keys

    def _add_steps(self, made: int) -> None:
        self._at = replace(self._at, steps=self._at.steps + made)

    def __call__(self, batch: Tree) -> EnsembleResult:
        """One step of every member, or one micro-step of an accumulation."""
        with self.session.lock:
            variants, arrays = self._programs.get("ensemble", batch)
            mode = self._mode()
            program = variants.step(mode, UNWATCHED)
            given = arrays | {RANDOM_STATE: self._key()} if variants.is_random else arrays
            outputs: Mapping[str, Any] = self.session.run(program, given)
            if self._on_device and variants.indices.are_there(arrays):
                checked = Guarded(outputs, lambda: refuse("ensemble", variants.indices, arrays))
                checked.look()
                outputs = checked
            if mode is Mode.ACCUMULATE:
                self._at = replace(self._at, micro=self._at.micro + 1)
            else:
                self._at = replace(self._at, steps=self._at.steps + 1, micro=0)
            return EnsembleResult(outputs)

    def run(self, batches: Iterable[Tree]) -> np.ndarray:
        """A step for each batch: the losses, (steps, n). A list stays in native code."""

        def once(batch: Tree) -> tuple[Mapping[str, Any], Mode]:
            mode = self._mode()
            return self(batch).outputs, mode

        native = self.recipe.accumulate == 1
        told = self._native_runs.outputs(batches, once, native)
        losses = [EnsembleResult(outputs).losses for outputs, _ in told]
        return np.stack(losses) if losses else np.zeros((0, len(self)), np.float32)

    def evaluate(self, batch: Tree) -> EnsembleResult:
        """Loss and metrics of each member in evaluation mode; nothing changes."""
        evaluation, arrays = self._evaluations.get("evaluate", batch)
        given = arrays | {RANDOM_STATE: self._key()}
        program = evaluation.program(False)
        return EnsembleResult(run_guarded(self.session, "evaluate", evaluation, program, given))

    def attach(self, forward: Callable[..., Any], inputs: Tree) -> MemberPredictions:
        """`forward(model, batch)` of all members on the same values: results have n in front.

        The batch is for all members; `.mean`, `.std` and `.vote` of what it gives combine them.
        """
        fixed, recipe, report = Inputs.of(inputs), self.recipe, self.report
        options = recipe.options.without_budget

        def build(found: Inputs) -> Built:
            with report.stage("forward"):
                traced = build_forward(
                    recipe.model,
                    forward,
                    found,
                    recipe.precision,
                    False,
                    self._eval_params,
                    options,
                    report,
                )
                whole = replace(traced, graph=self._batched(traced.graph, False))
            report.compiles += 1
            checks = options.check_indices
            return Built(
                whole, lambda g: load(g, report, options, "forward"), checks, self._on_device
            )

        specialise = replace(options, on_new_shape="specialise")
        programs = ByShape(build, specialise, fixed, self.session)
        programs.built(fixed)
        return MemberPredictions(self.session, programs, self._key)

    @property
    def params(self) -> Arrays:
        """Copies of the parameters and states of all members, by name: (n, …)."""
        return self.session.read(self.recipe.model.declarations())

    def load_params(self, values: Mapping[str, object], strict: bool = True) -> Loaded:
        """Replace parameters and states of all members, (n, …) by name.

        Before the first update the optimizer starts from them, as for `TrainStep.load_params`.
        """
        terms = Terms(strict)
        found = load_values(self.session, self.recipe.model, (), values, "load_params", terms)
        if not self._at.steps:
            self._run_init()
        return found.loaded

    def state_dict(self) -> Arrays:
        """What the next step depends on: the members' `state_dict`s, one on the other."""
        start, model = len(self.recipe.prefix), self.recipe.model.declarations()
        names = {n: n for n in model} | {OWN + n[start:]: n for n in self._own}
        values = self.session.read(names.values())
        counters = [replace(self._at, seed=seed).array() for seed in self.seeds]
        return {name: values[n] for name, n in names.items()} | {COUNTERS: by_member(counters)}

    def member_state(self, index: int) -> Arrays:
        """The `state_dict` of one member, for `load_state_dict` of an ordinary step."""
        found = self._checked(index)
        return {name: value[found].copy() for name, value in self.state_dict().items()}

    def _checked(self, index: int) -> int:
        is_index = isinstance(index, (int, np.integer)) and not isinstance(index, bool)
        if not is_index or not -len(self) <= index < len(self):
            cause = f"there is no member {index!r}"
            raise ArgumentError("ensemble", cause, f"There are 0 to {len(self) - 1}.")
        return int(index)

    def member(self, index: int) -> TrainStep:
        """One member as an ordinary step with values of its own, which can go on by itself."""
        state = self.member_state(index)
        recipe, seed = self.recipe, self.seeds[index]
        first = self.report
        report = CompileReport(first.device, first.precision, first.parameters // len(self))
        session = open_session(first.device, None)
        values = begin_model(session, recipe.model, seed)
        session.owners += 1
        types = [type_ for _, type_ in self._single.types]
        batch = self._single.structure.rebuild(types)
        with recipe.naming():
            step = TrainStep(recipe, batch, session, report, seed, self._at.stream, values)
        step.load_state_dict(state)
        return step

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue exactly where `state_dict` was taken. All or nothing."""
        rows = np.asarray(state.get(COUNTERS, ())) if isinstance(state, Mapping) else np.empty(0)
        if rows.ndim != 2 or len(rows) != len(self):
            raise LoadError(
                "load_state_dict",
                f"the state is not one of {len(self)} members",
                "Load what state_dict of an ensemble of as many gave.",
            )
        members = [Counters.read({COUNTERS: row}, self.recipe.accumulate) for row in rows]
        if len({(c.steps, c.micro, c.stream) for c in members}) != 1:
            raise LoadError(
                "load_state_dict",
                "its members are at different steps",
                "Members of an ensemble are trained together.",
            )
        given = own_names(state, self.recipe.prefix)
        load_values(self.session, self.recipe.model, self._own, given, "load_state_dict")
        self._at, self.seeds = members[0], [c.seed for c in members]

    def save(self, path: str | Path) -> None:
        """Write `state_dict` to a safetensors file with a checksum, aside and renamed."""
        save_step(path, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote."""
        self.load_state_dict(load_step(path))

    @property
    def count(self) -> np.ndarray:
        """Updates done by each member."""
        return np.asarray(self.session.values[self._plan.name("count")]).copy()

    @property
    def graph(self) -> Graph:
        """The whole step of all members as a graph."""
        return self._programs.built(self._inputs).graphs[Mode.UPDATE]

    def __repr__(self) -> str:
        model, device = type(self.recipe.model).__name__, self.report.device
        return f"Ensemble({len(self)} of {model}, {self._at.steps} updates, device={device!r})"
