"""Which tensors are materialized, and which are computed where they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treadle.base.dtypes import DType, accumulator
from treadle.ir import composites as c
from treadle.ir.control import SCAN
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import RuleTable
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, linear, shaping
from treadle.ir.ops.leaves import CONSTANT, IOTA, Constant, Leaf
from treadle.kernel.contraction import CONVOLUTIONS, contraction_of
from treadle.kernel.nodes import Kernel
from treadle.kernel.target import CPU, Materialization, Target
from treadle.schedule.compared import compared_values
from treadle.schedule.homes import Readers, homes_of
from treadle.schedule.inline import ELEMENTWISE, INLINE, is_apart, is_single, of_positions

# What computes ops that are not computed where they are read, given a `Lowering`.
Root = Callable[[Any, int, Node], list[Kernel]]
ROOTS: RuleTable[Root] = RuleTable("kernel")
# What computes ops by phases that are repeated: drafts instead of kernels.
ChunkedLoop = Callable[[Any, int, Node], list[Any]]
CHUNKED: RuleTable[ChunkedLoop] = RuleTable("stream")


def is_root(graph: Graph, node: Node) -> bool:
    """Whether a node has a kernel of its own."""
    if node.op is indexing.SCATTER_ADD:
        return not is_single(node, graph.type_of(node.operands[1]))
    return node.op in CHUNKED or (node.op in ROOTS and not is_apart(node))


class Materialized:
    """Which tensors of a graph are in memory: what of it is so whatever else is asked for."""

    def __init__(self, graph: Graph, fuse: bool, target: Target = CPU):
        self.graph, self.fuse, self.target = graph, fuse, target
        decoded = _decoded(graph, target) if fuse else {}
        copied = decoded if target.copies_operands else ()
        self._wanted = {o.value for o in graph.outputs} | _read_often(graph, target, copied)
        if target.contracts:
            self._wanted |= compared_values(graph)
        self._unshared = _cheap_scalars(graph)
        self._unshared |= of_positions(graph) if target.materialization.masks_in_place else set()
        self._unshared.update(*decoded.values())
        self._made = [is_root(graph, n) or not is_inline(n) for n in graph.nodes]

    def values(
        self, also: Collection[TensorValue] = (), cheap: Collection[int] = ()
    ) -> dict[TensorValue, None]:
        """Tensors that are in memory, in order: roots, outputs, and what several kernels read.

        Of those the ones of `cheap` nodes are not, as long as no matmul reads them.
        """
        wanted, unshared = self._wanted | set(also), self._unshared | set(cheap)
        stored, sizes = self._stored(wanted, unshared), self.target.materialization
        cuts = _too_deep(self.graph, stored, sizes)
        cuts |= _too_wide(self.graph, stored.keys() | cuts, sizes.most_repeats)
        return self._stored(wanted | cuts, unshared) if cuts else stored

    def _stored(self, wanted: set[TensorValue], unshared: set[int]) -> dict[TensorValue, None]:
        graph, target, fuse = self.graph, self.target, self.fuse
        readers = Readers()
        stored: dict[TensorValue, None] = {}
        shared: dict[TensorValue, None] = {}  # only because several kernels read them
        # From the end: which kernels an inlined value ends up in is known from its users.
        for position in range(len(graph.nodes) - 1, -1, -1):
            node, is_made = graph.nodes[position], self._made[position]
            if isinstance(node.attributes, Leaf):
                continue
            values = [TensorValue(position, i) for i in range(len(node.types))]
            used_by = readers.found.get(values[0], _NOBODY)
            for value in values[1:]:
                used_by = used_by | readers.found.get(value, _NOBODY)
            is_shared = len(used_by) > 1 and node.op not in VIEWS and position not in unshared
            if is_shared and target.rematerializes:
                is_shared = not (_widens(graph, node) or _repeats_rows(graph, node))
            is_wanted = not wanted.isdisjoint(values)
            if is_made or is_shared or not fuse or is_wanted:
                stored.update(dict.fromkeys(values))
                home = {position}
                if not is_made and fuse and not is_wanted:
                    shared.update(dict.fromkeys(values))
            else:
                home = used_by
            readers.add(node.operands, home)
        sources = stored if target.rematerializes else shared
        for value in sorted(shared):
            if _is_cheap(graph, value, stored, sources, readers.found, target):
                del stored[value]
        return dict.fromkeys(sorted(stored))


_NOBODY: set[int] = set()


def wider_values(graph: Graph, stored: Mapping[TensorValue, None]) -> dict[TensorValue, DType]:
    """Narrow sums that stay in memory as they were summed: who reads them rounds them.

    Only where elementwise work reads them; a kernel that rounds them first would cost more.
    """
    found: dict[TensorValue, DType] = {}
    for v in stored:
        node, dtype = graph.nodes[v.node], graph.type_of(v).dtype
        is_sum = node.op is indexing.SCATTER_ADD and is_root(graph, node)
        is_sum = is_sum or (node.op is c.LINEAR_CROSS_ENTROPY_GRAD and v.output > 1)
        if is_sum and dtype.is_narrow:
            found[v] = accumulator(dtype)
    for o in graph.outputs:
        found.pop(o.value, None)
    for node in graph.nodes if found else ():
        if node.op not in ELEMENTWISE:
            for v in node.operands:
                found.pop(v, None)
    return found


def _widens(graph: Graph, node: Node) -> bool:
    """Whether a node is a cast to more bytes: the fewer are read once more instead."""
    if node.op is not e.CAST:
        return False
    source = graph.type_of(node.operands[0]).dtype
    return source.itemsize < node.types[0].dtype.itemsize


def _repeats_rows(graph: Graph, node: Node) -> bool:
    """Whether a node takes rows of a tensor that is smaller than they are: it is read instead."""
    if node.op is not indexing.GATHER:
        return False
    return 2 * graph.type_of(node.operands[0]).size <= node.types[0].size


def _is_cheap(
    graph: Graph,
    value: TensorValue,
    stored: dict[TensorValue, None],
    shared: dict[TensorValue, None],
    readers: Mapping[TensorValue, set[int]],
    target: Target,
) -> bool:
    """Whether a value is better recomputed wherever it is read.

    It is if it takes little arithmetic on one large tensor that several kernels read anyway; where
    arithmetic is nearly free, on any that is in memory, or on tensors that are all far smaller; on
    several where launches are what counts.
    So is what is one
    operation away from a tensor that others read too (the square of a gradient, for its norm and
    for a moment): reading either costs the same.
    """
    sizes, of_value = target.materialization, graph.type_of(value)
    large = _sources(graph, value, stored, sizes)
    if large is None or len(large) > sizes.most_sources:
        return False
    if not large:
        return target.rematerializes and of_value.nbytes >= sizes.spread_bytes
    if all(isinstance(graph.nodes[v.node].attributes, Leaf) or v in shared for v in large):
        return all(of_value.dtype.itemsize >= graph.type_of(v).dtype.itemsize for v in large)
    if len(large) > 1:
        return False
    (source,) = large
    of_source = graph.type_of(source)
    is_next = _sources(graph, value, stored, replace(sizes, most_operations=1)) is not None
    is_read = bool(readers[source] - {value.node})
    return is_next and is_read and of_source.nbytes <= of_value.nbytes


def _sources(
    graph: Graph,
    value: TensorValue,
    stored: Collection[TensorValue],
    sizes: Materialization,
) -> set[TensorValue] | None:
    """What recomputing a value reads, without what is small; None if it takes too much.

    What is read at several indices counts once for each.
    """
    size = graph.type_of(value).size
    start = (value, 0)
    pending, seen, large, count = [start], {start}, set[TensorValue](), 0
    while pending:
        current, index = pending.pop()
        node = graph.nodes[current.node]
        is_there = current != value and (current in stored or isinstance(node.attributes, Leaf))
        if is_there:
            if graph.type_of(current).size * sizes.small_share > size:
                large.add(current)
            continue
        is_part = sizes.makes_parts and node.op in _PARTS
        is_part = is_part or (sizes.reads_through_rows and _has_row_beside(graph, node))
        if node.op not in _OPERATIONS and node.op not in VIEWS and not is_part:
            return None
        count += _OPERATIONS.get(node.op, 0)
        if count > sizes.most_operations:
            return None
        indices = ((v, _behind(node, current.node, i, index)) for i, v in enumerate(node.operands))
        read = [at for at in indices if at not in seen]
        pending += read
        seen.update(read)
    return large


def _has_row_beside(graph: Graph, node: Node) -> bool:
    """Whether a node puts one row before or behind others, along the first axis."""
    if not isinstance(node.attributes, shaping.Concat) or node.attributes.axis != 0:
        return False
    counts = sorted(graph.type_of(v).shape[0] for v in node.operands)
    return len(counts) == 2 and counts[0] == 1


def _behind(node: Node, position: int, operand: int, index: int) -> int:
    """Where an operand is read when its node is read at some index.

    Indices are numbers here, the same for the same way through views and choices.
    """
    moves = node.op in VIEWS or node.op in _CHOICES
    return hash((index, position, operand)) if moves else index


def recomputed_operands(
    graph: Graph, stored: Collection[TensorValue], target: Target = CPU
) -> dict[int, TensorValue]:
    """Matmuls that recompute an operand while they copy it, by position.

    An activation is read in the forward pass, and much later by the matmul of a weight's
    gradient. If what it is made of stays in memory until then, it need not stay too; little of it
    stays, as a cache holds it.
    """
    homes = homes_of(graph, stored)
    found: dict[int, TensorValue] = {}
    for position, node in enumerate(graph.nodes):
        if node.op is not linear.CONTRACT:
            continue
        for operand in node.operands:
            value = _behind_views(graph, operand)
            others = homes.get(value, _NOBODY) - {position}
            if value not in stored or not others or max(others) > position:
                continue
            if is_root(graph, graph.nodes[value.node]):
                continue
            large = _sources(graph, value, stored, target.materialization)
            if large and all(max(homes[v]) >= position for v in large):
                found[position] = value
    total = sum(graph.type_of(v).nbytes for v in found.values())
    return found if total > target.materialization.waiting_bytes else {}


# Operations that recomputing an op counts as: memory is dear, an exponential not much dearer.
_OPERATIONS = dict.fromkeys(
    [e.NEG, e.ABS, e.ADD, e.SUB, e.MUL, e.MAX, e.MIN, e.CAST, e.WHERE, e.LT, e.LE, e.EQ], 1
)
_OPERATIONS |= dict.fromkeys([e.AND, e.OR, e.NOT], 1) | dict.fromkeys(
    [e.EXP, e.TANH, e.ERF, e.DIV], 6
)


# Ops whose results are dear enough to be materialized when their elements are read more than once.
COSTLY = frozenset(
    [e.EXP, e.LOG, e.SQRT, e.RSQRT, e.SIN, e.COS, e.TANH, e.ERF, e.POW, e.ATAN2, e.DIV, e.MOD]
)
# Elements at other indices: reading through them costs nothing.
VIEWS = frozenset(
    [
        CONSTANT,
        IOTA,
        e.STOP_GRADIENT,
        shaping.RESHAPE,
        shaping.PERMUTE,
        shaping.BROADCAST,
        shaping.SLICE,
        shaping.FLIP,
        linear.WINDOW,
    ]
)


# Elements of one operand or another, or none, by their index.
_CHOICES = frozenset([shaping.PAD, shaping.CONCAT, shaping.DYNAMIC_UPDATE, linear.UNWINDOW])

# Of these, what a kernel can make part by part.
_PARTS = frozenset([shaping.PAD, shaping.CONCAT])


_MATMULS = CONVOLUTIONS | {
    linear.CONTRACT,
    c.ATTENTION,
    c.ATTENTION_GRAD,
    c.LINEAR_CROSS_ENTROPY,
    c.LINEAR_CROSS_ENTROPY_GRAD,
}


def _decoded(graph: Graph, target: Target) -> dict[TensorValue, set[int]]:
    """Operands of matmuls that are decoded from far fewer bytes, and the nodes that decode them.

    Where matmuls copy operands, they decode them then: such a weight is nowhere in memory.
    """
    found: dict[TensorValue, set[int]] = {}
    operands = (v for node in graph.nodes if node.op is linear.CONTRACT for v in node.operands)
    for value in dict.fromkeys(_behind_views(graph, v) for v in operands):
        leaves, inside = _leaves_of(graph, value, target.materialization.most_operations)
        if leaves and is_decoded(graph, value, leaves, target.materialization):
            found[value] = inside
    return found


def is_decoded(
    graph: Graph, value: TensorValue, sources: Collection[TensorValue], sizes: Materialization
) -> bool:
    """Whether a value is made of leaves alone that have far fewer bytes than it."""
    nbytes = sum(graph.type_of(v).nbytes for v in sources)
    are_leaves = all(isinstance(graph.nodes[v.node].attributes, Leaf) for v in sources)
    return are_leaves and nbytes <= sizes.decoded_part * graph.type_of(value).nbytes


def _leaves_of(graph: Graph, value: TensorValue, most: int) -> tuple[set[TensorValue], set[int]]:
    """The leaves that a value is cheaply made of, and the nodes between; nothing if it is not."""
    pending, leaves, inside = [value], set[TensorValue](), set[int]()
    while pending:
        current = pending.pop()
        node = graph.nodes[current.node]
        if isinstance(node.attributes, Leaf):
            leaves.add(current)
            continue
        is_cheap = node.op in VIEWS or (node.op in ELEMENTWISE and node.op not in COSTLY)
        inside.add(current.node)
        if not is_cheap or sum(graph.nodes[n].op not in VIEWS for n in inside) > most:
            return set(), set()
        pending += [v for v in node.operands if v.node not in inside]
    return leaves, inside


def _read_often(
    graph: Graph, target: Target, decoded: Collection[TensorValue] = ()
) -> set[TensorValue]:
    """Values whose elements a consumer reads often, and that are not mere views.

    A matmul reads each element of an operand once for every row or column of the other, but for
    one that it decodes. That of a token or two hardly reads its weights, and computes them (from
    fewer bytes) as it sums.
    """
    found: set[TensorValue] = set()
    costly: list[bool] = []  # whether computing an element anew, operands inlined, is dear
    for node in graph.nodes:
        costly.append(node.op in COSTLY or any(_costs(graph, costly, v) for v in node.operands))
        for operand in node.operands:
            if node.op is SCAN:
                found.add(operand)
            elif node.op in _MATMULS:
                computed = _computed(graph, operand)
                if node.op is linear.CONTRACT:
                    computed -= set(decoded)
                found |= {
                    v for v in computed if not _is_read_through(graph, node, v, costly, target)
                }
            elif node.op in (shaping.BROADCAST, linear.WINDOW):
                source = graph.nodes[operand.node].op
                # Guards are dear where windows overlap.
                has_guards = node.op is linear.WINDOW and source in (shaping.PAD, shaping.CONCAT)
                if has_guards or _costs(graph, costly, operand):
                    found.add(operand)
    return found


def _is_read_through(
    graph: Graph, node: Node, value: TensorValue, costly: Sequence[bool], target: Target
) -> bool:
    """Whether a matmul computes an operand itself, as cheaply as it would load it.

    It does if it reads it hardly more than once, or copies what only is wider than in memory.
    """
    if node.op is not linear.CONTRACT:
        return False
    if target.copies_operands and _widens(graph, graph.nodes[value.node]):
        return True
    reads = contraction_of(graph, node).flops // 2
    is_few = reads <= target.matmuls.summed_rows * graph.type_of(value).size
    return is_few and not costly[value.node]


def _cheap_scalars(graph: Graph) -> set[int]:
    """Single numbers that cost less to recompute than to wait for: 1 − β, rate · decay.

    So is one element of a tensor in another dtype.
    """
    found: set[int] = set()
    for position, node in enumerate(graph.nodes):
        is_cheap = node.op in INLINE and node.op not in COSTLY and node.types[0].size == 1
        operands = [v.node for v in node.operands if v.node not in found]
        is_element = node.op is e.CAST and graph.nodes[node.operands[0].node].op in VIEWS
        if is_cheap and (
            is_element
            or all(isinstance(graph.nodes[n].attributes, (Leaf, Constant)) for n in operands)
        ):
            found.add(position)
    return found


def _computed(graph: Graph, value: TensorValue) -> set[TensorValue]:
    """What is computed behind views of a value, which is materialized and read through them."""
    value = _behind_views(graph, value)
    node = graph.nodes[value.node]
    is_there = isinstance(node.attributes, Leaf) or is_root(graph, node) or node.op in VIEWS
    return set() if is_there else {value}


def _behind_views(graph: Graph, value: TensorValue) -> TensorValue:
    while graph.nodes[value.node].op in VIEWS and graph.nodes[value.node].operands:
        value = graph.nodes[value.node].operands[0]
    return value


def _too_deep(
    graph: Graph, stored: Mapping[TensorValue, None], sizes: Materialization
) -> set[TensorValue]:
    """Values that cut long chains of inlined ops into pieces."""
    found: set[TensorValue] = set()
    depths: list[int] = []
    for position, node in enumerate(graph.nodes):
        own = sizes.choice_depth if node.op in _CHOICES else 1
        depth = own + max((depths[v.node] for v in node.operands), default=0)
        is_materialized = TensorValue(position) in stored or isinstance(node.attributes, Leaf)
        if depth >= sizes.most_depth and not is_materialized:
            found.update(TensorValue(position, i) for i in range(len(node.types)))
            is_materialized = True
        depths.append(0 if is_materialized else depth)
    return found


def _too_wide(graph: Graph, stored: Collection[TensorValue], most: int) -> set[TensorValue]:
    """Values that stop expressions from computing one tensor at ever more indices."""
    found: set[TensorValue] = set()
    nothing: frozenset[tuple[int, int]] = frozenset()
    computed: list[frozenset[tuple[int, int]]] = []  # by node: what is computed, and where
    for position, node in enumerate(graph.nodes):
        is_there = TensorValue(position) in stored or isinstance(node.attributes, Leaf)
        if is_there or not node.operands:
            computed.append(nothing)
            continue
        own = nothing if node.op in VIEWS else frozenset({(position, 0)})
        moves = node.op in VIEWS or node.op in _CHOICES
        for i, v in enumerate(node.operands):
            inner = computed[v.node]
            own |= {(n, _behind(node, position, i, x)) for n, x in inner} if moves else inner
        if len(own) > most and len(own) - len({n for n, _ in own}) > most:
            found.update(TensorValue(position, i) for i in range(len(node.types)))
            own = nothing
        computed.append(own)
    return found


def _costs(graph: Graph, costly: Sequence[bool], value: TensorValue) -> bool:
    node = graph.nodes[value.node]
    return costly[value.node] and not is_root(graph, node) and not isinstance(node.attributes, Leaf)


def is_inline(node: Node) -> bool:
    return node.op in INLINE and array_of(node) is None


def array_of(node: Node) -> np.ndarray | None:
    """The array that a constant is; None for numbers and all else."""
    value = node.attributes.value if isinstance(node.attributes, Constant) else None
    return value.array if isinstance(value, ArrayLiteral) else None
