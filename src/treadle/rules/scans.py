"""What a scan need not compute one iteration at a time is computed for all of them at once.

Only what leads from a carry to the next one has to be in order. Matmuls and reductions of slices
alone move before the scan; results that no carry needs move behind it, where what they are made of
is stacked anyway. The stack of a carry's next values is its own, moved on by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, OutputKind, Value
from treadle.ir.leading import LEADING, contraction_along
from treadle.ir.ops import reductions
from treadle.ir.ops.leaves import INPUT, Leaf
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.ops.shaping import (
    BROADCAST,
    CONCAT,
    RESHAPE,
    SLICE,
    Broadcast,
    Concat,
    Reshape,
    Slice,
)
from treadle.ir.rewrite import cut, remove_dead_code
from treadle.kernel.target import CPU, Target
from treadle.rules.driver import Keeps, rewrite
from treadle.rules.expansion import expand
from treadle.rules.pattern import apply
from treadle.rules.rule import Body, Exactness, Match, Rule, RuleSet

_SUMS = frozenset(
    [
        CONTRACT,
        reductions.REDUCE_SUM,
        reductions.REDUCE_MAX,
        reductions.REDUCE_MIN,
        reductions.REDUCE_PROD,
    ]
)


class Iteration:
    """The body of a scan: what its inputs are, and which nodes are on the way between carries."""

    def __init__(self, scan: Scan):
        self.scan, self.body = scan, scan.body
        self.inputs = [Value(i) for i in scan.body.inputs]
        split = scan.constants + scan.carries
        self.carries = self.inputs[scan.constants : split]
        self.slices = self.inputs[split:]
        self.next = [o.value for o in scan.body.outputs[: scan.carries]]
        self.stacked = [o.value for o in scan.body.outputs[scan.carries :]]
        self.from_carries = self._reached(v.node for v in self.carries)
        self.from_slices = self._reached(v.node for v in self.slices)
        self.to_carries = self.needed(self.next)

    def _reached(self, sources: Iterable[int]) -> set[int]:
        """Nodes that depend on some, themselves included."""
        found = set(sources)
        for i, node in enumerate(self.body.nodes):
            if any(v.node in found for v in node.operands):
                found.add(i)
        return found

    def needed(self, values: Iterable[Value]) -> set[int]:
        """Nodes that some values depend on, their own included."""
        found = {v.node for v in values}
        for i in range(len(self.body.nodes) - 1, -1, -1):
            if i in found:
                found.update(v.node for v in self.body.nodes[i].operands)
        return found

    def is_in_order(self, value: Value) -> bool:
        """Whether a value is a carry, or on the way from one to the next."""
        return value.node in self.from_carries and (
            value.node in self.to_carries or value in self.carries
        )

    def nbytes(self, values: Iterable[Value]) -> int:
        return sum(self.body.type_of(v).nbytes for v in values)

    def sources(self, value: Value) -> set[Value] | None:
        """What a value is computed from outside of the order; None if some op has to stay."""
        pending, found, seen = [value], set[Value](), {value}
        while pending:
            at = pending.pop()
            node = self.body.nodes[at.node]
            if isinstance(node.attributes, Leaf) or (at != value and self.is_in_order(at)):
                found.add(at)
            elif node.op is CONTRACT or node.op in LEADING or not node.operands:
                pending += [v for v in node.operands if v not in seen]
                seen.update(node.operands)
            else:
                return None
        return found

    def sums_to(self, value: Value, sources: Collection[Value]) -> list[Value]:
        """Sums on the way from the sources to a value: all iterations' are in memory at once."""
        pending, seen = [value], {value, *sources}
        found: list[Value] = []
        while pending:
            at = pending.pop()
            node = self.body.nodes[at.node]
            found += [at] if node.op in _SUMS else []
            pending += [v for v in node.operands if v not in seen]
            seen.update(node.operands)
        return found

    def is_affordable(self, made: Sequence[Value], read: Sequence[Value], limit: int) -> bool:
        """Whether stacks of what is made are not much larger than those of what is read."""
        return self.nbytes(made) <= limit * self.nbytes(read)


def iteration_of(match: Match) -> Iteration:
    assert isinstance(match.root.attributes, Scan)
    return Iteration(match.root.attributes)


# Behind the scan


def _behind(at: Iteration, target: Target) -> tuple[list[int], list[Value]]:
    """Results that are computed behind the scan, by position among the stacked, and new stacks."""
    moved: list[int] = []
    extra: list[Value] = []
    shifts = _shifts(at) if target.has_launches and at.scan.length > 1 else set[Value]()
    for k, value in enumerate(at.stacked):
        if value in at.stacked[:k]:  # it is stacked already
            moved.append(k)
            continue
        sources = None if at.is_in_order(value) else at.sources(value)
        if sources is None:
            continue
        sums = at.sums_to(value, sources)
        limit, constants = target.rewriting.most_stacked, at.inputs[: at.scan.constants]
        read = [value, *(v for v in sources if v not in constants)]
        if (sums and value.node in at.to_carries) or not at.is_affordable(sums, read, limit):
            continue
        there = {*at.inputs} - {*at.carries} | {*at.stacked} | {*extra}
        new = [v for v in sorted(sources) if v not in there]
        room = at.nbytes([value]) if sums else 0
        if at.nbytes(v for v in new if v not in shifts) <= room:
            moved.append(k)
            extra += new
    return moved, extra


def _shifts(at: Iteration) -> set[Value]:
    """Carries and their next values of which the other is stacked: one stack serves for both."""
    pairs = [*zip(at.carries, at.next, strict=True), *zip(at.next, at.carries, strict=True)]
    return {one for one, other in pairs if other in at.stacked}


def is_split_behind(match: Match) -> bool:
    """a result is stacked twice, or leads to no carry and takes what is stacked or no larger"""
    at = iteration_of(match)
    return not at.scan.recompute and bool(_behind(at, match.target)[0])


def _computed_behind(match: Match, builder: GraphBuilder) -> Body:
    at = iteration_of(match)
    moved, extra = _behind(at, match.target)
    kept = [v for k, v in enumerate(at.stacked) if k not in moved]
    kept = list(dict.fromkeys([*kept, *extra]))  # in order, each once
    around = Around(at)
    stacks = around.scan([*at.next, *kept], {})
    known = dict(zip(kept, stacks[len(at.next) :], strict=True))
    behind = AllAtOnce(around, at, known)
    results = [known[v] if v in known else behind.stack(v) for v in at.stacked]
    return around.body([*stacks[: len(at.next)], *results], match)


BEHIND_SCAN = Rule(
    "computed_behind_scan",
    "What no carry of a scan needs is computed for all iterations at once, behind it.",
    apply(SCAN),
    _computed_behind,
    is_split_behind,
    Exactness.ROUNDING,
)


# Before it


def _before(at: Iteration, target: Target) -> list[Value]:
    """Sums of slices alone that carries need: none leads to another."""
    found: list[Value] = []
    for i in range(len(at.body.nodes) - 1, -1, -1):
        value, node = Value(i), at.body.nodes[i]
        is_early = i in at.from_slices and i not in at.from_carries
        is_first = not any(i in at.needed([v]) for v in found)
        if not is_early or i not in at.to_carries or node.op not in _SUMS or not is_first:
            continue
        sources = at.sources(value) or set()
        read, sums = [v for v in at.slices if v in sources], at.sums_to(value, sources)
        if read and at.is_affordable(sums, read, target.rewriting.most_stacked):
            found.append(value)
    return found


def is_split_before(match: Match) -> bool:
    """a matmul or a reduction reads no carry, and its stack is not much larger than the slices'"""
    at = iteration_of(match)
    return not at.scan.recompute and bool(_before(at, match.target))


def _computed_before(match: Match, builder: GraphBuilder) -> Body:
    at = iteration_of(match)
    around = Around(at)
    before = AllAtOnce(around, at, {})
    stacks = {v: before.stack(v) for v in _before(at, match.target)}
    return around.body(around.scan([*at.next, *at.stacked], stacks), match)


BEFORE_SCAN = Rule(
    "computed_before_scan",
    "Sums of slices that read no carry are computed for all iterations at once, before the scan.",
    apply(SCAN),
    _computed_before,
    is_split_before,
    Exactness.ROUNDING,
)


# Moved on by one


def _moved_on(at: Iteration) -> dict[int, int]:
    """Stacks of next values, by position, and the carries that are stacked beside them."""
    found: dict[int, int] = {}
    for k, (carry, next_) in enumerate(zip(at.carries, at.next, strict=True)):
        if carry in at.stacked and next_ in at.stacked and next_ not in at.carries:
            found |= {i: k for i, v in enumerate(at.stacked) if v == next_}
    return found


def is_moved_on(match: Match) -> bool:
    """a carry and its next value are stacked, and the target's memory is far"""
    at = iteration_of(match)
    return match.target.has_launches and at.scan.length > 1 and bool(_moved_on(at))


def _next_moved_on(match: Match, builder: GraphBuilder) -> Body:
    at = iteration_of(match)
    moved, around, count = _moved_on(at), Around(at), len(at.next)
    kept = [v for i, v in enumerate(at.stacked) if i not in moved]
    values = around.scan([*at.next, *kept], {})
    last, known = values[:count], dict(zip(kept, values[count:], strict=True))
    results = [
        around.moved_on(known[at.carries[moved[i]]], last[moved[i]]) if i in moved else known[v]
        for i, v in enumerate(at.stacked)
    ]
    return around.body([*last, *results], match)


MOVED_ON = Rule(
    "stacked_carry",
    "The stack of a carry's next values is its own from the second on, and then the last one.",
    apply(SCAN),
    _next_moved_on,
    is_moved_on,
)


# What is built


class Around:
    """A graph in the place of a scan: its inputs are the scan's operands."""

    def __init__(self, at: Iteration):
        self.at, self.builder = at, GraphBuilder()
        scan, sliced = at.scan, {*at.slices}
        self.given: dict[Value, Value] = {}  # operands by the body's inputs
        for i, value in enumerate(at.inputs):
            type_ = scan.body.type_of(value)
            if value in sliced:
                type_ = type_.with_shape((scan.length, *type_.shape))
            (self.given[value],) = self.builder.add(INPUT, Leaf(f"given{i}", type_), ())

    def scan(self, outputs: Sequence[Value], stacks: Mapping[Value, Value]) -> tuple[Value, ...]:
        """A scan that gives some values of the body, of which it is told some as slices."""
        at, given = self.at, self.given
        used = at.needed(outputs) if not stacks else self._used(outputs, stacks)
        constants = [v for v in at.inputs[: at.scan.constants] if v.node in used]
        slices = [v for v in at.slices if v.node in used]
        inputs = [*constants, *at.carries, *slices, *stacks]
        named = [(f"in{i}", v) for i, v in enumerate(inputs)]
        results = [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(outputs)]
        body = cut(at.body, named, results, at.body.name)
        operands = [given[v] for v in (*constants, *at.carries, *slices)]
        attributes = replace(at.scan, body=body, constants=len(constants))
        return self.builder.add(SCAN, attributes, [*operands, *stacks.values()])

    def _used(self, outputs: Sequence[Value], stacks: Mapping[Value, Value]) -> set[int]:
        """Nodes that are needed where some values are given."""
        pending, found = list(outputs), set[int]()
        while pending:
            value = pending.pop()
            if value not in stacks and value.node not in found:
                found.add(value.node)
                pending += self.at.body.nodes[value.node].operands
        return found

    def moved_on(self, stack: Value, last: Value) -> Value:
        """What a carry becomes in each iteration, from the stack of what it was before."""
        return self._moved(stack, last, not self.at.scan.reverse)

    def moved_back(self, stack: Value, first: Value) -> Value:
        """What a carry was in each iteration, from the stack of what it became."""
        return self._moved(stack, first, self.at.scan.reverse)

    def _moved(self, stack: Value, row: Value, is_behind: bool) -> Value:
        """All rows of a stack but the first, and one behind; or but the last, and one before."""
        length, shape = self.at.scan.length, self.builder.type_of(row).shape
        (row,) = self.builder.add(RESHAPE, Reshape((1, *shape)), (row,))
        start = int(is_behind)
        starts, stops = (start, *(0 for _ in shape)), (length - 1 + start, *shape)
        attributes = Slice(starts, stops, (1, *(1 for _ in shape)))
        (rest,) = self.builder.add(SLICE, attributes, (stack,))
        parts = (rest, row) if is_behind else (row, rest)
        return self.builder.add(CONCAT, Concat(0), parts)[0]

    def body(self, results: Sequence[Value], match: Match) -> Body:
        outputs = [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(results)]
        graph = self.builder.build(outputs, self.at.body.name)
        return Body(remove_dead_code(graph), match.root.operands)


class AllAtOnce:
    """Values of the body for all iterations, from operands of the scan and from stacks."""

    def __init__(self, around: Around, at: Iteration, stacks: Mapping[Value, Value]):
        self.builder, self.at = around.builder, at
        carries, slices = {*at.carries}, {*at.slices}
        self.known = {v: (x, v in slices) for v, x in around.given.items() if v not in carries}
        self.known |= {v: (x, True) for v, x in stacks.items()}

    def stack(self, value: Value) -> Value:
        found, has_axis = self._at(value)
        return found if has_axis else self._repeated(found)

    def _at(self, value: Value) -> tuple[Value, bool]:
        """A value, and whether it has the axis of the iterations."""
        for i in sorted(self._missing(value)):
            node = self.at.body.nodes[i]
            for k, made in enumerate(self._made(node, [self.known[v] for v in node.operands])):
                self.known.setdefault(Value(i, k), made)
        return self.known[value]

    def _missing(self, value: Value) -> set[int]:
        pending, found = [value], set[int]()
        while pending:
            at = pending.pop()
            if at not in self.known and at.node not in found:
                found.add(at.node)
                pending += self.at.body.nodes[at.node].operands
        return found

    def _made(self, node: Node, operands: Sequence[tuple[Value, bool]]) -> list[tuple[Value, bool]]:
        values, flags = [v for v, _ in operands], [has_axis for _, has_axis in operands]
        attributes, size = node.attributes, self.at.scan.length
        if any(flags):
            if isinstance(attributes, Contraction):
                attributes = contraction_along(attributes, flags)
            else:
                attributes = LEADING[node.op](attributes, size)
                values = [v if f else self._repeated(v) for v, f in operands]
        made = self.builder.add(node.op, attributes, values, node.origin)
        return [(v, any(flags)) for v in made]

    def _repeated(self, value: Value) -> Value:
        shape = (self.at.scan.length, *self.builder.type_of(value).shape)
        attributes = Broadcast(shape, tuple(range(1, len(shape))))
        return self.builder.add(BROADCAST, attributes, (value,))[0]


SCANS = RuleSet("scans", (BEHIND_SCAN, BEFORE_SCAN, MOVED_ON))


def split_scans(graph: Graph, target: Target = CPU, keeps: Keeps | None = None) -> Graph:
    """The graph with scans of what has to be in order; their bodies are in primitives."""
    if not any(n.op is SCAN for n in graph.nodes):
        return graph
    return rewrite(_with_expanded_bodies(graph, target, keeps), SCANS, target)


def _with_expanded_bodies(graph: Graph, target: Target, keeps: Keeps | None) -> Graph:
    nodes = tuple(
        replace(n, attributes=replace(n.attributes, body=expand(n.attributes.body, target, keeps)))
        if isinstance(n.attributes, Scan)
        else n
        for n in graph.nodes
    )
    return Graph(nodes, graph.outputs, graph.name)
