"""Clipping, accumulation, loss scaling and the optimizer, traced onto a graph with gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

from treadle.autodiff.backward import differentiate
from treadle.base import dtypes, trees
from treadle.base.errors import ArgumentError, GradientError, TreadleError
from treadle.base.trees import Structure
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import (
    eq,
    ge,
    isfinite,
    logical_and,
    maximum,
    where,
)
from treadle.frontend.functions.shaping import zeros_like
from treadle.frontend.scopes import Trace, at_one_line, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import emit
from treadle.ir.composition import Composition
from treadle.ir.graph import Graph, Output, OutputKind, Value
from treadle.ir.ops.leaves import PARAMETER, STATE, Leaf
from treadle.ir.rewrite import inline_into, remove_dead_code
from treadle.ir.types import TensorType
from treadle.optim.clipping import global_norm, scaled_to_norm
from treadle.optim.labels import free_site, with_sampled_labels
from treadle.optim.optimizer import Context, Optimizer, Params
from treadle.optim.parts import loss_of_part, parts_among
from treadle.optim.schedules import Schedule

SCALAR = TensorType(())
COUNT = TensorType((), dtypes.int32)
FIRST_LOSS_SCALE, GROWTH_INTERVAL = 65536.0, 2000
LEAST_LOSS_SCALE = 2.0**-14  # a loss that is never finite must not halve it to zero
Written = dict[str, tuple[Tensor, Tensor]]  # old and new values, by name


class Mode(Enum):
    """What one call of the step does."""

    UPDATE = "update"
    ACCUMULATE = "accumulate"
    ACCUMULATE_AND_UPDATE = "accumulate and update"


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What the update is made of. `prefix` begins the names of all state it owns."""

    optimizer: Optimizer
    prefix: str
    parameters: Mapping[str, TensorType]  # those that are trained
    decays: Mapping[str, bool]
    clip_norm: float | None
    accumulates: bool
    scales_loss: bool  # float16: the loss is scaled, and steps that overflow are skipped

    def name(self, *parts: str) -> str:
        return self.prefix + ":".join(parts)

    def scalars(self) -> dict[str, tuple[TensorType, float]]:
        """Scalar state: types and first values, by name."""
        found = {self.name("hyper", k): (SCALAR, v) for k, v in self.optimizer.hyper.items()}
        found[self.name("count")] = (COUNT, 0)
        found[self.name("lr_scale")] = (SCALAR, 1.0)
        if self.clip_norm is not None:
            found[self.name("clip_norm")] = (SCALAR, self.clip_norm)
        if self.scales_loss:
            found[self.name("loss_scale")] = (SCALAR, FIRST_LOSS_SCALE)
            found[self.name("good_steps")] = (COUNT, 0)
            found[self.name("skipped")] = (COUNT, 0)
        return found

    def check_numbers(self) -> None:
        """The optimizer's numbers, also as the step will hold them."""
        for key, value in self.optimizer.hyper.items():
            self.optimizer.check(key, value, self.parameters)

    def loss_scale(self, trace: Trace) -> Tensor:
        return trace.leaf(STATE, self.name("loss_scale"), SCALAR)


def trace_init(plan: UpdatePlan) -> tuple[Graph, Structure]:
    """The optimizer's first state as a graph of the parameters, and the state's tree."""
    with isolated_tracing("init") as trace:
        params = {n: trace.leaf(PARAMETER, n, t) for n, t in plan.parameters.items()}
        state = plan.optimizer.init(params)
        leaves, structure = trees.flatten(state)
        paths = [plan.name("optimizer", path) for path in trees.paths(state)]
        outputs = [
            Output(OutputKind.UPDATE, n, as_tensor(t).handle)
            for n, t in zip(paths, leaves, strict=True)
        ]
        return remove_dead_code(trace.finish_outputs(outputs)), structure


def append_updates(graph: Graph, loss: Graph | None, plan: UpdatePlan, mode: Mode) -> Graph:
    """The whole step: state leaves in, their next values out as updates.

    `graph` has the results (scaled total, total, weight), gradients of the first by parameter, and
    effects. `loss` is the graph before differentiation, for gradients at other parameters.
    """
    with isolated_tracing(f"{graph.name}.{mode.name.lower()}") as trace:
        values = inline_into(trace.builder, graph, {})
        return remove_dead_code(_Appending(trace, graph, values, loss, plan, mode).run())


def composition(
    plan: UpdatePlan, mode: Mode, graph: Graph, naming: Callable[[], AbstractContextManager[None]]
) -> Composition:
    """What `append_updates` makes of a graph, as a certificate states it."""
    with naming():  # selectors of the optimizer may be modules
        return _composition(plan, mode, graph)


def _composition(plan: UpdatePlan, mode: Mode, graph: Graph) -> Composition:
    known, decayed = plan.optimizer.known, tuple[str, ...]()
    rate = whole = None
    reason = ""
    trained = [o.name for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    if known is None:
        try:
            whole = trace_update(plan, graph)
        except TreadleError as error:
            reason = f"its optimizer asks for more than gradients: {error}"[:900]
    else:
        rate = None if known.schedule.is_constant else _trace_rate(plan, known.schedule)
        decayed = tuple(n for n in trained if plan.decays.get(n, True) and known.decays(n))
    return Composition(
        mode.value,
        plan.prefix,
        plan.clip_norm is not None,
        plan.accumulates,
        plan.scales_loss,
        plan.optimizer.name if known is None else known.name,
        {} if known is None else known.flags,
        decayed,
        rate,
        whole,
        reason,
    )


def trace_update(plan: UpdatePlan, graph: Graph) -> Graph:
    """What the optimizer makes of gradients, which are inputs, as metrics and captures are."""
    kinds = (OutputKind.RESULT, OutputKind.GRADIENT, OutputKind.METRIC, OutputKind.CAPTURE)
    named = [o for o in graph.outputs if o.kind in kinds]
    with isolated_tracing("update") as trace:
        inputs = [
            trace.input(f"{o.kind.value}:{o.name}", graph.type_of(o.value)).handle for o in named
        ]
        given = Graph(graph.nodes, tuple(named), graph.name)
        appending = _Appending(trace, given, inputs, None, plan, Mode.UPDATE)
        written = appending.optimizer(appending.gradients)
        outputs = [Output(OutputKind.UPDATE, n, new.handle) for n, (_, new) in written.items()]
        return remove_dead_code(trace.finish_outputs(outputs))


def _trace_rate(plan: UpdatePlan, schedule: Schedule) -> Graph:
    """The rate of a schedule, of the count and the numbers of a step."""
    with isolated_tracing("rate") as trace:
        hyper = {k: trace.leaf(STATE, plan.name("hyper", k), SCALAR) for k in schedule.hyper}
        count = cast(trace.leaf(STATE, plan.name("count"), COUNT), dtypes.float32)
        value = schedule.value(count, hyper)
        return remove_dead_code(
            trace.finish_outputs([Output(OutputKind.RESULT, "rate", as_tensor(value).handle)])
        )


class _Appending:
    """One walk through the update; `outputs` collects what leaves the step."""

    def __init__(
        self,
        trace: Trace,
        graph: Graph,
        values: list[Value],
        loss: Graph | None,
        plan: UpdatePlan,
        mode: Mode,
    ):
        self.trace, self.plan, self.mode, self.loss = trace, plan, mode, loss
        by_kind: dict[OutputKind, dict[str, Tensor]] = {kind: {} for kind in OutputKind}
        for output, value in zip(graph.outputs, values, strict=True):
            by_kind[output.kind][output.name] = trace.tensor(value)
        self.by_kind = by_kind
        _, self.total, self.weight = by_kind[OutputKind.RESULT].values()
        self.gradients: Params = by_kind[OutputKind.GRADIENT]
        self.metrics, self.weights = by_kind[OutputKind.METRIC], by_kind[OutputKind.WEIGHT]
        self.prints = [
            Output(o.kind, o.name, v)
            for o, v in zip(graph.outputs, values, strict=True)
            if o.kind is OutputKind.PRINT
        ]
        self.outputs: list[Output] = []
        self.asked_elsewhere = False  # whether the optimizer took other gradients
        trace.skip_sites(free_site(graph))

    def run(self) -> Graph:
        if self.plan.scales_loss:
            scale = self.plan.loss_scale(self.trace)
            self.gradients = {n: g / scale for n, g in self.gradients.items()}
        self._guard_states()
        if self.mode is not Mode.UPDATE:
            self._accumulate()
        self._result("loss", self.total / self.weight)
        self._result("weight", self.weight)
        for name, value in self.metrics.items():
            self._put(OutputKind.METRIC, name, value)
            self._put(OutputKind.WEIGHT, name, self.weights[name])
        for name, value in self.by_kind[OutputKind.CAPTURE].items():
            self._put(OutputKind.CAPTURE, name, value)
        if self.mode is not Mode.ACCUMULATE:
            self._update()
        return self.trace.finish_outputs([*self.outputs, *self.prints])

    def _put(self, kind: OutputKind, name: str, value: Tensor) -> None:
        self.outputs.append(Output(kind, name, value.handle))

    def _result(self, name: str, value: Tensor) -> None:
        self._put(OutputKind.RESULT, name, value)

    def _state(self, name: str, type_: TensorType) -> Tensor:
        return self.trace.leaf(STATE, self.plan.name(name), type_)

    def _guard_states(self) -> None:
        """Updates of the model's states; an overflow leaves them as they were."""
        is_fine = isfinite(global_norm(self.gradients.values())) if self.plan.scales_loss else None
        for name, value in self.by_kind[OutputKind.UPDATE].items():
            old = self.trace.leaf(STATE, name, value.type)
            kept = value if is_fine is None else where(is_fine, value, old)
            self._put(OutputKind.UPDATE, name, kept)

    def _accumulate(self) -> None:
        """Add what earlier micro-steps left; leave it for the next one, or zero after an update."""
        is_last = self.mode is Mode.ACCUMULATE_AND_UPDATE

        def added(name: str, value: Tensor) -> Tensor:
            total = self._state(f"accumulator:{name}", value.type) + value
            after = zeros_like(total) if is_last else total
            self._put(OutputKind.UPDATE, self.plan.name("accumulator", name), after)
            return total

        self.total, self.weight = added("total", self.total), added("weight", self.weight)
        self.gradients = {n: added(f"gradient:{n}", g) for n, g in self.gradients.items()}
        for name, value in list(self.metrics.items()):
            weight = cast(self.weights[name], value.dtype)
            self.weights[name] = added(f"metric_weight:{name}", weight)
            # A value without weight, NaN perhaps, counts for nothing.
            counted = where(eq(weight, 0), 0, value * weight)
            self.metrics[name] = added(f"metric:{name}", counted) / self.weights[name]

    def _update(self) -> None:
        means = {n: g / cast(self.weight, g.dtype) for n, g in self.gradients.items()}
        with at_one_line():
            norm = global_norm(means.values())
            self._result("grad_norm", norm)
            for name, g in means.items():
                self._put(OutputKind.GRADIENT, name, g)
                self._result(f"grad_norm:{name}", global_norm([g]))
        written = self.optimizer(self._clipped(means))
        if self.plan.scales_loss:
            written = self._skipping(written, self._is_fine(norm, written))
        else:
            written |= self._counted()
        for name, (_, new) in written.items():
            self._put(OutputKind.UPDATE, name, new)

    def _clipped(self, gradients: Params) -> Params:
        if self.plan.clip_norm is None:
            return gradients
        limit = self._state("clip_norm", SCALAR)
        return scaled_to_norm(gradients, global_norm(gradients.values()), limit)

    def _counted(self) -> Written:
        count = self._state("count", COUNT)
        return {self.plan.name("count"): (count, count + 1)}

    def _is_fine(self, norm: Tensor, written: Written) -> Tensor:
        """Whether nothing overflowed: gradients, and what other gradients have led to."""
        if not self.asked_elsewhere:
            return isfinite(norm)
        after = [new for _, new in written.values() if new.dtype.is_float]
        return logical_and(isfinite(norm), isfinite(global_norm(after)))

    def optimizer(self, gradients: Params) -> Written:
        """Old and new values of parameters and optimizer state, by name."""
        plan = self.plan
        params = {n: self.trace.leaf(PARAMETER, n, t) for n, t in plan.parameters.items()}
        init, structure = trace_init(plan)
        old = [
            self.trace.leaf(STATE, o.name, t)
            for o, t in zip(init.outputs, init.output_types, strict=True)
        ]
        after, state = plan.optimizer.update(
            gradients, structure.rebuild(old), params, self._context()
        )
        new, found = trees.flatten(state)
        name = f"optimizer {plan.optimizer.name}"
        if found != structure:
            raise ArgumentError(
                name, "update changes the structure of its state", "Return it updated."
            )
        missing = [n for n in gradients if n not in after]
        if missing:
            raise ArgumentError(name, f"update returns no parameters {', '.join(missing)}")
        new = [as_tensor(t) for t in new]
        written = {n: (params[n], cast(after[n], params[n].dtype)) for n in gradients}
        for output, before, value in zip(init.outputs, old, new, strict=True):
            if value.handle != before.handle:
                written[output.name] = (before, cast(value, before.dtype))
        return written

    def _context(self) -> Context:
        hyper = {k: self._state(f"hyper:{k}", SCALAR) for k in self.plan.optimizer.hyper}
        count = cast(self._state("count", COUNT), dtypes.float32)
        return Context(
            count,
            count,
            hyper,
            self._state("lr_scale", SCALAR),
            self.plan.decays,
            self.metrics,
            lambda params: self._gradients_of(self._loss(), params)[1],
            lambda params: self._gradients_of(self._loss(), params),
            self.total / self.weight,
            self._sampled_gradients_at,
            self._clipped,
            parts_among(self.by_kind[OutputKind.CAPTURE]),
            self._gradients_of_part,
        )

    def _loss(self) -> Graph:
        if self.loss is None:
            raise GradientError(
                "grad_at",
                "the step has a backward of the user's own, which is for one place only",
                "Use td.compile_step, or an optimizer that needs no other gradient.",
            )
        return self.loss

    def _sampled_gradients_at(self, params: Params) -> tuple[Params, int]:
        """Gradients for labels that the model draws, and how many there are."""
        sampled, drawn = with_sampled_labels(self._loss(), self.trace.next_site)
        return self._gradients_of(sampled, params)[1], drawn

    def _gradients_of_part(self, name: str) -> Params:
        """Gradients of one part of the loss, where the step has no more than this batch."""
        self._refuse_parts()
        scale = self.plan.loss_scale if self.plan.scales_loss else None
        return self._gradients_of(loss_of_part(self._loss(), name, scale), {})[1]

    def _refuse_parts(self) -> None:
        asked = "accumulate" if self.plan.accumulates else "clip_norm"
        if self.plan.accumulates or self.plan.clip_norm is not None:
            raise ArgumentError(
                "compile_step",
                f"{asked} with an optimizer that asks for the gradients of parts of the loss",
                "Put optim.clip_by_global_norm after it in the chain."
                if asked == "clip_norm"
                else "Gradients of parts are of one batch: compile with accumulate=1.",
            )

    def _gradients_of(self, loss: Graph, params: Params) -> tuple[Tensor, Params]:
        """A loss and its gradients on the same batch at other parameters, in the current scope."""
        self.asked_elsewhere = True
        graph = differentiate(loss, [n for n in self.gradients if n in loss.leaves]).graph
        # Leaves are bound one by one: the scope may be a trace inside this one.
        nodes = {name: graph.nodes[i] for name, i in graph.leaves.items()}
        bound = {n: self.trace.leaf(node.op, n, node.types[0]) for n, node in nodes.items()}
        bound |= {n: cast(p, bound[n].dtype) for n, p in params.items() if n in bound}
        values = emit(graph, bound, self.trace.origin)
        found = zip(graph.outputs, values, strict=True)
        gradients = {o.name: v for o, v in found if o.kind is OutputKind.GRADIENT}
        weight = values[2]
        scale = weight * self.plan.loss_scale(self.trace) if self.plan.scales_loss else weight
        means = {n: g / cast(scale, g.dtype) for n, g in gradients.items()}
        return values[1] / weight, means

    def _skipping(self, written: Written, is_fine: Tensor) -> Written:
        """Nothing changes when a gradient overflowed, but the loss scale: it halves.

        After a number of good steps in a row it doubles.
        """
        written = written | self._counted()
        kept = {n: (old, where(is_fine, new, old)) for n, (old, new) in written.items()}
        scale, good = self.plan.loss_scale(self.trace), self._state("good_steps", COUNT)
        grows = ge(good + 1, GROWTH_INTERVAL)
        larger = where(grows, scale * 2, scale)
        smaller = maximum(scale * 0.5, LEAST_LOSS_SCALE)
        kept[self.plan.name("loss_scale")] = (scale, where(is_fine, larger, smaller))
        kept[self.plan.name("good_steps")] = (good, where(is_fine, where(grows, 0, good + 1), 0))
        skipped = self._state("skipped", COUNT)
        kept[self.plan.name("skipped")] = (skipped, where(is_fine, skipped, skipped + 1))
        self._result("updated", is_fine)
        return kept


def trace_eval_params(plan: UpdatePlan) -> Graph | None:
    """The parameters that evaluation uses, where they are not those trained."""
    from_init, structure = trace_init(plan)
    with isolated_tracing("eval_params") as trace:
        params = {n: trace.leaf(PARAMETER, n, t) for n, t in plan.parameters.items()}
        state = structure.rebuild(
            trace.leaf(STATE, o.name, t)
            for o, t in zip(from_init.outputs, from_init.output_types, strict=True)
        )
        after = plan.optimizer.eval_params(state, params)
        changed = {n: t for n, t in after.items() if t.handle != params[n].handle}
        if not changed:
            return None
        outputs = [Output(OutputKind.RESULT, n, t.handle) for n, t in changed.items()]
        return remove_dead_code(trace.finish_outputs(outputs))


def state_types(graphs: list[Graph]) -> dict[str, TensorType]:
    """The state leaves of some graphs."""
    return {
        n.attributes.name: n.attributes.type
        for g in graphs
        for n in g.nodes
        if n.op is STATE and isinstance(n.attributes, Leaf)
    }
