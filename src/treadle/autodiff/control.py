"""The vjp of ops with a body: `call` and `scan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from string import ascii_letters

from treadle.autodiff.backward import (
    VJP,
    Cotangent,
    Pull,
    active_values,
    backward,
    ct_inputs,
    fresh_prefix,
    vjp_graph,
)
from treadle.domains.domain import input_names
from treadle.frontend.coerce import cast
from treadle.frontend.functions.shaping import zeros_like
from treadle.frontend.scopes import bind, bind1, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import emit
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.ops.elementwise import (
    ABS,
    ADD,
    AND,
    CAST,
    EQ,
    LE,
    LT,
    MAX,
    MIN,
    MUL,
    NEG,
    NOT,
    OR,
    SUB,
    WHERE,
)
from treadle.ir.ops.indexing import RANDOM_BITS
from treadle.ir.ops.leaves import CONSTANT, IOTA, Leaf
from treadle.ir.ops.linear import CONTRACT, Contraction, canonical_spec
from treadle.ir.ops.reductions import REDUCE_SUM, Reduce
from treadle.ir.ops.shaping import BROADCAST, PERMUTE, RESHAPE
from treadle.ir.rewrite import cut, inline_into

# Cheaper to compute again than to keep: what only moves or spreads, and random bits.
MOST_RECOMPUTED = 4  # operations rather than a value that is kept
_RECOMPUTED = frozenset([CONSTANT, IOTA, BROADCAST, RESHAPE, PERMUTE, CAST, RANDOM_BITS])


@VJP(CALL)
def call_vjp(pull: Pull) -> Sequence[Cotangent]:
    """A user's backward where there is one; otherwise a call that computes the body again."""
    attributes: Call = pull.attributes
    if attributes.backward is not None:
        return _custom_vjp(attributes.backward, pull)
    body = attributes.body
    names = input_names(body)
    wrt = [n for n, is_needed in zip(names, pull.needed, strict=True) if is_needed]
    graph = vjp_graph(body, [ct is not None for ct in pull.cts], wrt)
    given = dict(zip(names, pull.operands, strict=True))
    given |= ct_inputs(body, pull.cts)
    inner = Call(graph, f"{attributes.name}.vjp", attributes.recompute)
    values = bind(CALL, inner, *(given[n] for n in input_names(graph)))
    gradients = dict(zip((o.name for o in graph.outputs), values, strict=True))
    return [gradients.get(n) for n in names]


def _custom_vjp(graph: Graph, pull: Pull) -> Sequence[Cotangent]:
    # Results come first among the body's outputs; captures and the like take no part.
    count = (len(graph.inputs) - len(pull.operands)) // 2
    results = pull.results[:count]
    cts = [zeros_like(r) if ct is None else ct for ct, r in zip(pull.cts, results, strict=False)]
    given = [*cts, *results, *pull.operands]
    values = emit(graph, dict(zip(input_names(graph), given, strict=True)), pull.trace.origin)
    gradients = dict(zip((o.name for o in graph.outputs), values, strict=True))
    return [gradients.get(str(i)) for i in range(len(pull.operands))]


@dataclass(frozen=True, slots=True)
class _StepBackward:
    """One step of a scan and its cotangents as a graph, and which inputs and outputs are what.

    Outputs are the body's own, then the cotangents: of active carries, of needed constants (added
    to what came in), of needed slices.
    """

    graph: Graph
    outputs: tuple[Output, ...]  # the body's own
    cotangents: tuple[Output, ...]
    names: tuple[str, ...]  # of the body's inputs
    ct: str  # how names of cotangents start
    sum: str  # how names of running sums of cotangents start
    carries: tuple[int, ...]  # active ones, as operand positions
    constants: tuple[int, ...]  # those with a cotangent
    slices: tuple[int, ...]  # those with a cotangent
    stacked: tuple[int, ...]  # outputs of the body with a cotangent that are not carries

    @property
    def sources(self) -> tuple[int, ...]:
        """Whose cotangents they are, as operand positions."""
        return (*self.carries, *self.constants, *self.slices)


@VJP(SCAN)
def scan_vjp(pull: Pull) -> Sequence[Cotangent]:
    """A scan in the other direction over what the forward kept.

    The forward scan is replaced by one that also stacks what the backward uses. A constant's
    cotangent is a running sum; where each step adds a product or a sum, its operands are stacked
    instead and the steps summed at once: one large product for many small ones.
    """
    attributes: Scan = pull.attributes
    step = _step_backward(attributes, pull)
    kept, rows = _residuals(attributes, step)
    stacks = _keep(attributes, step, kept, pull)
    names = step.names
    kept_name = fresh_prefix(step.graph, "kept")
    later = {} if attributes.recompute else _summed_later(step, attributes)
    running = [i for i in step.constants if i not in later]
    carried = [f"{step.ct}{i - attributes.constants}" for i in step.carries]
    carried += [f"{step.sum}{i}" for i in running]
    places = step.graph.leaves
    inputs = [(n, Value(places[n])) for n in (*names[: attributes.constants], *carried)]
    inputs += [(f"{kept_name}{i}", v) for i, v in enumerate(kept)]
    read = [*(names[i] for i in rows), *(f"{step.ct}{i}" for i in step.stacked)]
    inputs += [(n, Value(places[n])) for n in read]
    stacked = [*stacks, *(pull.operands[i] for i in rows)]
    stacked += [ct for i in step.stacked if (ct := pull.cts[i]) is not None]
    known = dict(zip((v for _, v in inputs[-len(stacked) :] if stacked), stacked, strict=True))
    wanted = [o.value for o, i in zip(step.cotangents, step.sources, strict=True) if i not in later]
    rows_of = wanted[len(wanted) - len(step.slices) :]
    there = {*known, *rows_of}
    open_ = [v for v in later.values() if not _is_stacked(step.graph, v, there)]
    nodes = [_behind_casts(step.graph, v) for v in open_]
    extra = {v: None for n in nodes if _is_sum(n) for v in n.operands if v not in known}
    extra = {v: None for v in extra if v not in rows_of}
    results = [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate((*wanted, *extra))]
    body = cut(step.graph, inputs, results, f"{attributes.body.name}.vjp")
    scan = Scan(
        body,
        attributes.constants,
        len(carried),
        attributes.length,
        not attributes.reverse,
        attributes.recompute,
    )
    operands = [*pull.operands[: attributes.constants]]
    operands += [_carry_seed(pull, i - attributes.constants) for i in step.carries]
    operands += [zeros_like(pull.operands[i]) for i in running]
    values = bind(SCAN, scan, *operands, *stacked)
    found = dict(zip((i for i in step.sources if i not in later), values, strict=False))
    stacks_after = values[len(wanted) - len(step.slices) :]
    known |= dict(zip((*rows_of, *extra), stacks_after, strict=True))
    found |= {i: _over_steps(step.graph, value, known) for i, value in later.items()}
    return [found.get(i) for i in range(len(pull.operands))]


def _summed_later(step: _StepBackward, attributes: Scan) -> dict[int, Value]:
    """Constants whose cotangents are summed after the scan, and the value that each step adds.

    It is a product or a sum, whose operands are stacked instead, or it is stacked anyway. In mixed
    precision the sum is behind a cast, and what is stacked may be the value as a product reads it.
    """
    graph, places = step.graph, step.graph.leaves
    varying = {n for n in places if n.startswith(step.ct)} | {*step.names[attributes.constants :]}
    moving = _reached(graph, {places[n] for n in varying})
    found: dict[int, Value] = {}
    plain: dict[int, Value] = {}
    stacked: set[Value] = set()
    for output, i in zip(step.cotangents, step.sources, strict=True):
        if i in step.slices:
            stacked.add(output.value)
        total = graph.nodes[output.value.node]
        if i not in step.constants or total.op is not ADD:
            continue
        added = _behind_casts(graph, total.operands[1])
        if _is_sum(added) and all(v.node in moving for v in added.operands):
            found[i] = total.operands[1]
            stacked.update(added.operands)
        else:
            plain[i] = total.operands[1]
    there = stacked | {_uncast(graph, v) for v in stacked}
    return found | {i: v for i, v in plain.items() if v in there}


def _is_sum(node: Node) -> bool:
    return node.op in (CONTRACT, REDUCE_SUM)


def _uncast(graph: Graph, value: Value) -> Value:
    """What a value is a cast of, from float to float, or the value itself."""
    node = graph.nodes[value.node]
    is_cast = node.op is CAST and node.types[0].dtype.is_float
    return node.operands[0] if is_cast and graph.type_of(node.operands[0]).dtype.is_float else value


def _behind_casts(graph: Graph, value: Value) -> Node:
    """The node that makes a value, but for casts."""
    while (inner := _uncast(graph, value)) != value:
        value = inner
    return graph.nodes[value.node]


def _is_stacked(graph: Graph, value: Value, there: AbstractSet[Value]) -> bool:
    """Whether a stack has a value, or what it is a cast of: a step's product that no cotangent
    reaches is kept as it is, and its operands are not."""
    while value not in there:
        inner = _uncast(graph, value)
        if inner == value:
            return False
        value = inner
    return True


def _over_steps(graph: Graph, value: Value, stacks: Mapping[Value, Tensor]) -> Tensor:
    """A value summed over all steps, from its stack or from those of its node's operands."""
    dtype = graph.type_of(value).dtype
    narrow = next((s for v, s in stacks.items() if value == _uncast(graph, v)), None)
    stack = stacks.get(value, narrow)
    if stack is not None:
        return bind1(REDUCE_SUM, Reduce((0,)), cast(stack, dtype))
    node = graph.nodes[value.node]
    if node.op is CAST:  # a little is rounded once, in place of every step's
        return cast(_over_steps(graph, node.operands[0], stacks), dtype)
    operands = [stacks[v] for v in node.operands]
    if isinstance(node.attributes, Contraction):
        x, y, result = node.attributes.labels
        step = next(c for c in ascii_letters if c not in x + y)
        spec = canonical_spec(step + x, step + y, result)
        return bind1(CONTRACT, Contraction(spec, node.attributes.dtype), *operands)
    assert isinstance(node.attributes, Reduce)
    axes = (0, *(a + 1 for a in node.attributes.axes))
    return bind1(REDUCE_SUM, Reduce(axes), *operands)


def _carry_seed(pull: Pull, carry: int) -> Tensor:
    ct = pull.cts[carry]
    return zeros_like(pull.results[carry]) if ct is None else ct


def _step_backward(attributes: Scan, pull: Pull) -> _StepBackward:
    body, first, carries = attributes.body, attributes.constants, attributes.carries
    names = tuple(input_names(body))
    active = _active_inputs(attributes, pull.needed)
    moving = tuple(i for i in range(first, first + carries) if active[i])
    stacked = tuple(i for i in range(carries, len(body.outputs)) if pull.cts[i] is not None)
    ct_name, sum_name = fresh_prefix(body, "ct"), fresh_prefix(body, "sum")
    with isolated_tracing(body.name) as trace:
        values = inline_into(trace.builder, body, {})
        seeds: dict[Value, Tensor] = {}
        for output in [*(i - first for i in moving), *stacked]:
            ct = trace.input(f"{ct_name}{output}", trace.builder.type_of(values[output]))
            seeds[values[output]] = seeds[values[output]] + ct if values[output] in seeds else ct
        places = {
            n.attributes.name: Value(i)
            for i, n in enumerate(trace.builder.nodes)
            if isinstance(n.attributes, Leaf)
        }
        wanted = {i: places[names[i]] for i, is_active in enumerate(active) if is_active}
        cts = backward(trace, seeds, wanted.values())
        results: list[Tensor] = []
        for i in moving:
            is_reached = wanted[i] in cts
            results.append(cts[wanted[i]] if is_reached else zeros_like(trace.tensor(wanted[i])))
        constants = tuple(i for i in wanted if i < first and wanted[i] in cts)
        for i in constants:
            total = trace.input(f"{sum_name}{i}", trace.builder.type_of(wanted[i]))
            results.append(total + cts[wanted[i]])
        slices = tuple(i for i in wanted if i >= first + carries and wanted[i] in cts)
        results += [cts[wanted[i]] for i in slices]
        own = [Output(o.kind, o.name, v) for o, v in zip(body.outputs, values, strict=True)]
        named = [Output(OutputKind.GRADIENT, str(i), r.handle) for i, r in enumerate(results)]
        graph = trace.finish_outputs([*own, *named])
    split = len(own)
    own_outputs, cotangents = graph.outputs[:split], graph.outputs[split:]
    return _StepBackward(
        graph, own_outputs, cotangents, names, ct_name, sum_name, moving, constants, slices, stacked
    )


def _active_inputs(attributes: Scan, needed: Sequence[bool]) -> list[bool]:
    """Inputs of the body whose cotangent matters: what is needed, and carries that depend on it."""
    body, first, carries = attributes.body, attributes.constants, attributes.carries
    active = list(needed)
    while True:
        wrt = {Value(i) for i, is_active in zip(body.inputs, active, strict=True) if is_active}
        reached = active_values(body.nodes, wrt)
        moving = [body.outputs[k].value in reached for k in range(carries)]
        grown = [a or m for a, m in zip(active[first : first + carries], moving, strict=True)]
        if grown == active[first : first + carries]:
            return active
        active[first : first + carries] = grown


def _residuals(attributes: Scan, step: _StepBackward) -> tuple[list[Value], list[int]]:
    """Values of each forward step that the backward needs, and the slices it reads directly."""
    graph = step.graph
    places = graph.leaves
    upstream = {places[n] for n in places if n.startswith((step.ct, step.sum))}
    varying = {places[n] for n in step.names[attributes.constants :]}
    from_ct, from_step = _reached(graph, upstream), _reached(graph, varying)
    carried = {
        places[n]
        for n in step.names[attributes.constants : attributes.constants + attributes.carries]
    }
    sliced = {
        places[n]: i
        for i, n in enumerate(step.names)
        if i >= attributes.constants + attributes.carries
    }
    pending = [o.value for o in step.cotangents]
    kept: dict[Value, None] = {}
    rows: set[int] = set()
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in seen or not (value.node in from_ct or value.node in from_step):
            continue
        seen.add(value)
        node = graph.nodes[value.node]
        if value.node in sliced:
            rows.add(sliced[value.node])
        elif value.node in carried:
            kept[value] = None
        elif value.node in from_ct or attributes.recompute or node.op in _RECOMPUTED:
            pending.extend(node.operands)
        else:
            kept[value] = None
    there = {Value(places[n]) for n in step.names[: attributes.constants]}
    there |= {Value(node) for node, i in sliced.items() if i in rows}
    for value in sorted(kept, reverse=True):
        if _is_cheap(graph, value, (there | kept.keys()) - {value}):
            del kept[value]
    return sorted(kept), sorted(rows)


# Arithmetic that costs less than keeping its result for each step.
_CHEAP = frozenset([NEG, ABS, ADD, SUB, MUL, MAX, MIN, NOT, AND, OR, EQ, LT, LE, WHERE])


def _is_cheap(graph: Graph, value: Value, there: AbstractSet[Value]) -> bool:
    """Whether a little arithmetic on what is there anyway gives the value."""
    pending, count = [value], 0
    while pending:
        node = graph.nodes[pending.pop().node]
        count += node.op in _CHEAP
        if count > MOST_RECOMPUTED or not (node.op in _CHEAP or node.op in _RECOMPUTED):
            return False
        pending += [v for v in node.operands if v not in there]
    return True


def _reached(graph: Graph, sources: set[int]) -> set[int]:
    """Nodes that depend on the sources, themselves included."""
    found = set(sources)
    for position, node in enumerate(graph.nodes):
        if any(v.node in found for v in node.operands):
            found.add(position)
    return found


def _keep(attributes: Scan, step: _StepBackward, kept: Sequence[Value], pull: Pull) -> list[Tensor]:
    """Stacks of the kept values, from a forward scan that replaces the old one."""
    if not kept:
        return []
    places = step.graph.leaves
    inputs = [(n, Value(places[n])) for n in step.names]
    extra = [Output(OutputKind.RESULT, f"kept {i}", v) for i, v in enumerate(kept)]
    body = cut(step.graph, inputs, [*step.outputs, *extra], attributes.body.name)
    scan = Scan(
        body,
        attributes.constants,
        attributes.carries,
        attributes.length,
        attributes.reverse,
        attributes.recompute,
    )
    values = bind(SCAN, scan, *pull.operands)
    for old, new in zip(pull.results, values, strict=False):
        pull.trace.replacements[old.handle] = new.handle
    return list(values[len(pull.results) :])
