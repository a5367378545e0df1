"""`Forward`: a program without gradients over a model's values; and `td.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_seed, check_whole
from treadle.base.trees import Tree
from treadle.base.uncopied import uncopied
from treadle.batching.vmap import vmap
from treadle.compile_report import Profile, as_options
from treadle.domains.philox import make_key
from treadle.frontend.scopes import RANDOM_STATE
from treadle.frontend.tracing import function_name
from treadle.ir.graph import Graph
from treadle.nn.module import Module
from treadle.nn.tracing import Inputs, TracedModel, as_module, count_parameters
from treadle.pipeline import (
    CompileOptions,
    CompileReport,
    build_forward,
    choose_device,
    choose_precision,
    load,
    open_session,
)
from treadle.runtime.executable import Executable
from treadle.runtime.session import Session
from treadle.step.batches import (
    Arrays,
    ByShape,
    check_arguments,
    check_flags,
    check_specs,
    chosen_stream,
)
from treadle.step.first_values import begin_model
from treadle.step.index_checks import checks_of
from treadle.step.index_guard import guarded, run_guarded
from treadle.step.loading import Loaded, Rename, Terms, load_model, load_values, save_model
from treadle.step.looking import certificate_of, profile

if TYPE_CHECKING:
    from treadle.verify.certificate.certificate import Certificate
    from treadle.web.export import Shown


class Built:
    """A program for one shape of inputs, and how its results are put together."""

    def __init__(
        self,
        traced: TracedModel,
        load_: Callable[[Graph], Executable],
        checks: bool,
        on_device: bool,
    ):
        self.traced = traced
        self.indices = checks_of(traced.graph, checks)
        # On a device the program looks at its indices itself.
        self.program = load_(guarded(traced.graph, self.indices) if on_device else traced.graph)


@uncopied("Compile it once more: with share=forward it has the same values.")
class Forward:
    """A compiled function of a model and a batch. States it updates are the session's."""

    def __init__(
        self,
        model: Module,
        forward: Callable[..., Any],
        inputs: Tree,
        session: Session,
        report: CompileReport,
        *,
        precision: dtypes.DType,
        options: CompileOptions,
        training: bool = False,
        seed: int = 0,
        eval_params: Graph | None = None,
        stream: int | None = None,
    ):
        check_arguments("compile", "the forward", forward)
        self.model, self.session, self.report = model, session, report
        self.function, self.precision, self.training = forward, precision, training
        self.options, self.inputs = options, Inputs.of(inputs)
        self._eval_params, self._seed = eval_params, seed
        fixed = self.inputs
        self._programs = ByShape(self._build, options, fixed, session)
        self.graph = self._programs.built(fixed).traced.graph
        self._stream = chosen_stream(session, stream, is_step=False)
        self._number = session.forwards
        session.forwards += 1

    def _build(self, inputs: Inputs) -> Built:
        with self.report.stage("forward"):
            traced = build_forward(
                self.model,
                self.function,
                inputs,
                self.precision,
                self.training,
                self._eval_params,
                self.options,
                self.report,
            )
        self.report.compiles += 1
        self.report.nodes["forward"] = len(traced.graph.nodes)

        def loaded(graph: Graph) -> Executable:
            return load(graph, self.report, self.options, "forward")

        on_device = not self.session.memory.is_host
        return Built(traced, loaded, self.options.check_indices, on_device)

    def __call__(self, batch: Tree, on_device: bool = False) -> Tree:
        """The function's result for a batch, as arrays.

        With `on_device` a GPU's stay there, for others to take: see `TrainStep.device_params`.
        Nothing is waited for, so that indices which are there too are not looked at.
        """
        outputs, traced = self._outputs(batch, on_device)
        is_there = on_device and not self.session.memory.is_host
        results = [outputs[f"result:{i}"] for i in range(traced.structure.leaves)]
        return traced.structure.rebuild(results if is_there else list(map(np.asarray, results)))

    def check(self, batch: Tree) -> None:
        """Raise what a call would raise of a batch, by names, types or indices. Nothing runs."""
        self._programs.get(function_name(self.function), batch)

    def batched(self, size: int) -> Forward:
        """A forward for `size` batches at once, stacked along a new first axis, on the same values.

        It is this one under `td.vmap`: no result depends on another's batch.
        """
        size = check_whole("batched", "size", size)
        function = self.function

        def several(model: Any, batches: Tree) -> Tree:
            return vmap(lambda batch: function(model, batch))(batches)

        several.__name__ = function_name(function)
        types = [type_.with_shape((size, *type_.shape)) for _, type_ in self.inputs.types]
        report = CompileReport(self.report.device, self.precision.name, self.report.parameters)
        return Forward(
            self.model,
            several,
            self.inputs.structure.rebuild(types),
            self.session,
            report,
            precision=self.precision,
            options=self.options,
            training=self.training,
            seed=self._seed,
            eval_params=self._eval_params,
        )

    def launch(self, batch: Tree) -> Callable[[], Tree]:
        """Begin; what gives the result waits for it. A device computes meanwhile."""
        outputs, traced = self._outputs(batch, False)

        def result() -> Tree:
            results = [outputs[f"result:{i}"] for i in range(traced.structure.leaves)]
            return traced.structure.rebuild(list(map(np.asarray, results)))

        return result

    def _outputs(self, batch: Tree, on_device: bool) -> tuple[Mapping[str, Any], TracedModel]:
        name = function_name(self.function)
        if on_device is not False:
            check_flags(name, self.inputs, on_device=on_device)
        built, arrays = self._programs.get(name, batch)
        outputs: Mapping[str, Any]
        with self.session.lock:  # of two threads, each draws numbers of its own
            arrays[RANDOM_STATE] = self.key()
            if on_device:
                outputs = self.session.run_there(built.program, arrays)
            else:
                outputs = run_guarded(self.session, name, built, built.program, arrays)
            self.count_call()
        return outputs, built.traced

    def profile(self, batch: Tree) -> Profile:
        """What each kernel takes on a batch; nothing changes. See `TrainStep.profile`."""
        with self.session.gathered():
            built, arrays = self._programs.get("profile", batch)
            arrays[RANDOM_STATE] = make_key(self._seed, 0, stream=self._stream)
            values = {**self.session.values, **arrays}
            return profile(built.program, values, self.report, self.options)

    @property
    def certificate(self) -> Certificate:
        """What was compiled and what is claimed of it. See `TrainStep.certificate`."""
        return certificate_of(self.report, self.options)

    def key(self) -> np.ndarray:
        """The random state of the next call."""
        calls = self.session.calls.get(self._number, 0)
        return make_key(self._seed, calls, stream=self._stream)

    def count_call(self) -> None:
        """The next call draws other numbers."""
        self.session.calls[self._number] = self.session.calls.get(self._number, 0) + 1

    @property
    def params(self) -> Arrays:
        """Copies of the parameters and states, by name."""
        return self.session.read(self.model.declarations())

    def load_params(
        self,
        values: Mapping[str, object],
        strict: bool = True,
        *,
        rename: Rename | None = None,
        skip_mismatched: bool = False,
    ) -> Loaded:
        """Replace parameters and states by name; see `TrainStep.load_params`."""
        terms = Terms(strict, rename, skip_mismatched)
        return load_values(self.session, self.model, (), values, "load_params", terms).loaded

    def save(self, path: str | Path) -> None:
        """Write parameters and states to a safetensors file with a checksum, aside and renamed."""
        save_model(path, self.params)

    def load(
        self,
        path: str | Path,
        strict: bool = True,
        *,
        rename: Rename | None = None,
        skip_mismatched: bool = False,
    ) -> Loaded:
        """Take parameters and states from a file, and leave an optimizer's state in it.

        It is one that `TrainStep.save` or `Forward.save` wrote, or any safetensors file of
        parameters by name. The rest is as for `load_params`.
        """
        terms = Terms(strict, rename, skip_mismatched)
        return load_values(self.session, self.model, (), load_model(path), "load", terms).loaded

    def export_web(self, folder: str | Path, page: str = "run", **shown: Unpack[Shown]) -> Path:
        """Write a static page that runs this forward, and others of `forwards`, in a browser."""
        from treadle.web.export import export_forward

        return export_forward(self, folder, page, shown)


def compile_forward(
    model: object,
    forward: Callable[..., Any],
    inputs: Tree,
    *,
    device: str = "auto",
    precision: object = "float32",
    seed: int = 0,
    share: Any = None,
    stream: int | None = None,
    training: bool = False,
    options: CompileOptions | None = None,
) -> Forward:
    """Compile `forward(model, batch)`: no gradient, no optimizer. It may own state (a cache).

    `share` is a step or forward whose values it uses; `stream` is as for `compile_step`.
    """
    module, seed = as_module(model), check_seed("compile", seed)
    narrow = choose_precision(precision)
    report = CompileReport(choose_device(device), narrow.name, count_parameters(module))
    session = open_session(report.device, share)
    # Another thread's program may be of the same session: it finds all of the values, or none.
    with session.lock, session.unless_it_fails():
        first = begin_model(session, module, seed)
        made = Forward(
            module,
            forward,
            inputs,
            session,
            report,
            precision=narrow,
            options=as_options(options),
            training=training,
            seed=seed,
            stream=stream,
        )
        first.write()
        return made


@uncopied("Compile its function once more: what is equal comes from the plan cache.")
class Program:
    """A traced function, compiled: arrays in, arrays out."""

    def __init__(self, forward: Forward):
        self._forward = forward

    @property
    def graph(self) -> Graph:
        return self._forward.graph

    @property
    def report(self) -> CompileReport:
        return self._forward.report

    def __call__(self, *arguments: Tree) -> Tree:
        return self._forward(tuple(arguments))


def compile(
    function: Callable[..., Any],
    *specs: Tree,
    device: str = "auto",
    precision: object = "float32",
    seed: int = 0,
    options: CompileOptions | None = None,
) -> Program:
    """Any function of tensors as a program: `td.compile(f, td.Spec((3,)))(np.ones(3))`."""

    if not callable(function):
        raise ArgumentError("compile", f"{function!r} is not a function", "Pass one of tensors.")
    check_specs(function, specs)

    def forward(model: object, arguments: tuple[Any, ...]) -> Any:
        return function(*arguments)

    forward.__name__ = function_name(function)
    compiled = compile_forward(
        {}, forward, tuple(specs), device=device, precision=precision, seed=seed, options=options
    )
    return Program(compiled)
