"""`TrainStep`: forward, loss, backward, clipping, accumulation and update as one program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError
from treadle.base.memory import give_back_memory
from treadle.base.numbers import FACTOR, RATE, check_number, check_rounding, check_seed
from treadle.base.trees import Tree
from treadle.base.uncopied import uncopied
from treadle.compile_report import Profile, as_options
from treadle.domains.anomaly import Anomaly
from treadle.domains.float64 import carrier
from treadle.domains.philox import make_key
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.nn.tracing import Inputs, as_argument
from treadle.optim.append import Mode, trace_eval_params, trace_init
from treadle.pipeline import (
    CompileOptions,
    CompileReport,
    StepRecipe,
    build_evaluation,
)
from treadle.runtime.oracle import OracleProgram
from treadle.runtime.session import Session
from treadle.step.batches import Arrays, ByShape, check_flags, in_turn
from treadle.step.finite import FiniteValues
from treadle.step.first_values import FirstValues
from treadle.step.forward import Forward
from treadle.step.hyperparameters import Hyperparameters
from treadle.step.index_guard import Unlooked, run_guarded
from treadle.step.loading import (
    COUNTERS,
    OWN,
    Counters,
    Loaded,
    Rename,
    Terms,
    load_step,
    load_values,
    own_names,
)
from treadle.step.looking import certificate_of, kernels_of, memory_of, profile
from treadle.step.native_runs import NativeRuns
from treadle.step.parallel.programs import Parallel
from treadle.step.parallel.ranks import StepPrograms, ranks_of
from treadle.step.programs import UNWATCHED, Evaluation, Watched
from treadle.step.results import Done, EvalResult, RunResult, StepResult, arrays_of, named
from treadle.step.watching import anomaly_of

if TYPE_CHECKING:
    from treadle.backends.views import KernelView, MemoryView
    from treadle.verify.certificate.certificate import Certificate
    from treadle.web.export import Shown


@uncopied("Compile another with share=step, or load state_dict() or a file of save() into it.")
class TrainStep:
    """One training step as a program over values that it (or a shared session) owns."""

    def __init__(
        self,
        recipe: StepRecipe,
        batch: Tree,
        session: Session,
        report: CompileReport,
        seed: int,
        stream: int,
        first: FirstValues,
        parallel: Parallel | None = None,
    ):
        self.recipe, self.session, self.report = recipe, session, report
        self._seed, self._stream, self._done = seed, stream, Done()
        self._unlooked, self._watched = Unlooked(), UNWATCHED
        self._plan = recipe.plan()
        self._plan.check_numbers()
        self._own: list[str] = []
        self._ranks = ranks_of(recipe, self._plan, session, parallel, seed)
        init, _ = trace_init(self._plan)
        self._init = OracleProgram(init)
        self._finite = FiniteValues(recipe.model, self._plan, self._init)
        self._eval_params = trace_eval_params(self._plan)
        self._inputs = inputs = self._ranks.given(Inputs.of(batch))
        self._on_device = not session.memory.is_host
        self._programs = ByShape(self._build, recipe.options, inputs, session)
        most = max(2, recipe.options.max_shapes)
        specialise = replace(recipe.options, on_new_shape="specialise", max_shapes=most)
        self._evaluations = ByShape(self._build_evaluation, specialise, inputs, session)
        self._native_runs = NativeRuns(
            session,
            self._programs,
            self._unlooked,
            key=lambda later: self._key(self._done.steps + later, 0),
            advance=lambda made: self._done.add(made),
        )
        self._graph = self._programs.built(inputs).graphs[Mode.UPDATE]
        made = zip((o.name for o in init.outputs), init.output_types, strict=True)
        types = self._ranks.own_types(dict(made))
        types |= {n: t for n, (t, _) in self._plan.scalars().items()}
        session.declare(types)
        self._own += [n for n in types if n not in self._own]
        self.hyperparameters = Hyperparameters(session, self._plan, recipe.naming)
        report.state_bytes = session.nbytes  # a memory budget is of these too
        # Compiled now rather than at the first step: errors and seconds belong here.
        self._programs.built(inputs).step(self._mode(), UNWATCHED)
        first.write()
        self._start()
        give_back_memory()
        self._is_ready = True

    def _build(self, inputs: Inputs) -> StepPrograms:
        built = self._ranks.build(inputs, self.report)
        self._declare(built.states())
        return built

    def _declare(self, found: Mapping[str, TensorType]) -> None:
        """Room for state that a new shape brings with it: accumulators of its metrics."""
        own = {n: t for n, t in found.items() if n.startswith(self.recipe.prefix)}
        new = self.session.declare(own)
        self._own += [n for n in new if n not in self._own]
        if "_is_ready" in self.__dict__:  # until then `_start` gives everything its first value
            self.session.write({n: np.zeros(own[n].shape, own[n].dtype.numpy) for n in new})

    def _build_evaluation(self, inputs: Inputs) -> Evaluation:
        with self.report.stage("evaluation"):
            graph = build_evaluation(self.recipe, inputs, self._eval_params, self.report)
        return Evaluation(graph, self.report, self.recipe.options.without_budget, self._on_device)

    def _start(self) -> None:
        """First values of everything but the model's parameters and states."""
        types, made = self.session.types, {o.name for o in self._init.graph.outputs}
        rest = (n for n in self._own if n not in made)
        zeros = {n: np.broadcast_to(types[n].dtype.numpy.type(0), types[n].shape) for n in rest}
        # The oracle holds floats as float64, so hyperparameters are not rounded.
        scalars = {n: np.array(v, carrier(t.dtype)) for n, (t, v) in self._plan.scalars().items()}
        self.session.write(zeros | scalars)
        self._begin_optimizer()
        self._done.steps, self._done.micro = 0, 0

    def _begin_optimizer(self) -> None:
        """The optimizer's state as it is at the parameters there are."""
        with self.session.gathered():
            first = zip(self._init.graph.outputs, self._init.run(self.session.values), strict=True)
            self.session.write(self._ranks.own({o.name: value for o, value in first}))

    def __call__(
        self,
        batch: Tree,
        captures: bool = False,
        grad_norms: bool = False,
        histograms: bool = False,
    ) -> StepResult:
        """One step, or one micro-step of an accumulation. Calls from several threads take turns."""
        watched = self._watched
        if not (captures is grad_norms is histograms is False):
            flags = {"captures": captures, "grad_norms": grad_norms, "histograms": histograms}
            check_flags("step", self._inputs, **flags)
            watched = Watched(*map(bool, flags.values()))
        return StepResult(*self._once("step", batch, watched))

    @contextmanager
    def watching(
        self, captures: bool = False, grad_norms: bool = False, histograms: bool = False
    ) -> Iterator[None]:
        """Inside, a call that asks for nothing by itself asks for these."""
        before, self._watched = self._watched, Watched(captures, grad_norms, histograms)
        try:
            yield
        finally:
            self._watched = before

    def _once(
        self, operation: str, batch: Tree, watched: Watched
    ) -> tuple[Mapping[str, Any], Mode]:
        with self.session.lock:
            if self._on_device:
                self._unlooked.look()
            variants, arrays = self._fitting(operation, batch)
            mode = self._mode()
            is_guarded = self._on_device and variants.indices.are_there(arrays)
            program = variants.step(mode, watched)
            inputs = self._with_key(arrays) if variants.is_random else arrays
            before = self.session.progress(program)
            try:
                outputs = self._ranks.run(program, variants.graphs[mode], inputs)
            except KeyboardInterrupt:
                # It arrives when native code returns: the values are then those of a whole step.
                if self.session.progress(program) != before:
                    self._done.advance(mode)
                raise
            before_it = replace(self._done) if is_guarded else self._done
            self._done.advance(mode)
            if is_guarded:
                undo = functools.partial(self._undo, before_it, replace(self._done))
                return self._unlooked.add(operation, variants, arrays, outputs, undo), mode
            return outputs, mode

    def _fitting(self, operation: str, batch: Tree) -> tuple[StepPrograms, Arrays]:
        """Programs and arrays of a batch, which is right on every rank."""
        return self._ranks.agreed(operation, lambda: self._programs.get(operation, batch))

    def _undo(self, before: Done, after: Done) -> None:
        """Counts without a step that was refused, unless others were made since."""
        self._done = before if self._done == after else self._done

    def _mode(self) -> Mode:
        if self.recipe.accumulate == 1:
            return Mode.UPDATE
        is_last = self._done.micro == self.recipe.accumulate - 1
        return Mode.ACCUMULATE_AND_UPDATE if is_last else Mode.ACCUMULATE

    def _with_key(self, arrays: Arrays) -> Arrays:
        return arrays | {RANDOM_STATE: self._key(self._done.steps, self._done.micro)}

    def _key(self, steps: int, micro: int) -> np.ndarray:
        return make_key(self._seed, steps, micro, self._stream)

    def run(self, batches: Iterable[Tree]) -> RunResult:
        """A step for each batch; metrics are weighted means over all of them.

        A list or tuple of batches stays in native code for many steps at a time. What another
        iterable yields is used before the next is asked for, as it may be the same memory.
        """
        stays_native = self.recipe.accumulate == 1 and self._ranks.repeats
        once = functools.partial(self._once, "run", watched=UNWATCHED)
        return RunResult(self._native_runs.outputs(batches, once, stays_native))

    @in_turn
    def gradients(self, batch: Tree) -> Arrays:
        """Gradients of the loss on a batch, by parameter; nothing changes."""
        variants, arrays = self._fitting("gradients", batch)
        given = self._with_key(arrays)
        outputs = run_guarded(self.session, "gradients", variants, variants.gradients(), given)
        # Where gradients are summed, the step's are those of the loss times the number of calls.
        calls = self.recipe.accumulate if self.recipe.sums else 1
        wide = {n: np.asarray(g) for n, g in arrays_of(outputs, OutputKind.GRADIENT).items()}
        return {n: np.asarray(g / calls, g.dtype) for n, g in wide.items()}

    def find_anomaly(self, batch: Tree) -> Anomaly | None:
        """Where the next step on a batch would make its first NaN or infinity; nothing changes."""
        with self.session.gathered():
            variants, arrays = self._programs.get("find_anomaly", batch)
            graph = variants.graphs[self._mode()]
            given = variants.main_inputs(self._with_key(arrays))
            return anomaly_of(self.session, graph, given)

    @in_turn
    def evaluate(self, batch: Tree, captures: bool = False) -> EvalResult:
        """Loss and metrics in evaluation mode; other batch sizes are compiled as they come."""
        check_flags("evaluate", self._inputs, captures=captures)
        get = functools.partial(self._evaluations.get, "evaluate", batch)
        evaluation, arrays = self._ranks.agreed("evaluate", get)
        program, given = evaluation.program(captures), self._with_key(arrays)
        outputs = run_guarded(self.session, "evaluate", evaluation, program, given)
        result = EvalResult(
            float(outputs["result:loss"]),
            float(outputs["result:weight"]),
            named(outputs, "metric:"),
            named(outputs, "weight:"),
            arrays_of(outputs, OutputKind.CAPTURE),
        )
        return self._ranks.evaluated(result)

    def attach(
        self,
        forward: Callable[..., Any],
        inputs: Tree,
        training: bool = False,
        options: CompileOptions | None = None,
        stream: int | None = None,
    ) -> Forward:
        """A forward program on the same values: no copies, never stale."""
        recipe = self.recipe
        report = CompileReport(self.report.device, recipe.precision.name, self.report.parameters)
        return Forward(
            recipe.model,
            forward,
            inputs,
            self.session,
            report,
            precision=recipe.precision,
            options=as_options(options, recipe.options.without_budget),
            training=training,
            seed=self._seed,
            eval_params=self._eval_params,
            stream=stream,
        )

    @property
    def model(self) -> Any:
        """What was compiled: the module, or the tree of modules, parameters and arrays."""
        return as_argument(self.recipe.model)

    @property
    def device_params(self) -> dict[str, Any]:
        """The parameters and states themselves, for other frameworks to read without a copy.

        On a GPU arrays with DLPack and `__cuda_array_interface__`, otherwise NumPy's. The next step
        changes them; `load_params` writes them.
        """
        return self.session.shared(self.recipe.model.declarations())

    @property
    def params(self) -> Arrays:
        """Copies of the parameters and states, under PyTorch's names."""
        return self.session.read(self.recipe.model.declarations())

    @in_turn
    def load_params(
        self,
        values: Mapping[str, object],
        strict: bool = True,
        *,
        rename: Rename | None = None,
        skip_mismatched: bool = False,
    ) -> Loaded:
        """Replace parameters and states by name; `strict=False` takes what fits the names.

        What was `missing` and what was `unexpected` is returned. `rename` is a dict of prefixes,
        {"module": "", "backbone": "encoder"}, or a function of a name; `skip_mismatched` leaves
        out what has another shape, such as a head. Before the first update the optimizer starts
        from them: averages begin where training does.
        """
        terms = Terms(strict, rename, skip_mismatched)
        found = load_values(self.session, self.recipe.model, (), values, "load_params", terms)
        self._finite.note_loaded(found.arrays)
        if self.count == 0:
            self._begin_optimizer()
        return found.loaded

    def _names(self) -> dict[str, str]:
        """Names of the session's values by the names that files have: the model's, then its own."""
        model = {n: n for n in self.recipe.model.declarations()}
        return model | {OWN + n[len(self.recipe.prefix) :]: n for n in self._own}

    @in_turn
    def state_dict(self) -> Arrays:
        """Everything that the next step depends on: copies, by name."""
        names = self._names()
        values = self._ranks.whole(self.session.read(names.values()))
        found = {name: values[own] for name, own in names.items()}
        counters = Counters(self._seed % 2**64, self._done.steps, self._done.micro, self._stream)
        return found | {COUNTERS: counters.array()}

    def not_finite(self, state: Arrays | None = None) -> tuple[str, ...]:
        """Names in `state_dict` of what is NaN or infinite and should not be, parameters first.

        What begins with infinities, or is loaded with them and not trained, may have them. `state`
        is a `state_dict` that was just taken: values on a device are then not read again.
        """
        names = {own: name for name, own in self._names().items()}
        taken = {} if state is None else {own: state[name] for own, name in names.items()}
        with self.session.lock if taken else self.session.gathered():
            found = self._finite.wrong(taken or self.session.values, list(names), self._seed)
        return tuple(names[n] for n in found)

    @in_turn
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue exactly where `state_dict` was taken. All or nothing."""
        counters = Counters.read(state, self.recipe.accumulate)
        given = self._ranks.own(own_names(state, self.recipe.prefix))
        model = self.recipe.model
        found = load_values(self.session, model, self._own, given, "load_state_dict")
        self._finite.note_loaded({n: found.arrays[n] for n in model.declarations()})
        self._seed, self._stream = counters.seed, counters.stream
        self._done.steps, self._done.micro = counters.steps, counters.micro

    def save(self, path: str | Path) -> None:
        """Write `state_dict` to a safetensors file with a checksum, aside and renamed."""
        self._ranks.save(path, self.state_dict())
        self.session.note_checkpoint(f"{path}, written after {self._done.steps} updates")

    def load(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote."""
        self.load_state_dict(load_step(path))

    def export_web(self, folder: str | Path, page: str = "train", **shown: Unpack[Shown]) -> Path:
        """Write a static page that trains this step in a browser, from where it is now."""
        from treadle.web.export import export_step

        return export_step(self, folder, page, shown)

    @in_turn
    def reset(self, seed: int | None = None) -> None:
        """Start again without compiling: first values, fresh optimizer, counters at zero."""
        self._seed = self._seed if seed is None else check_seed("reset", seed)
        FirstValues(self.session, self.recipe.model.declarations(), self._seed).write()
        self._finite.forget_loaded()
        self._start()

    def __repr__(self) -> str:
        model, size = type(self.recipe.model).__name__, f"{self.report.parameters:,} parameters"
        return f"TrainStep({model}, {size}, {self.count} updates, device={self.report.device!r})"

    def __setattr__(self, name: str, value: object) -> None:
        """A misspelt property is an error rather than a new attribute."""
        is_known = name in self.__dict__ or hasattr(type(self), name)
        if not is_known and "_is_ready" in self.__dict__:
            raise AttributeError(f"TrainStep has no {name!r} to set; see lr_scale, learning_rate")
        super().__setattr__(name, value)

    @property
    def count(self) -> int:
        """Updates done."""
        return int(self.session.values[self._plan.name("count")])

    @property
    def position(self) -> tuple[int, int]:
        """Updates made, those that overflowed too, and micro-steps since; a device is not asked."""
        return self._done.steps, self._done.micro

    @property
    def micro_step(self) -> int:
        """Micro-batches accumulated since the last update: 0 right after one."""
        return self._done.micro

    @property
    def learning_rate(self) -> float:
        """The rate of the next update: schedule(count) · lr_scale."""
        return self.hyperparameters.learning_rate(self.count) * self.lr_scale

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.hyperparameters.set_learning_rate(rate)

    @property
    def lr_scale(self) -> float:
        """A factor on every learning rate."""
        return float(self.session.values[self._plan.name("lr_scale")])

    @lr_scale.setter
    def lr_scale(self, scale: float) -> None:
        number = check_number("step", "lr_scale", scale, RATE)
        check_rounding("step", "lr_scale", number, RATE, float32)
        self.session.write({self._plan.name("lr_scale"): np.float64(number)})

    @property
    def clip_norm(self) -> float | None:
        """The bound on the gradient's norm; None where the step was compiled without one."""
        bound = self.recipe.clip_norm
        return None if bound is None else float(self.session.values[self._plan.name("clip_norm")])

    @clip_norm.setter
    def clip_norm(self, bound: float) -> None:
        number = check_number("step", "clip_norm", bound, FACTOR)
        if self.recipe.clip_norm is None:
            cause = "the step was compiled without one"
            raise ArgumentError("clip_norm", cause, "Compile with clip_norm=.")
        self.session.write({self._plan.name("clip_norm"): np.float64(number)})

    @property
    def loss_scale(self) -> float:
        """The factor on the loss before it is differentiated: 1 but for float16."""
        return float(self.session.values.get(self._plan.name("loss_scale"), 1.0))

    @property
    def skipped(self) -> int:
        """Updates that were left out because a gradient overflowed: float16 only."""
        return int(self.session.values.get(self._plan.name("skipped"), 0))

    @property
    def graph(self) -> Graph:
        """The whole step as a graph."""
        return self._graph

    def profile(self, batch: Tree) -> Profile:
        """What each kernel takes on a batch; nothing changes. On the CPU one thread's processor
        time, on a GPU the time between events around launches, on the oracle that of each op."""
        with self.session.gathered():
            variants, arrays = self._programs.get("profile", batch)
            values = {**self.session.values, **variants.main_inputs(self._with_key(arrays))}
            return profile(variants.main(self._mode()), values, self.report, self.recipe.options)

    @property
    def kernels(self) -> tuple[KernelView, ...]:
        """The step's distinct kernels: name, text, llvm, assembly, lines. The oracle has none."""
        program = self._programs.built(self._inputs).main(self._mode())
        return kernels_of(program, self.report, self.recipe.options)

    @property
    def memory(self) -> MemoryView | None:
        """Which buffers live at the peak of a step, and who made them. The oracle has none."""
        program = self._programs.built(self._inputs).main(self._mode())
        return memory_of(program, self.report, self.recipe.options)

    @property
    def certificate(self) -> Certificate:
        """What was compiled and what is claimed of it, for `treadle check` and for people."""
        return certificate_of(self.report, self.recipe.options, self._ranks.is_parallel)
