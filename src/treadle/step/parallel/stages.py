"""A shard's graph as stages between which all shards' sums are made.

A `shard_sum` waits for every shard. The graph is cut there: a stage computes what depends on so
many sums, one after the other; what a later stage needs of it is kept for each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.ir.composites import BATCH_NORM
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.ops.elementwise import CAST
from treadle.ir.ops.leaves import CONSTANT, IOTA, Leaf
from treadle.ir.ops.reductions import SHARD_SUM
from treadle.ir.ops.shaping import BROADCAST, PERMUTE, RESHAPE
from treadle.ir.rewrite import cut

# What is computed again rather than kept.
_CHEAP = frozenset([CONSTANT, IOTA, BROADCAST, PERMUTE, RESHAPE, CAST])
KEPT, SUMMED = "kept:", "summed:"  # begin the names of values between stages


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the graph: its leaves may be what earlier stages kept, and sums after them."""

    graph: Graph
    kept: tuple[str, ...] = ()  # results that are for later stages of the same shard
    summed: tuple[str, ...] = ()  # results that are summed over all shards

    @property
    def taken(self) -> list[str]:
        """Leaves that other stages give."""
        return [n for n in self.graph.leaves if n.startswith((KEPT, SUMMED))]


def stages_of(graph: Graph) -> list[Stage]:
    """The graph by itself, or cut at the sums over shards. Outputs are those of the last stage."""
    _refuse_inside(graph)
    if not any(n.op is SHARD_SUM for n in graph.nodes):
        return [Stage(graph)]
    depths = _depths(graph)
    found: list[Stage] = []
    later: set[Value] = set()  # what stages after this one need
    for depth in range(max(depths), -1, -1):
        found.append(_stage(graph, depths, depth, later))
    return found[::-1]


def _stage(graph: Graph, depths: Sequence[int], depth: int, later: set[Value]) -> Stage:
    """What depends on so many sums; `later` grows by what it needs of earlier stages."""
    sums = [i for i, n in enumerate(graph.nodes) if n.op is SHARD_SUM]
    closing = [i for i in sums if depths[i] == depth + 1]
    kept = sorted(v for v in later if depths[v.node] == depth)
    outputs = [Output(OutputKind.RESULT, _kept(v), v) for v in kept]
    outputs += [
        Output(OutputKind.RESULT, f"{SUMMED}{i}", graph.nodes[i].operands[0]) for i in closing
    ]
    if depth == max(depths):
        outputs = list(graph.outputs)
    taken: set[Value] = set()
    stack, seen = [o.value for o in outputs], set[Value]()
    while stack:
        value = stack.pop()
        node = graph.nodes[value.node]
        if value in seen or isinstance(node.attributes, Leaf):
            continue
        seen.add(value)
        if node.op is SHARD_SUM:
            taken.add(value)
        elif depths[value.node] < depth and node.op not in _CHEAP:
            taken.add(value)
            later.add(value)
        else:
            stack += node.operands
    names = [
        (f"{SUMMED}{v.node}" if graph.nodes[v.node].op is SHARD_SUM else _kept(v), v)
        for v in sorted(taken)
    ]
    part = cut(graph, names, outputs, f"{graph.name}.{depth}")
    return Stage(part, tuple(_kept(v) for v in kept), tuple(f"{SUMMED}{i}" for i in closing))


def _kept(value: Value) -> str:
    return f"{KEPT}{value.node}.{value.output}"


def _depths(graph: Graph) -> list[int]:
    """On how many sums, one after the other, each node depends."""
    found: list[int] = []
    for node in graph.nodes:
        depth = max((found[v.node] for v in node.operands), default=0)
        found.append(depth + (node.op is SHARD_SUM))
    return found


def _refuse_inside(graph: Graph) -> None:
    """Sums over shards inside a loop or a call have no place to wait at."""
    for node in graph.nodes:
        for inner in _bodies(node):
            if _has_sum(inner):
                raise ArgumentError(
                    "compile_step",
                    f"a batch norm over all shards is inside a {node.op.name}",
                    'Take it out of scan, vmap or checkpoint, or use DataParallel(batch_norm="per '
                    'shard").',
                )


def _has_sum(graph: Graph) -> bool:
    return any(n.op is SHARD_SUM or any(map(_has_sum, _bodies(n))) for n in graph.nodes)


def _bodies(node: Node) -> list[Graph]:
    attributes = node.attributes
    if node.op is CALL and isinstance(attributes, Call):
        return [attributes.body]
    if node.op is SCAN and isinstance(attributes, Scan):
        return [attributes.body]
    return []


def refuse_single_norms(graph: Graph) -> None:
    """A batch norm that is not Treadle's own layer looks at one shard."""
    if any(n.op is BATCH_NORM for n in graph.nodes):
        raise ArgumentError(
            "compile_step",
            "the model has a batch norm that is not nn.BatchNorm1d, 2d or 3d, and looks at one "
            "shard alone",
            'Use those, or DataParallel(batch_norm="per shard").',
        )
