"""The pipeline: a model and a loss become the programs of a training step.

    trace → apply_precision → recognise → differentiate → append_updates → optimize → load → run

Each stage is a function from graph to graph, a section of the report, and text.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from treadle.autodiff.backward import Differentiated, active_values, differentiate
from treadle.backends.passing import Passing
from treadle.backends.registry import DEVICES as DEVICES
from treadle.backends.registry import backend
from treadle.backends.registry import choose_device as choose_device
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import (
    ArgumentError,
    DeviceError,
    GradientError,
    UnreachedWarning,
)
from treadle.base.origin import user_origin
from treadle.base.rewrites import Exactness, Rewritten
from treadle.compile_report import CompileOptions as CompileOptions
from treadle.compile_report import CompileReport as CompileReport
from treadle.frontend.binding import Binding, bound
from treadle.frontend.coerce import as_tensor, cast, constant
from treadle.frontend.mean import Mean
from treadle.frontend.scopes import Trace, into_scope, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import emit
from treadle.ir.control import own_backwards
from treadle.ir.graph import Graph, Output, OutputKind, Value
from treadle.ir.ops.leaves import INPUT
from treadle.ir.rewrite import inline_into, remove_dead_code
from treadle.ir.verify import verify
from treadle.kernel.claims import Claim
from treadle.kernel.evidence import Relation
from treadle.kernel.target import CPU, Target
from treadle.nn.module import Module, Parameter
from treadle.nn.tracing import Inputs, TracedModel, as_argument, smaller_inputs, trace_model
from treadle.optim.append import Mode, UpdatePlan, append_updates, composition
from treadle.optim.optimizer import Optimizer
from treadle.optim.returned import named_gradients
from treadle.precision.float8 import with_float8, with_history
from treadle.precision.narrow import apply_precision
from treadle.rules.canonical import canonicalise
from treadle.runtime.executable import Executable
from treadle.runtime.session import Session


def choose_precision(precision: object) -> DType:
    eight = dtypes.float8_e4m3  # bfloat16, but for products of weights
    if precision in ("float8", eight, eight.name):
        return eight
    for chosen in (dtypes.float32, dtypes.bfloat16, dtypes.float16):
        if precision in (chosen, chosen.name):
            return chosen
    raise ArgumentError(
        "precision",
        f"{precision!r} is not a precision to train in",
        "Use float32, bfloat16, float16 or float8.",
    )


def open_session(device: str, share: Any) -> Session:
    """A new session, or the one of what is shared, which must be on the same device."""
    if share is None:
        return Session(backend(device).memory)
    session = getattr(share, "session", None)
    if not isinstance(session, Session):
        raise ArgumentError("share", f"share = {share!r}", "Pass a step or a forward.")
    if session.device != device:
        raise DeviceError(
            "share", f"the values are on {session.device!r}, the program on {device!r}", "Use one."
        )
    return session


def load(
    graph: Graph, report: CompileReport, options: CompileOptions, name: str = "step"
) -> Executable:
    """A graph ready to run on the report's device."""
    program = backend(report.device).load(check_of(options)(graph), report, options, name)
    report.evidence.settle()
    return program


Backward = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class StepRecipe:
    """Everything a step is compiled from, except the shapes of the batch."""

    model: Module
    loss: Callable[..., Any]
    optimizer: Optimizer
    prefix: str
    accumulate: int
    clip_norm: float | None
    precision: DType
    options: CompileOptions
    backward: Backward | None = None  # a user's own, in place of differentiation
    sums: bool = False  # accumulated gradients are added up, not averaged
    shards: int = 0  # parts of a batch whose losses are averaged; 0 if it is not cut

    @property
    def is_parallel(self) -> bool:
        return self.shards > 0

    @property
    def averages(self) -> bool:
        """Whether the loss of a batch is the mean of several."""
        return self.accumulate > 1 or self.shards > 1

    def naming(self) -> AbstractContextManager[None]:
        """While optimizers are asked: their selectors may be modules, which have names here."""
        names = {id(d): n for n, d in self.model.declarations().items()}
        return bound(Binding({}, names, training=False))

    def trained(self) -> dict[str, Parameter]:
        with self.naming():
            return {
                n: p
                for n, p in self.model.declarations().items()
                if isinstance(p, Parameter) and p.requires_grad and self.optimizer.trains(n)
            }

    def plan(self) -> UpdatePlan:
        trained = self.trained()
        return UpdatePlan(
            self.optimizer,
            self.prefix,
            {n: p.type for n, p in trained.items()},
            {n: p.decay for n, p in trained.items()},
            self.clip_norm,
            self.accumulate > 1,
            self.precision is dtypes.float16,
        )


def build_step(
    recipe: StepRecipe, plan: UpdatePlan, inputs: Inputs, report: CompileReport
) -> dict[Mode, Graph]:
    """The graphs of a training step, by what a call does: this function is the architecture."""
    checked = check_of(recipe.options)
    passed = Passing(report, recipe.options, checked)
    graph, loss = build_gradients(recipe, plan, inputs, report, passed)
    modes = [Mode.UPDATE]
    if recipe.accumulate > 1:
        modes += [Mode.ACCUMULATE, Mode.ACCUMULATE_AND_UPDATE]
    with report.stage("append_updates"):
        graphs = {mode: checked(append_updates(graph, loss, plan, mode)) for mode in modes}
    report.nodes["append_updates"] = len(graphs[Mode.UPDATE].nodes)
    with report.stage("optimize"):
        for mode, updated in graphs.items():
            stated = partial(composition, plan, mode, graph, recipe.naming)
            passed.relate("append_updates", Relation.UPDATES, graph, updated, composition=stated)
            graphs[mode] = passed(
                "optimize", updated, lambda g: optimized(g, report, recipe.options)
            )
    passed.finish()
    report.nodes["optimize"] = len(graphs[Mode.UPDATE].nodes)
    return graphs


def build_gradients(
    recipe: StepRecipe, plan: UpdatePlan, inputs: Inputs, report: CompileReport, passed: Passing
) -> tuple[Graph, Graph | None]:
    """The loss with its gradients, and the loss alone where it was differentiated."""
    checked = check_of(recipe.options)
    with report.stage("trace"):
        traced = checked(trace_loss(recipe, plan, inputs))
    history = plan.name("float8:largest")
    with report.stage("apply_precision"):
        but = ("floats of 8 bits",) if recipe.precision in dtypes.FLOAT8 else ()
        with_casts = passed(
            "apply_precision", traced, lambda g: _narrowed(g, recipe, history), *but
        )
    with report.stage("recognise"):
        narrowed = passed(
            "recognise", with_casts, lambda g: _recognised(g, report, recipe.options, True)
        )
    _refuse_trained_weight(recipe, narrowed, plan)
    with report.stage("differentiate"):
        found = Differentiated(narrowed, ())
        if recipe.backward is None:
            found = _differentiated(narrowed, plan, report)
        graph = checked(with_history(found.graph, history))
        passed.relate(
            "differentiate", Relation.GRADIENTS, narrowed, graph,
            pairs=found.kept if graph is found.graph else (),
            cotangents=found.cotangents if graph is found.graph else (),
            frozen=tuple(n for n in narrowed.parameters if n not in plan.parameters),
            assumptions=but,
        )  # fmt: skip
    if recipe.options.verify == "full" and (recipe.backward or own_backwards(narrowed)):
        with report.stage("verify"):
            report.claims.append(_checked_gradient(recipe, plan, inputs, report))
    stages = (traced, with_casts, narrowed, graph)
    names = ("trace", "apply_precision", "recognise", "differentiate")
    report.nodes |= {name: len(g.nodes) for name, g in zip(names, stages, strict=True)}
    return graph, None if recipe.backward else narrowed


def _narrowed(graph: Graph, recipe: StepRecipe, history: str) -> Graph:
    """The graph in the precision that was asked for."""
    narrow = apply_precision(graph, recipe.precision)
    return with_float8(narrow, history) if recipe.precision in dtypes.FLOAT8 else narrow


def check_of(options: CompileOptions) -> Callable[[Graph], Graph]:
    """What is done to the graph of each stage: its invariants are checked where that is asked."""
    return verify if options.verify != "off" else lambda graph: graph


def _checked_gradient(
    recipe: StepRecipe, plan: UpdatePlan, inputs: Inputs, report: CompileReport
) -> Claim:
    """Gradients that users wrote against forward mode, on a batch as small as the model takes.

    A user's gradient may hold a number of the batch: it counts as wrong for the step's own sizes.
    """
    from treadle.verify.gradients import check_gradient

    if recipe.backward is not None:
        alone = replace(recipe, accumulate=1, sums=False, shards=0)
        with recipe.naming():
            graph = trace_loss(alone, plan, inputs)
        return check_gradient(graph, graph, owner="the backward")
    wrong: GradientError | None = None
    for found in _small_gradients(recipe, plan, inputs, report):
        try:
            return check_gradient(*found)
        except GradientError as error:
            wrong = error
    if wrong is not None:
        raise wrong
    return Claim("gradient", "loss", reason="the loss could not be traced once more")


def _small_gradients(
    recipe: StepRecipe, plan: UpdatePlan, inputs: Inputs, report: CompileReport
) -> Iterator[tuple[Graph, Graph]]:
    """The loss of a batch as small as the model takes, as it is traced and with its gradients; and
    of larger ones, up to the step's own."""
    for small in smaller_inputs(inputs):
        try:
            with recipe.naming():
                traced = trace_loss(recipe, plan, small)
        except Exception:
            continue  # the user's function, of these sizes alone
        narrowed = apply_precision(traced, recipe.precision)
        aside = CompileReport(report.device, report.precision)
        graph = _recognised(narrowed, aside, recipe.options, True)
        wrt = [n for n in plan.parameters if n in graph.leaves]
        # Numbers that are near were taken for equal: then it is the gradient of what came of it.
        is_equal = all(r.exactness is Exactness.EXACT for r in aside.recognised)
        yield traced if is_equal else graph, differentiate(graph, wrt).graph


def target_of(device: str) -> Target:
    """What rules must know of the machine."""
    return backend(device).target


def recognise(
    graph: Graph,
    target: Target = CPU,
    report: CompileReport | None = None,
    numerics: str = "equal",
    is_differentiated: bool = False,
) -> Graph:
    """The graph in canonical form, before it is differentiated, with composites for what is
    written out, as the target has kernels for them; where `is_differentiated`, not for maxima of
    windows, which have other gradients. `numerics="strict"` leaves everything as it is written.
    The report counts rules, and has what was recognised where.
    """
    counts = Counter[str]() if report is None else report.rules
    canonical = canonicalise(graph, counts)
    if numerics == "strict":
        return canonical
    # It brings normal forms and finite fields: importing Treadle stays light.
    from treadle.recognition.recognise import recognised

    found = [] if report is None else report.recognised
    return recognised(canonical, target, counts, found, is_differentiated)


def _recognised(
    graph: Graph, report: CompileReport, options: CompileOptions, is_differentiated: bool
) -> Graph:
    return recognise(graph, target_of(report.device), report, options.numerics, is_differentiated)


def optimize(
    graph: Graph,
    target: Target = CPU,
    report: CompileReport | None = None,
    rewrite: bool = True,
    numerics: str = "equal",
    pays: Callable[[Graph, Graph], bool] = lambda found, canonical: True,
) -> Graph:
    """A step, or a forward program, in canonical form, and with `rewrite` the cheapest equal one
    that rules of `treadle.egraph` give for the target, if it pays: with `numerics="strict"` by
    those that change no bit. The report says which were applied.
    """
    counts = Counter[str]() if report is None else report.rules
    canonical = canonicalise(graph, counts)
    if not rewrite:
        return canonical
    # It brings the file of rules: importing Treadle stays light.
    from treadle.egraph.optimize import optimise

    found = optimise(canonical, target, only_exact=numerics == "strict")
    if not found.fired or not pays(found.graph, canonical):
        return canonical
    if report is not None:
        for rule, count in found.fired.items():
            report.rules[rule] += count
            report.rewritten.append(Rewritten(rule, count, found.before, found.after))
    return found.graph


def optimized(graph: Graph, report: CompileReport, options: CompileOptions) -> Graph:
    """The graph of a program as its options ask for it."""
    rewrite = options.rewrite and options.optimize

    def pays(found: Graph, canonical: Graph) -> bool:
        from treadle.backends.scheduling import is_leaner  # it brings the scheduler

        toolchain = backend(report.device).toolchain(options)
        return toolchain is None or is_leaner(found, canonical, options, toolchain.target)

    return optimize(graph, target_of(report.device), report, rewrite, options.numerics, pays)


def _refuse_trained_weight(recipe: StepRecipe, graph: Graph, plan: UpdatePlan) -> None:
    """Accumulated totals and weights are divided at the end: a weight has no gradient there."""
    if not recipe.averages:
        return
    wrt = {Value(i) for n, i in graph.leaves.items() if n in plan.parameters}
    if graph.outputs[2].value in active_values(graph.nodes, wrt):
        raise GradientError(
            "compile_step",
            "the weight of the loss depends on parameters, which cannot be accumulated",
            "Wrap the weight in td.stop_gradient, or compile with accumulate=1 and one shard.",
        )


def _differentiated(graph: Graph, plan: UpdatePlan, report: CompileReport) -> Differentiated:
    known = graph.leaves
    result = differentiate(graph, [n for n in plan.parameters if n in known])
    missing = tuple(n for n in plan.parameters if n not in known or n in result.unreached)
    if missing and missing != report.unreached:
        cause = f"compile_step: the loss does not depend on {', '.join(missing)}"
        remedy = "they are not trained; freeze them with requires_grad=False or optim.only"
        warnings.warn(f"{cause}: {remedy} [{user_origin()}]", UnreachedWarning, stacklevel=2)
    report.unreached = missing
    return result


def trace_loss(recipe: StepRecipe, plan: UpdatePlan, inputs: Inputs) -> Graph:
    """Results are the total (scaled for float16), the total and the weight of the loss."""
    if recipe.backward is not None:
        return trace_manual(recipe, plan, inputs)

    def finish(trace: Trace, result: Any) -> list[Tensor]:
        total, weight = loss_terms(recipe, result)
        # The update divides by the number of calls, which a sum has to make up for.
        scaled = total * recipe.accumulate if recipe.sums else total
        scaled = scaled * plan.loss_scale(trace) if plan.scales_loss else scaled
        return [into_scope(t, trace) for t in (scaled, total, weight)]

    return trace_model(recipe.model, recipe.loss, inputs, training=True, finish=finish).graph


def loss_terms(recipe: StepRecipe, result: Any) -> tuple[Tensor, Tensor]:
    """The total and weight of what a loss returned; where nothing is averaged, its value and 1."""
    if isinstance(result, Mean) and recipe.averages and not recipe.sums:
        if len(result.terms) == 1:
            return result.terms[0]
        raise GradientError(
            "compile_step",
            f"the loss is a sum of {len(result.terms)} means with different weights, which "
            "cannot be accumulated exactly",
            "Give the means one weight, as in td.Mean(total, weight), or compile with "
            'accumulation="sum".',
        )
    return loss_value(result)


def loss_value(result: Any) -> tuple[Tensor, Tensor]:
    """What a loss returned as one number, and 1."""
    try:
        value = as_tensor(result)
    except (TypeError, ValueError) as error:
        cause = f"the loss returns {result!r}"
        raise GradientError("compile_step", cause, "Return a scalar or a td.Mean.") from error
    if value.shape != () or not value.dtype.is_float:
        raise GradientError(
            "compile_step", f"the loss is {value.type}, not a float scalar", "Reduce it: .mean()."
        )
    return value, constant(1, (), value.dtype)


def trace_manual(recipe: StepRecipe, plan: UpdatePlan, inputs: Inputs) -> Graph:
    """A user's forward and backward: the same results, and gradients by name."""
    gradients: dict[str, Tensor] = {}

    def finish(trace: Trace, result: Any) -> list[Tensor]:
        loss, kept = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        total, weight = loss_terms(recipe, loss)
        assert recipe.backward is not None
        batch = inputs.structure.rebuild(trace.leaf(INPUT, n, t) for n, t in inputs.types)
        returned = recipe.backward(as_argument(recipe.model), batch, kept)
        for name, g in named_gradients(plan, returned).items():
            # The step divides by the weight; a manual gradient is of the mean already.
            factor = weight * recipe.accumulate if recipe.sums else weight
            gradients[name] = into_scope(g * cast(factor, g.dtype), trace)
        named = [into_scope(t, trace) for t in (total, total, weight)]
        trace.effects += [Output(OutputKind.GRADIENT, n, g.handle) for n, g in gradients.items()]
        return named

    return trace_model(recipe.model, recipe.loss, inputs, training=True, finish=finish).graph


def build_evaluation(
    recipe: StepRecipe, inputs: Inputs, eval_params: Graph | None, report: CompileReport
) -> Graph:
    """Loss and metrics with training=False: results are the loss and its weight."""

    def finish(trace: Trace, result: Any) -> list[Tensor]:
        loss = result[0] if recipe.backward is not None and isinstance(result, tuple) else result
        has_weight = isinstance(loss, Mean) and len(loss.terms) == 1
        total, weight = loss.terms[0] if has_weight else loss_value(loss)
        return [into_scope(t, trace) for t in (total / weight, weight)]

    graph = trace_model(recipe.model, recipe.loss, inputs, training=False, finish=finish).graph
    named = zip(("loss", "weight"), graph.outputs, strict=False)
    results = [Output(OutputKind.RESULT, name, o.value) for name, o in named]
    graph = Graph(graph.nodes, (*results, *graph.outputs[2:]), graph.name)
    return _without_gradient(graph, recipe.precision, eval_params, recipe.options, report)


def build_forward(
    model: Module,
    forward: Callable[..., Any],
    inputs: Inputs,
    precision: DType,
    training: bool,
    eval_params: Graph | None,
    options: CompileOptions,
    report: CompileReport,
) -> TracedModel:
    """A forward program: no gradient, no optimizer."""
    traced = trace_model(model, forward, inputs, training)
    graph = _without_gradient(traced.graph, precision, eval_params, options, report)
    return TracedModel(graph, traced.structure)


def _without_gradient(
    traced: Graph,
    precision: DType,
    eval_params: Graph | None,
    options: CompileOptions,
    report: CompileReport,
) -> Graph:
    """The stages of a step that forward and evaluation programs pass through."""
    checked, passed = check_of(options), Passing(report, options, check_of(options))
    with_casts = passed("apply_precision", checked(traced), lambda g: apply_precision(g, precision))
    recognised = passed("recognise", with_casts, lambda g: _recognised(g, report, options, False))
    with_params = checked(with_eval_params(recognised, eval_params))
    graph = passed("optimize", with_params, lambda g: optimized(g, report, options))
    passed.finish()
    return graph


def with_eval_params(graph: Graph, eval_params: Graph | None) -> Graph:
    """The graph reading the optimizer's evaluation parameters instead of those it trains."""
    if eval_params is None:
        return graph
    with isolated_tracing(graph.name) as trace:
        params = {
            o.name: t for o, t in zip(eval_params.outputs, emit(eval_params, {}), strict=True)
        }
        used = {n: t.handle for n, t in params.items() if n in graph.leaves}
        values = inline_into(trace.builder, graph, used)
        outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
        return remove_dead_code(trace.finish_outputs(outputs))
