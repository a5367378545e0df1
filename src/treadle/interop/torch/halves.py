"""A function and its gradient as two programs: what the first computes and the second needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from treadle.autodiff.backward import fresh_prefix, vjp_graph
from treadle.ir import composites
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.op import Op
from treadle.ir.ops import elementwise, shaping
from treadle.ir.ops.leaves import CONSTANT, IOTA, NAMED_LEAVES, Leaf
from treadle.ir.rewrite import cut, remove_dead_code

# Computed again where it is read: it costs less than to write and read it.
CHEAP = frozenset(
    [
        *(op for op in vars(elementwise).values() if isinstance(op, Op)),
        *(op for op in vars(shaping).values() if isinstance(op, Op)),
        *(composites.RELU, composites.SIGMOID, composites.SILU, composites.GELU),
        *(CONSTANT, IOTA),
    ]
)
SAVED = "saved:"


@dataclass(frozen=True, slots=True)
class Halves:
    """`forward` has the function's outputs and captures named "saved:…"; `backward` takes those,
    the leaves it reads and the cotangents, and gives gradients by leaf. No leaf that it reads is
    among those that change between the two.
    """

    forward: Graph
    backward: Graph
    saved: tuple[str, ...]
    cotangents: tuple[str | None, ...]  # names of the results' cotangents; None: it has none


def halves(graph: Graph, wrt: Sequence[str], changed: Collection[str] = ()) -> Halves:
    """Both programs of a graph, for the gradients of some of its leaves.

    States that the graph updates, and leaves that are `changed` otherwise once the forward has run,
    have other values by the time of the backward: their old ones are saved.
    """
    changed = {*changed, *(o.name for o in graph.outputs if o.kind is OutputKind.UPDATE)}
    results = [o.kind is OutputKind.RESULT for o in graph.outputs]
    floats = [t.is_float for t in graph.output_types]
    present = [r and f for r, f in zip(results, floats, strict=True)]
    prefix = fresh_prefix(graph, "ct")
    joint = vjp_graph(graph, present, wrt, with_results=True)
    late = _after(joint, prefix)
    kept = _saved(joint, late, _kept_leaves(joint, changed))
    named = [(f"{SAVED}{i}", value) for i, value in enumerate(kept)]
    own, gradients = joint.outputs[: len(graph.outputs)], joint.outputs[len(graph.outputs) :]
    captures = [Output(OutputKind.CAPTURE, name, value) for name, value in named]
    first = remove_dead_code(cut(joint, [], [*own, *captures], graph.name))
    second = cut(joint, named, gradients, f"{graph.name}.backward")
    names = [f"{prefix}{i}" if p else None for i, p in enumerate(present) if results[i]]
    return Halves(first, second, tuple(n for n, _ in named), tuple(names))


def _after(joint: Graph, prefix: str) -> set[int]:
    """Nodes that depend on a cotangent."""
    found: set[int] = set()
    for i, node in enumerate(joint.nodes):
        is_ct = isinstance(node.attributes, Leaf) and node.attributes.name.startswith(prefix)
        if is_ct or any(v.node in found for v in node.operands):
            found.add(i)
    return found


def _kept_leaves(joint: Graph, changed: Collection[str]) -> set[int]:
    """Nodes of leaves that the backward finds as the forward found them."""
    return {
        i
        for i, node in enumerate(joint.nodes)
        if node.op in NAMED_LEAVES
        and not (isinstance(node.attributes, Leaf) and node.attributes.name in changed)
    }


def _saved(joint: Graph, late: set[int], leaves: set[int]) -> list[Value]:
    """What the backward computes all that it reads from by cheap ops, besides `leaves`.

    That is what it reads itself, or what is behind that, whichever is smaller.
    """
    read = {v for i in late for v in joint.nodes[i].operands if v.node not in late}
    near = [v for v in read if not _is_known(joint.nodes, v, leaves, {})]
    known: dict[Value, bool] = {}
    direct: list[Value] = []
    for value in sorted(near):
        if not _is_known(joint.nodes, value, leaves, known):
            direct.append(value)
            known[value] = True
    behind = sorted(_roots(joint.nodes, near, leaves))
    return min(behind, direct, key=lambda values: sum(joint.type_of(v).nbytes for v in values))


def _roots(nodes: Sequence[Node], values: Sequence[Value], leaves: set[int]) -> set[Value]:
    """The values, not cheap to compute, that some values follow from by cheap ops."""
    found: set[Value] = set()
    seen: set[Value] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if value in seen or value.node in leaves:
            continue
        seen.add(value)
        if nodes[value.node].op in CHEAP:
            stack += nodes[value.node].operands
        else:
            found.add(value)
    return found


def _is_known(
    nodes: Sequence[Node], value: Value, leaves: set[int], known: dict[Value, bool]
) -> bool:
    """Whether a value follows from leaves and what is known by cheap ops; nothing recurses."""
    stack = [value]
    while stack:
        now = stack[-1]
        node = nodes[now.node]
        if now in known or now.node in leaves or node.op not in CHEAP:
            known.setdefault(now, now.node in leaves)
            stack.pop()
            continue
        unknown = [v for v in node.operands if v not in known]
        if unknown:
            stack += unknown
        else:
            known[now] = all(known[v] for v in node.operands)
            stack.pop()
    return known[value]
