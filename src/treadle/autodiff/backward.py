"""The reverse walk over a graph, and the graphs that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from treadle.base.errors import GradientError
from treadle.frontend.coerce import constant
from treadle.frontend.scopes import Trace, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import emit
from treadle.ir.composites import ATTENTION, ATTENTION_GRAD, definition_graph
from treadle.ir.control import CALL, SCAN
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.marks import Pairs
from treadle.ir.op import Attributes, Op, RuleTable, Types
from treadle.ir.ops.leaves import NAMED_LEAVES, Leaf
from treadle.ir.ops.reductions import SORT, TOP_K
from treadle.ir.rewrite import copied, inline_into, remove_dead_code, walk, without_dead_code

Cotangent = Tensor | None  # None is a zero that is never made

# Cotangents of the operands from that of the result, the result and the operands. Ops with
# several results get tuples. Ops with a body get a `Pull` instead.
VJP: RuleTable[Callable[..., Sequence[Cotangent]]] = RuleTable("vjp")
SEVERAL_RESULTS = frozenset([SORT, TOP_K, ATTENTION, ATTENTION_GRAD])
WITH_BODY = frozenset([CALL, SCAN])


def no_gradient(*_: object) -> Sequence[Cotangent]:
    """The entry of ops whose gradient is zero everywhere; the walk stops there."""
    raise AssertionError("the walk does not pass ops without a gradient")


@dataclass(frozen=True, slots=True)
class Pull:
    """What the rule of an op with a body sees."""

    attributes: Any  # Call or Scan
    cts: tuple[Cotangent, ...]
    results: tuple[Tensor, ...]
    operands: tuple[Tensor, ...]
    needed: tuple[bool, ...]  # which operands want a cotangent
    trace: Trace


def backward(
    trace: Trace, seeds: Mapping[Value, Tensor], wrt: Iterable[Value]
) -> dict[Value, Tensor]:
    """Cotangents of `wrt`, appended to the trace; those that nothing reaches are missing."""
    wanted = set(wrt)
    cts = cotangents(trace, seeds, wanted)
    return {v: cts[v] for v in wanted if v in cts}


def cotangents(
    trace: Trace, seeds: Mapping[Value, Tensor], wanted: set[Value]
) -> dict[Value, Tensor]:
    """Cotangents of all values between the seeds and what is wanted.

    `seeds` are the cotangents of results. Nodes are visited in reverse order; nothing recurses.
    """
    nodes = tuple(trace.builder.nodes)
    active = active_values(nodes, wanted)
    cts = dict(seeds)
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        outputs = [Value(position, i) for i in range(len(node.types))]
        is_reached = any(v in cts for v in outputs) and any(v in active for v in node.operands)
        if not is_reached or not has_gradient(node.op):
            continue
        trace.origin = node.origin
        found = _pull(trace, node, outputs, cts, active)
        for value, ct in zip(node.operands, found, strict=True):
            if ct is None or value not in active:
                continue
            expected = trace.builder.type_of(value)
            assert ct.type == expected, (
                f"vjp of {node.op} gives {ct.type} for an operand {expected}"
            )
            cts[value] = cts[value] + ct if value in cts else ct
    trace.origin = None
    return cts


def active_values(nodes: Sequence[Node], wrt: set[Value]) -> set[Value]:
    """Float values that depend on `wrt` through ops with a gradient."""
    active = set(wrt)
    for position, node in enumerate(nodes):
        if any(v in active for v in node.operands) and has_gradient(node.op):
            active.update(Value(position, i) for i, t in enumerate(node.types) if t.is_float)
    return active


def has_gradient(op: Op) -> bool:
    return op not in NAMED_LEAVES and VJP.get(op) is not no_gradient


def _pull(
    trace: Trace,
    node: Node,
    outputs: Sequence[Value],
    cts: Mapping[Value, Tensor],
    active: set[Value],
) -> Sequence[Cotangent]:
    op, attributes = node.op, node.attributes
    upstream = tuple(cts.get(v) for v in outputs)
    results = tuple(trace.tensor(v) for v in outputs)
    operands = tuple(trace.tensor(v) for v in node.operands)
    if op in WITH_BODY:
        needed = tuple(v in active for v in node.operands)
        return VJP[op](Pull(attributes, upstream, results, operands, needed, trace))
    rule = VJP.get(op)
    if rule is None:
        return definition_vjp(op, attributes, upstream, operands)
    given = (attributes,) if op.has_attributes else ()
    if op in SEVERAL_RESULTS:
        return rule(*given, upstream, results, *operands)
    return rule(*given, upstream[0], results[0], *operands)


def waits_for(trace: Trace, ct: Tensor, out: Tensor) -> bool:
    """Whether a cotangent depends on a forward result, or on something given after it.

    Cotangents of a scan's step are given so: what the forward computes must not depend on them.
    """
    pending, seen = [ct.handle], set[Value]()
    while pending:
        value = pending.pop()
        while value in trace.replacements:
            value = trace.replacements[value]
        if value in seen:
            continue
        seen.add(value)
        node = trace.builder.nodes[value.node]
        is_late = isinstance(node.attributes, Leaf) and value.node > out.handle.node
        if is_late or value.node == out.handle.node:
            return True
        pending.extend(node.operands)
    return False


def definition_vjp(
    op: Op, attributes: Attributes, cts: Sequence[Cotangent], operands: Sequence[Tensor]
) -> Sequence[Cotangent]:
    """For a composite without a rule of its own: its definition's, computed again from operands."""
    assert op.is_composite, f"{op} has no vjp"
    present = tuple(ct is not None for ct in cts)
    graph = _definition_vjp_graph(op, attributes, tuple(o.type for o in operands), present)
    definition = definition_graph(op, attributes, tuple(o.type for o in operands))
    inputs = {str(i): o for i, o in enumerate(operands)} | ct_inputs(definition, cts)
    scope = operands[0].scope
    assert isinstance(scope, Trace)
    gradients = dict(
        zip((o.name for o in graph.outputs), emit(graph, inputs, scope.origin), strict=True)
    )
    return [gradients.get(str(i)) for i in range(len(operands))]


@lru_cache(maxsize=4096)
def _definition_vjp_graph(
    op: Op, attributes: Attributes, types: Types, present: tuple[bool, ...]
) -> Graph:
    definition = definition_graph(op, attributes, types)
    floats = [str(i) for i, t in enumerate(types) if t.is_float]
    return vjp_graph(definition, present, floats)


def vjp_graph(
    graph: Graph, present: Sequence[bool], wrt: Sequence[str], with_results: bool = False
) -> Graph:
    """Cotangents of results to gradients of named leaves.

    Inputs are the graph's own and a cotangent for each output that is present, named as `ct_inputs`
    does; outputs are gradients, named by leaf, of what the outputs depend on. The graph's own come
    before them `with_results`.
    """
    prefix = fresh_prefix(graph, "ct")
    with isolated_tracing(f"{graph.name}.vjp") as trace:
        outputs = inline_into(trace.builder, graph, {})
        seeds: dict[Value, Tensor] = {}
        for i, (value, is_present) in enumerate(zip(outputs, present, strict=True)):
            if is_present:
                ct = trace.input(f"{prefix}{i}", trace.builder.type_of(value))
                seeds[value] = seeds[value] + ct if value in seeds else ct
        leaves = _leaf_values(trace, wrt)
        cts = backward(trace, seeds, leaves.values())
        own = zip(graph.outputs, outputs, strict=True) if with_results else ()
        named = [Output(o.kind, o.name, v) for o, v in own]
        named += [
            Output(OutputKind.GRADIENT, n, cts[v].handle) for n, v in leaves.items() if v in cts
        ]
        return remove_dead_code(trace.finish_outputs(named))


def fresh_prefix(graph: Graph, stem: str) -> str:
    """A beginning that no leaf's name has: derivatives of derivatives nest."""
    prefix = f"{stem}^"
    while any(name.startswith(prefix) for name in graph.leaves):
        prefix += "^"
    return prefix


def ct_inputs(graph: Graph, cts: Sequence[Cotangent]) -> dict[str, Tensor]:
    """The cotangents of a graph's outputs by the names they have in its `vjp_graph`."""
    prefix = fresh_prefix(graph, "ct")
    return {f"{prefix}{i}": ct for i, ct in enumerate(cts) if ct is not None}


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A graph with the gradients of its first result, and what that result does not depend on.

    `kept` and `cotangents` pair values of the graph before with those that hold them, or their
    cotangents, in the graph after: hints for the certificate, which are checked.
    """

    graph: Graph
    unreached: tuple[str, ...]
    kept: Pairs = ()
    cotangents: Pairs = ()


def differentiate(graph: Graph, wrt: Sequence[str]) -> Differentiated:
    """Append the gradients of the graph's first result, a float scalar, by leaf name.

    Zero gradients are not made: names that the result does not depend on are listed instead.
    """
    with isolated_tracing(graph.name) as trace:
        own: dict[Value, Value] = {}  # values of the graph by where they are in the trace

        def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
            values = copied(trace.builder, graph.nodes[position], operands)
            own.update((v, Value(position, k)) for k, v in enumerate(values))
            return values

        values = walk(graph, visit)
        loss = trace.tensor(values[0])
        check_scalar(loss)
        leaves = _leaf_values(trace, wrt)
        trace.origin = graph.nodes[graph.outputs[0].value.node].origin
        seed = constant(1, (), loss.dtype)
        cts = cotangents(trace, {values[0]: seed}, set(leaves.values()))
        outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
        outputs += [
            Output(OutputKind.GRADIENT, n, cts[v].handle) for n, v in leaves.items() if v in cts
        ]
        unreached = tuple(n for n, v in leaves.items() if v not in cts)
        count = len(outputs)
        held = [(own[v], cts[v].handle) for v in sorted(own) if v in cts]
        hints = [*((own[v], v) for v in sorted(own)), *held]
        outputs += [Output(OutputKind.RESULT, "", value) for _, value in hints]
        whole = trace.finish_outputs(outputs)
        named = Graph(whole.nodes, whole.outputs[:count], whole.name)
        found, moved = without_dead_code(named)
        pairs = [
            (v, Value(moved[o.value.node], o.value.output))
            for (v, _), o in zip(hints, whole.outputs[count:], strict=True)
        ]
        kept, of_cts = pairs[: len(own)], pairs[len(own) :]
        alive = [tuple(p for p in some if p[1].node >= 0) for some in (kept, of_cts)]
        return Differentiated(found, unreached, *alive)


def check_scalar(loss: Tensor) -> None:
    if loss.shape != () or not loss.dtype.is_float:
        raise GradientError(
            "grad",
            f"the result is {loss.type}, not a float scalar",
            "Reduce it first, for instance with .mean(); for other results use td.vjp.",
        )


def _leaf_values(trace: Trace, names: Sequence[str]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for position, node in enumerate(trace.builder.nodes):
        if isinstance(node.attributes, Leaf):
            found[node.attributes.name] = Value(position)
    missing = [n for n in names if n not in found]
    if missing:
        raise GradientError(
            "grad", f"there is no leaf named {', '.join(missing)}", f"Leaves: {', '.join(found)}."
        )
    for name in names:
        type_ = trace.builder.type_of(found[name])
        if not type_.is_float:
            raise GradientError(
                "grad", f"{name} is {type_}, not a float", "Only floats have gradients."
            )
    return {name: found[name] for name in names}
