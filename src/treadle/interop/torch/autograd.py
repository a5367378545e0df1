"""`as_autograd`: a compiled forward and its gradient as a function in PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treadle.base import trees
from treadle.base.errors import ArgumentError, BatchError, GradientError
from treadle.base.trees import Tree
from treadle.compile_report import CompileOptions, as_options
from treadle.frontend.binding import Binding, bound
from treadle.frontend.scopes import RANDOM_STATE
from treadle.frontend.tracing import function_name
from treadle.interop.torch.halves import Halves, halves
from treadle.interop.torch.package import need_torch
from treadle.interop.torch.tensors import as_array, as_tensor, type_of
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.nn.module import Module
from treadle.nn.tracing import INPUT_PREFIX, Inputs, TracedModel, as_argument, trace_model
from treadle.pipeline import check_of, load, optimized, recognise, target_of
from treadle.precision.narrow import apply_precision
from treadle.runtime.executable import Executable
from treadle.step.forward import Forward, compile_forward
from treadle.step.index_checks import IndexChecks, checks_of

NAME = "as_autograd"
GIVEN_BATCH = f"{INPUT_PREFIX}batch"  # begins the names of a call's batch
GIVEN_PARAMS = f"{INPUT_PREFIX}params"


@dataclass(frozen=True, slots=True)
class Key:
    """What programs are compiled for."""

    inputs: Inputs
    with_params: bool
    wrt: tuple[str, ...]  # leaves whose gradients are wanted


class Built:
    """Programs for one key; the backward is compiled when it is first needed."""

    def __init__(self, traced: TracedModel, parts: Halves, owner: Autograd, key: Key):
        self.structure, self.halves, self.key = traced.structure, parts, key
        self._owner = owner
        self.forward = owner.loaded(parts.forward, "forward")
        self.indices: IndexChecks = checks_of(parts.forward, owner.forward.options.check_indices)
        self._backward: Executable | None = None
        outputs = parts.forward.outputs
        self.updates = [o.name for o in outputs if o.name.startswith(UPDATED)]

    @property
    def backward(self) -> Executable:
        if self._backward is None:
            self._backward = self._owner.loaded(self.halves.backward, "backward")
        return self._backward


UPDATED = "updated:"  # begins the names of results that are new values of given states


class Autograd:
    """A function of PyTorch's tensors: `f(batch)`, or `f(batch, params)` by name."""

    def __init__(self, forward: Forward, takes_several: bool = False):
        self.forward = forward
        self._takes_several = takes_several  # a plain function, of arguments
        self._built: dict[Key, Built] = {}
        self.compiles = 0

    def __call__(self, *arguments: Tree) -> Tree:
        import torch

        batch, params = self._split(arguments)
        given = {"batch": batch} if params is None else {"batch": batch, "params": dict(params)}
        leaves, structure = trees.flatten(given)
        names = [f"{INPUT_PREFIX}{p}" for p in trees.paths(given)]
        for name, leaf in zip(names, leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                cause = f"{name[len(INPUT_PREFIX) :]} is a {type(leaf).__name__}"
                raise BatchError(NAME, cause, "Its inputs are PyTorch's tensors.")
        types = tuple((n, type_of(NAME, t)) for n, t in zip(names, leaves, strict=True))
        self._check(batch, params, dict(types))
        wanted = torch.is_grad_enabled()
        wrt = tuple(
            n
            for n, t in zip(names, leaves, strict=True)
            if wanted and t.requires_grad and t.is_floating_point()
        )
        built = self._get(Key(Inputs(types, structure), params is not None, wrt))
        results = function_class().apply(self, built, names, *leaves)
        count = built.structure.leaves
        if params is not None:
            _write_back(built, params, results[count:])
        return built.structure.rebuild(results[:count])

    def _split(self, arguments: tuple[Tree, ...]) -> tuple[Tree, Mapping[str, Any] | None]:
        if self._takes_several:
            return arguments, None
        if len(arguments) not in (1, 2):
            cause = f"{len(arguments)} arguments"
            raise ArgumentError(NAME, cause, "Call it with a batch, and perhaps parameters.")
        params = arguments[1] if len(arguments) == 2 else None
        return arguments[0], params

    def _check(
        self, batch: Tree, params: Mapping[str, Any] | None, types: Mapping[str, TensorType]
    ) -> None:
        """A batch is as the forward was compiled for, and parameters are the model's."""
        if not self._takes_several and not self._fits(batch, types):
            given = [f"{n[len(GIVEN_BATCH) + 1 :]} {types[n]}" for n in types if _is_batch(n)]
            shown = [f"{n[len(INPUT_PREFIX) :]} {t}" for n, t in self.forward.inputs.types]
            cause = f"the batch is {', '.join(given)}, and was {', '.join(shown)}"
            remedy = 'Other sizes need CompileOptions(on_new_shape="specialise").'
            raise BatchError(NAME, cause, remedy)
        if params is None:
            return
        declared = self.forward.model.declarations()
        missing = [n for n in declared if n not in params]
        unexpected = [n for n in params if n not in declared]
        wrong = [n for n, d in declared.items() if n in params and d.shape != params[n].shape]
        if missing or unexpected or wrong:
            cause = f"missing: {missing}, unexpected: {unexpected}, of another shape: {wrong}"
            raise ArgumentError(NAME, cause, "Pass tensors by the model's names.")

    def _fits(self, batch: Tree, types: Mapping[str, TensorType]) -> bool:
        """Whether a batch has the leaves, dtypes and, unless others are allowed, sizes."""
        if trees.flatten(batch)[1] != self.forward.inputs.structure:
            return False
        may_differ = self.forward.options.on_new_shape == "specialise"
        pairs = zip([t for n, t in types.items() if _is_batch(n)], self.forward.inputs.types)
        return all(
            given == fixed or (may_differ and given.dtype is fixed.dtype)
            for given, (_, fixed) in pairs
        )

    def _get(self, key: Key) -> Built:
        built = self._built.pop(key, None)
        if built is None:
            traced = self._traced(key)
            built = Built(traced, _in_halves(traced.graph, key), self, key)
        self._built[key] = built  # the last that was used
        while len(self._built) > self.forward.options.max_shapes:
            self._built.pop(next(iter(self._built)))
        return built

    def _traced(self, key: Key) -> TracedModel:
        """The function over a batch, and over parameters if they are given."""
        forward = self.forward
        model, function = forward.model, forward.function
        names = {id(d): n for n, d in model.declarations().items()}

        def over_values(_: object, given: Tree) -> Tree:
            by_id = {id(d): given["params"][n] for n, d in model.declarations().items()}
            with bound(Binding(by_id, names, forward.training)):
                return function(as_argument(model), given["batch"])

        def over_batch(held: object, given: Tree) -> Tree:
            return function(held, given["batch"])

        over_values.__name__ = over_batch.__name__ = function_name(function)
        if key.with_params:
            traced = trace_model(Module(), over_values, key.inputs, forward.training)
            traced = replace(traced, graph=_updates_as_results(traced.graph))
        else:
            traced = trace_model(model, over_batch, key.inputs, forward.training)
        checked, report = check_of(forward.options), forward.report
        narrowed = checked(apply_precision(checked(traced.graph), forward.precision))
        target = target_of(report.device)
        found = recognise(narrowed, target, report, forward.options.numerics, True)
        return replace(traced, graph=checked(found))

    def loaded(self, graph: Graph, name: str) -> Executable:
        forward = self.forward
        self.compiles += 1
        return load(
            optimized(graph, forward.report, forward.options), forward.report, forward.options, name
        )

    # What runs

    def run_forward(
        self, built: Built, names: Sequence[str], tensors: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Results as tensors, and what the backward takes beside the inputs."""
        session = self.forward.session
        arrays = {n: as_array(NAME, t, session.memory) for n, t in zip(names, tensors, strict=True)}
        built.indices.check(function_name(self.forward.function), arrays)
        arrays[RANDOM_STATE] = key = self.forward.key()
        outputs = self._run(built.forward, arrays)
        self.forward.count_call()
        results = [outputs[f"result:{i}"] for i in range(built.structure.leaves)]
        results += [outputs[f"result:{name}"] for name in built.updates]
        kept = {name: outputs[f"capture:{name}"] for name in built.halves.saved}
        return list(map(as_tensor, results)), kept | {RANDOM_STATE: key}

    def run_backward(
        self,
        built: Built,
        names: Sequence[str],
        tensors: Sequence[Any],
        kept: Mapping[str, Any],
        cotangents: Sequence[Any],
    ) -> dict[str, Any]:
        """Gradients by leaf; those that nothing reaches are missing."""
        memory = self.forward.session.memory
        arrays = {n: as_array(NAME, t, memory) for n, t in zip(names, tensors, strict=True)}
        for name, array in kept.items():
            arrays[name] = (
                array if memory.is_host or name == RANDOM_STATE else _found(array, memory)
            )
        for label, ct in zip(built.halves.cotangents, cotangents, strict=False):
            if label is not None:
                arrays[label] = as_array(NAME, ct, memory)
        outputs = self._run(built.backward, arrays)
        start = f"{OutputKind.GRADIENT.value}:"
        return {k[len(start) :]: as_tensor(v) for k, v in outputs.items() if k.startswith(start)}

    def _run(self, program: Executable, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs of a program where it computed them, in the dtypes of its graph."""
        session = self.forward.session
        _wait_for_others(session.memory.is_host)
        outputs = session.run_there(program, arrays)
        if not session.memory.is_host:
            return outputs
        types = {f"{o.kind.value}:{o.name}": _type(program.graph, o) for o in program.graph.outputs}
        return {
            k: np.asarray(v).astype(types[k].dtype.numpy, copy=False) for k, v in outputs.items()
        }


def _is_batch(name: str) -> bool:
    return name == GIVEN_BATCH or name.startswith(f"{GIVEN_BATCH}.")


def _type(graph: Graph, output: Output) -> TensorType:
    return graph.type_of(output.value)


def _found(array: Any, memory: Any) -> Any:
    return memory.found(array, array.shape, array.dtype)


def _wait_for_others(is_host: bool) -> None:
    """A stream of the user's own is waited for: Treadle's follows the default one alone."""
    if is_host:
        return
    import torch

    stream = torch.cuda.current_stream()
    if stream != torch.cuda.default_stream():
        stream.synchronize()


def _updates_as_results(graph: Graph) -> Graph:
    """New values of states are results: whoever gave the old ones gets them."""
    outputs = tuple(
        Output(OutputKind.RESULT, f"{UPDATED}{o.name}", o.value)
        if o.kind is OutputKind.UPDATE
        else o
        for o in graph.outputs
    )
    return Graph(graph.nodes, outputs, graph.name)


def _in_halves(graph: Graph, key: Key) -> Halves:
    if key.wrt:
        return halves(graph, key.wrt, _written_back(graph))
    nothing = Graph((), (), f"{graph.name}.backward")
    return Halves(remove_dead_code(graph), nothing, (), ())


def _written_back(graph: Graph) -> list[str]:
    """Leaves of given states that get new values after the forward."""
    updated = [o.name.removeprefix(UPDATED) for o in graph.outputs if o.name.startswith(UPDATED)]
    return [f"{GIVEN_PARAMS}.{name}" for name in updated]


def _write_back(built: Built, params: Mapping[str, Any], values: Sequence[Any]) -> None:
    """Running statistics and the like change in place, as a PyTorch module's buffers do."""
    import torch

    with torch.no_grad():
        for name, value in zip(built.updates, values, strict=True):
            params[name.removeprefix(UPDATED)].copy_(value)


# PyTorch's classes, which are made when they are first needed

_classes: dict[str, Any] = {}


def function_class() -> Any:
    """The `torch.autograd.Function` that all programs run in."""
    if not _classes:
        _classes["run"] = _make_classes(need_torch(NAME))
    return _classes["run"]


def _make_classes(torch: Any) -> Any:
    class Refusing(torch.autograd.Function):  # type: ignore[misc]
        """Gradients, which have none themselves."""

        @staticmethod
        def forward(ctx: Any, count: int, *tensors: Any) -> Any:
            return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise GradientError(
                NAME,
                "a gradient of a gradient is asked for, and the program is for the first alone",
                "Take the inner gradient inside of the function, with td.grad.",
            )

    class Run(torch.autograd.Function):  # type: ignore[misc]
        """A program of Treadle's, forwards and backwards."""

        @staticmethod
        def forward(ctx: Any, owner: Autograd, built: Built, names: Any, *tensors: Any) -> Any:
            results, ctx.kept = owner.run_forward(built, names, tensors)
            ctx.owner, ctx.built, ctx.names = owner, built, names
            read = built.halves.backward.leaves  # the rest may change before the backward
            ctx.read = [n for n in names if n in read]
            pairs = zip(names, tensors, strict=True)
            ctx.save_for_backward(*(t for n, t in pairs if n in read))
            count = built.structure.leaves
            whole = [r for r in results[:count] if not r.is_floating_point()]
            ctx.mark_non_differentiable(*whole, *results[count:])
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            given = ctx.saved_tensors
            with torch.no_grad():
                found = ctx.owner.run_backward(ctx.built, ctx.read, given, ctx.kept, cotangents)
            needed = ctx.needs_input_grad[3:]
            pairs = zip(ctx.names, needed, strict=True)
            gradients = [found.get(n) if is_needed else None for n, is_needed in pairs]
            if torch.is_grad_enabled():
                gradients = Refusing.apply(len(gradients), *gradients, *cotangents, *given)
            return None, None, None, *gradients

    return Run


def as_autograd(
    forward: Forward | Callable[..., Any],
    *,
    device: str = "auto",
    precision: object = "float32",
    seed: int = 0,
    options: CompileOptions | None = None,
) -> Autograd:
    """A compiled program inside of a PyTorch program, with its gradient.

    `forward` is what `td.compile_forward` gives: the result is called with a batch of tensors, as
    it is, and gives tensors; with a dict of tensors as the second argument, those stand for the
    model's values, by name, and get gradients too. Or it is a function of tensors, which is
    compiled for the arguments' types when it is called; the rest of the arguments are for that.
    """
    need_torch(NAME)
    if isinstance(forward, Forward):
        return Autograd(forward)
    if not callable(forward) or isinstance(forward, (Module, type)):
        cause = f"{forward!r} is neither a compiled forward nor a function of tensors"
        raise ArgumentError(NAME, cause, "Pass what td.compile_forward(model, …) gives.")
    function = forward

    def over_arguments(model: object, arguments: tuple[Any, ...]) -> Any:
        return function(*arguments)

    over_arguments.__name__ = function_name(function)
    nothing = lambda model, batch: ()  # noqa: E731
    compiled = compile_forward(
        {}, nothing, (), device=device, precision=precision, seed=seed, options=as_options(options)
    )
    compiled.function = over_arguments
    return Autograd(compiled, takes_several=True)
