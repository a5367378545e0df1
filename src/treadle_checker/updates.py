"""A training step as the checker composes it: of a loss and its gradients to new parameters.

Gradients are unscaled, added up over micro-steps, divided by the weight, clipped, and given to the
optimizer, whose update is the checker's own or a named graph of the file. With a scaled loss, what
overflows changes nothing but the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from treadle_checker import reading
from treadle_checker.building import Building
from treadle_checker.formulas import Formula
from treadle_checker.optimizers import DEFINITIONS, One
from treadle_checker.reading import NotEstablished, Rejected, need
from treadle_checker.types import Graph, Output, Type, Value

SCALAR, COUNT = Type("float32", ()), Type("int32", ())
GROWTH_INTERVAL = 2000  # good steps in a row after which the loss scale doubles
LEAST_SCALE = 2.0**-14
Named = dict[str, Formula]
Written = dict[str, tuple[Formula, Formula]]  # old and new values


class Update(NamedTuple):
    """An optimizer: a definition of the checker's, or a graph of the file."""

    name: str
    flags: Mapping[str, bool]
    decayed: tuple[str, ...]  # parameters that weight decay applies to
    rate: Any  # a graph of the rate; None: it is the number "lr"
    graph: Any  # a graph of the whole update; None: the definition by the name


class Plan(NamedTuple):
    """What a step is composed of. `prefix` begins the names of all state that it owns."""

    mode: str
    prefix: str
    clips: bool
    accumulates: bool
    scales: bool
    update: Update
    reason: str  # why the update has no graph

    def told(self) -> tuple[str, ...]:
        """What the claim is about."""
        update = self.update
        known = "as the checker defines it" if update.graph is None else "as its graph in the file"
        parts = [f"the update is {update.name} {known}"]
        flags = [name for name, is_set in sorted(update.flags.items()) if is_set]
        parts += [f"with {', '.join(flags)}"] if flags else []
        parts += ["its rate is a graph of the file"] if update.rate is not None else []
        parts += ["gradients are clipped by their norm"] if self.clips else []
        parts += ["gradients are accumulated"] if self.accumulates else []
        return tuple(parts)


MODES = ("update", "accumulate", "accumulate and update")


def read_plan(given: Any, graph_of: Callable[[str], Graph]) -> Plan:
    name = reading.text(1000)
    graph = reading.maybe(lambda given: graph_of(reading.text(64)(given)))

    def flags(given: Any) -> dict[str, bool]:
        need(type(given) is dict and len(given) < 20, given, "flags by their names")
        return {name(k): reading.flag(v) for k, v in given.items()}

    update = reading.record(
        Update, name=name, flags=flags, decayed=reading.several(name), rate=graph, graph=graph
    )
    found: Plan = reading.record(
        Plan, mode=reading.among(MODES), prefix=name, clips=reading.flag,
        accumulates=reading.flag, scales=reading.flag, update=update, reason=name,
    )(given)  # fmt: skip
    return found


def composed(before: Graph, plan: Plan) -> Graph:
    """The step of a graph with gradients."""
    if plan.reason:
        raise NotEstablished(plan.reason)
    return _Composing(before, plan).run()


class _Composing:
    def __init__(self, before: Graph, plan: Plan):
        self.plan, self.made, self.name = plan, Building(before.nodes), before.name
        kinds: dict[str, Named] = {}
        self.prints: list[Output] = []
        for kind, name, value in before.outputs:
            kinds.setdefault(kind, {})[name] = Formula(self.made, value)
            self.prints += [(kind, name, value)] if kind == "print" else []
        self.results = kinds.get("result", {})
        results = [*self.results.values()]
        if len(results) != 3:
            raise Rejected("a step's loss has three results: the scaled total, the total, a weight")
        self.scaled, self.total, self.weight = results
        self.gradients, self.captures = kinds.get("gradient", {}), kinds.get("capture", {})
        self.metrics, self.weights = kinds.get("metric", {}), kinds.get("weight", {})
        self.states = kinds.get("update", {})
        self.outputs: list[Output] = []

    def run(self) -> Graph:
        if self.plan.scales:
            scale = self.scalar("loss_scale")
            self.gradients = {n: g / scale for n, g in self.gradients.items()}
        self._keep_states()
        if self.plan.mode != "update":
            self._accumulate()
        self._put("result", "loss", self.total / self.weight)
        self._put("result", "weight", self.weight)
        for name, value in self.metrics.items():
            self._put("metric", name, value)
            self._put("weight", name, self.weights[name])
        for name, value in self.captures.items():
            self._put("capture", name, value)
        if self.plan.mode != "accumulate":
            self._update()
        return self.made.finished([*self.outputs, *self.prints], self.name)

    def _put(self, kind: str, name: str, value: Formula) -> None:
        self.outputs.append((kind, name, value.value))

    def state(self, name: str, type_: Type) -> Formula:
        return Formula(self.made, self.made.leaf("state", self.plan.prefix + name, type_))

    def scalar(self, name: str) -> Formula:
        return self.state(name, SCALAR)

    def _norm(self, given: Mapping[str, Formula]) -> Formula:
        total = Formula(self.made, self.made.number(0.0, SCALAR))
        for g in given.values():
            total = total + g.squares()
        return total.apply("sqrt")

    def _keep_states(self) -> None:
        """Updates of the model's own states, which an overflow leaves as they were."""
        is_fine = self._norm(self.gradients).is_finite if self.plan.scales else None
        for name, value in self.states.items():
            if is_fine is not None:
                old = Formula(self.made, self.made.leaf("state", name, value.type))
                value = is_fine.chosen(value, old)
            self._put("update", name, value)

    def _accumulate(self) -> None:
        """What earlier micro-steps left is added; it is zero after an update."""
        is_last = self.plan.mode == "accumulate and update"

        def added(name: str, value: Formula) -> Formula:
            total = self.state(f"accumulator:{name}", value.type) + value
            after = total.constant(0) if is_last else total
            self._put("update", f"{self.plan.prefix}accumulator:{name}", after)
            return total

        self.total, self.weight = added("total", self.total), added("weight", self.weight)
        self.gradients = {n: added(f"gradient:{n}", g) for n, g in self.gradients.items()}
        for name, value in list(self.metrics.items()):
            weight = self.weights[name].cast(value.type.dtype)
            self.weights[name] = added(f"metric_weight:{name}", weight)
            counted = weight.equals(0).chosen(value.constant(0), value * weight)
            self.metrics[name] = added(f"metric:{name}", counted) / self.weights[name]

    def _update(self) -> None:
        means = {n: g / self.weight.cast(g.type.dtype) for n, g in self.gradients.items()}
        norm = self._norm(means)
        self._put("result", "grad_norm", norm)
        for name, g in means.items():
            self._put("gradient", name, g)
            self._put("result", f"grad_norm:{name}", self._norm({name: g}))
        if self.plan.clips:
            scale = (self.scalar("clip_norm") / (norm + 1e-6)).least(1.0)
            means = {n: g * scale for n, g in means.items()}
        count = self.state("count", COUNT)
        written = self._optimizer(means, count)
        written[self.plan.prefix + "count"] = count, count + 1
        if self.plan.scales:
            written = self._skipping(written, norm.is_finite)
        for name, (_, new) in written.items():
            self._put("update", name, new)

    def _optimizer(self, gradients: Named, count: Formula) -> Written:
        update, made = self.plan.update, self.made
        if update.graph is not None:
            return self._by_graph(update.graph, gradients)
        if update.name not in DEFINITIONS:
            raise Rejected(f"the checker has no definition of {update.name!r}")
        definition = DEFINITIONS[update.name]
        known = {*definition.flags, "maximize"}
        if update.flags.keys() != known:
            raise Rejected(f"{update.name} has the flags {', '.join(sorted(known))}")
        names = (*definition.numbers, "weight_decay")
        hyper = {n: self.scalar(f"hyper:{n}") for n in names}
        rate, t = self._rate(update.rate) * self.scalar("lr_scale"), count.cast("float32") + 1
        slots = [s for s, flag in definition.slots.items() if not flag or update.flags[flag]]
        written: Written = {}
        for name, g in gradients.items():
            before = Formula(made, made.leaf("parameter", name, g.type))
            p, g = before, -g if update.flags["maximize"] else g
            if name in update.decayed and definition.is_coupled:
                g = g + p * hyper["weight_decay"]
            elif name in update.decayed:
                p = p * (1 - rate * hyper["weight_decay"])
            own = {s: self.state(f"optimizer:{s}.{name}", p.type) for s in slots}
            one = One(p, g, own, hyper, rate, t, update.flags)
            after, changed = definition.rule(one)
            written[name] = before, after
            for slot, new in changed.items():
                written[f"{self.plan.prefix}optimizer:{slot}.{name}"] = own[slot], new
        return written

    def _rate(self, graph: Graph | None) -> Formula:
        if graph is None:
            return self.scalar("hyper:lr")
        found = self.made.inlined_by_name(graph, {})
        if [(kind, name) for kind, name, _ in graph.outputs] != [("result", "rate")]:
            raise Rejected("the graph of the rate has another result")
        return Formula(self.made, found[0])

    def _by_graph(self, graph: Graph, gradients: Named) -> Written:
        """An update that the file has as a graph: of gradients and metrics, by name."""
        given = {f"gradient:{n}": g.value for n, g in gradients.items()}
        results = (self.scaled, self.total, self.weight)
        given |= {f"result:{n}": v.value for n, v in zip(self.results, results, strict=True)}
        given |= {f"metric:{n}": v.value for n, v in self.metrics.items()}
        given |= {f"capture:{n}": v.value for n, v in self.captures.items()}
        found = self.made.inlined_by_name(graph, given)
        written: Written = {}
        for (kind, name, own), value in zip(graph.outputs, found, strict=True):
            is_parameter = name in gradients
            if kind != "update" or not (is_parameter or name.startswith(self.plan.prefix)):
                raise Rejected(f"the graph of the update gives a {kind} {name!r}")
            op = "parameter" if is_parameter else "state"
            old = self.made.leaf(op, name, graph.type_of(own))
            written[name] = Formula(self.made, old), Formula(self.made, value)
        missing = sorted(gradients.keys() - written.keys())
        if missing:
            raise Rejected(f"the graph of the update gives no {missing[0]!r}")
        return written

    def _skipping(self, written: Written, is_fine: Formula) -> Written:
        """Nothing changes after an overflow but the scale, which halves; it doubles after a number
        of good steps in a row."""
        prefix = self.plan.prefix
        kept = {n: (old, is_fine.chosen(new, old)) for n, (old, new) in written.items()}
        scale, good = self.scalar("loss_scale"), self.state("good_steps", COUNT)
        more = good + 1
        grows = Formula(self.made, self._at_least(more, GROWTH_INTERVAL))
        larger, smaller = grows.chosen(scale * 2, scale), (scale * 0.5).most(LEAST_SCALE)
        kept[prefix + "loss_scale"] = scale, is_fine.chosen(larger, smaller)
        following = grows.chosen(good.constant(0), more)
        kept[prefix + "good_steps"] = good, is_fine.chosen(following, 0)
        skipped = self.state("skipped", COUNT)
        kept[prefix + "skipped"] = skipped, is_fine.chosen(skipped, skipped + 1)
        self._put("result", "updated", is_fine)
        return kept

    def _at_least(self, x: Formula, number: int) -> Value:
        return self.made.apply("le", x.constant(number).value, x.value)
