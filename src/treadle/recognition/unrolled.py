"""Chains of equal steps: a recurrence that was unrolled by hand becomes a `scan`.

Steps are told apart by what they read: slices of one element along an axis, t = 0, 1, …. A node
belongs to the last step that it depends on. Steps are equal when each node of one is a node of the
next, over operands that are the same, correspond, or are those of the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.ir.graph import Graph, Node, Value
from treadle.ir.op import Attributes, Op
from treadle.ir.ops.elementwise import ADD, MUL, SUB
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.ops.shaping import RESHAPE, SLICE, Slice
from treadle.recognition.regions import Flow

LEAST_STEPS = 6  # that are worth a scan: chosen; the first and the last may be unlike the others
MODEL = 3  # the step that others are compared with: what comes before may be unlike

_AFFINE = frozenset([CONTRACT, ADD, SUB, MUL])
Code = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Reads:
    """What steps read: a value along an axis, by step."""

    source: Value
    axis: int
    values: tuple[Value, ...]  # without the axis, where every step drops it


@dataclass(slots=True)
class Chain:
    """Equal steps. `nodes[t]` are those of step t, in the order of the model's."""

    reads: tuple[Reads, ...]
    is_reversed: bool
    start: int  # steps before that are unlike the others
    nodes: list[tuple[int, ...]]
    model: tuple[int, ...]  # the nodes of the step that others were compared with
    carries: tuple[Value, ...]  # values of the step before that the model reads
    carried: tuple[int, ...]  # which of its own nodes are the next ones
    first: tuple[Value, ...]  # what the carries are in the beginning
    outside: tuple[Value, ...]  # what every step reads
    shared: frozenset[int]  # nodes of the first step that read nothing of it, and may stay

    @property
    def length(self) -> int:
        return len(self.nodes)


def chains(flow: Flow) -> Iterator[Chain]:
    """Recurrences of a graph; those that share what they read come as one."""
    for group in _groups(flow.graph):
        for is_reversed in (False, True):
            found = _Steps(flow, group, is_reversed).chain()
            if found is not None:
                yield found


def _groups(graph: Graph) -> list[tuple[Reads, ...]]:
    """Reads of as many steps, together."""
    by_source: dict[tuple[Value, int], dict[int, int]] = {}
    for position, node in enumerate(graph.nodes):
        at = _single(graph, node)
        if at is not None:
            axis, index = at
            by_source.setdefault((node.operands[0], axis), {})[index] = position
    reads = []
    for (source, axis), found in by_source.items():
        length = graph.type_of(source).shape[axis]
        if len(found) == length >= LEAST_STEPS:  # every index, once each
            positions = [found[t] for t in range(length)]
            reads.append(Reads(source, axis, _dropped(graph, positions)))
    return _together(graph, reads)


def _together(graph: Graph, reads: list[Reads]) -> list[tuple[Reads, ...]]:
    """Reads by their number of steps; what is made of others is read after them."""
    groups: list[list[Reads]] = []
    for r in sorted(reads, key=lambda r: r.source):
        for group in groups:
            is_long = len(group[0].values) == len(r.values)
            if is_long and not _depends(graph, r.source, group):
                group.append(r)
                break
        else:
            groups.append([r])
    return [tuple(g) for g in groups]


def _depends(graph: Graph, value: Value, reads: Sequence[Reads]) -> bool:
    """Whether a value is made of what is read."""
    wanted = {v.node for r in reads for v in r.values}
    stack, seen = [value.node], set[int]()
    while stack:
        position = stack.pop()
        if position in wanted:
            return True
        if position not in seen:
            seen.add(position)
            stack.extend(v.node for v in graph.nodes[position].operands)
    return False


def _single(graph: Graph, node: Node) -> tuple[int, int] | None:
    """The axis and the index of a slice of one element of a longer axis."""
    if node.op is not SLICE or not isinstance(node.attributes, Slice):
        return None
    shape, attributes = graph.type_of(node.operands[0]).shape, node.attributes
    bounds = zip(shape, attributes.starts, attributes.stops, strict=True)
    cut = [(i, start) for i, (n, start, stop) in enumerate(bounds) if stop - start != n]
    if len(cut) != 1:
        return None
    axis, index = cut[0]
    return (axis, index) if attributes.stops[axis] - index == 1 else None


def _dropped(graph: Graph, positions: Sequence[int]) -> tuple[Value, ...]:
    """Slices, or what they are without their axis of one element, where all are read so."""
    users: dict[int, list[int]] = {p: [] for p in positions}
    for i, node in enumerate(graph.nodes):
        for v in node.operands:
            if v.node in users:
                users[v.node].append(i)
    for o in graph.outputs:
        users.pop(o.value.node, None)
    views = [users.get(p, []) for p in positions]
    is_dropped = all(len(v) == 1 and graph.nodes[v[0]].op is RESHAPE for v in views)
    if is_dropped and len({graph.nodes[v[0]].types for v in views}) == 1:
        return tuple(Value(v[0]) for v in views)
    return tuple(Value(p) for p in positions)


class _Steps:
    """The nodes of a graph by the step that they belong to."""

    def __init__(self, flow: Flow, reads: tuple[Reads, ...], is_reversed: bool):
        self.flow, self.graph, self.reads, self.is_reversed = flow, flow.graph, reads, is_reversed
        self.length = len(reads[0].values)
        self.read: dict[Value, tuple[int, int]] = {}  # which read, of which step
        for i, r in enumerate(reads):
            values = r.values[::-1] if is_reversed else r.values
            self.read |= {v: (i, t) for t, v in enumerate(values)}
        self.step = self._steps()
        self.by_step: list[list[int]] = [[] for _ in range(self.length)]
        for position, t in enumerate(self.step):
            if t >= 0 and Value(position) not in self.read:
                self.by_step[t].append(position)
        self._codes: dict[Code, int] = {}
        self._alike: dict[tuple[Op, Attributes], list[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            if self.step[position] < MODEL:
                self._alike.setdefault((node.op, node.attributes), []).append(position)

    def _steps(self) -> list[int]:
        found: list[int] = []
        for position, node in enumerate(self.graph.nodes):
            own = self.read.get(Value(position))
            found.append(own[1] if own else max((found[v.node] for v in node.operands), default=-1))
        kept = {o.value.node for o in self.graph.outputs}
        for position in reversed(range(len(found))):
            users = [found[i] for i in self.flow.users[position]]
            is_next = found[position] >= 0 and users and min(users) > found[position]
            if is_next and position not in kept and self._grows(position, found):
                found[position] += 1
        return found

    def _grows(self, position: int, steps: list[int]) -> bool:
        """Whether less is carried when the next step computes a node that only it reads."""
        node = self.graph.nodes[position]
        if Value(position) in self.read:
            return False
        own = {v for v in node.operands if steps[v.node] == steps[position]}
        taken = any(v in self.read for v in own)
        before, after = sum(self.graph.type_of(v).nbytes for v in own), node.types[0].nbytes
        others = [v for v in node.operands if v not in own]
        is_affine = node.op in _AFFINE and all(steps[v.node] < 0 for v in others)
        return not taken and (before < after or (before == after and is_affine))

    def chain(self) -> Chain | None:
        counts = {len(nodes) for nodes in self.by_step[MODEL:-1]}
        if len(counts) != 1 or 0 in counts or self.length < LEAST_STEPS:
            return None
        labels = self._labels()
        model = self.by_step[MODEL]
        names = [labels[p] for p in model]
        if len(set(names)) != len(names):
            return None
        later = list[tuple[int, ...] | None]()
        for t in range(MODEL, self.length):
            known = {labels[p]: p for p in self.by_step[t]}
            later.append(tuple(known[x] for x in names) if set(names) <= set(known) else None)
        carried = self._carried(model, labels)
        if carried is None or None in later[:-1]:
            return None  # the last step may lack what only a next one would read
        return self._matched(model, [n for n in later if n is not None], carried)

    def _labels(self) -> list[int]:
        """Equal numbers for nodes of different steps that are made alike, whatever is carried."""
        labels = [0] * len(self.graph.nodes)
        for t, nodes in enumerate(self.by_step):
            for position in nodes:
                node = self.graph.nodes[position]
                codes = tuple(self._code(v, t, labels) for v in node.operands)
                code = node.op, node.attributes, codes
                labels[position] = self._codes.setdefault(code, len(self._codes) + 1)
        return labels

    def _code(self, value: Value, t: int, labels: list[int]) -> Code:
        own, step = self.read.get(value), self.step[value.node]
        if own is not None:
            return "read", own[0], t - own[1]
        if step < 0:
            return "outside", value
        if step == t:
            return "step", labels[value.node], value.output
        return "carry", value.output, t - step

    def _carried(self, model: list[int], labels: list[int]) -> dict[Value, int] | None:
        """Values of the step before that the model reads, and which of its own nodes follow."""
        by_label = {labels[p]: i for i, p in enumerate(model)}
        found: dict[Value, int] = {}
        for position in model:
            for v in self.graph.nodes[position].operands:
                step = self.step[v.node]
                if v in self.read and self.read[v][1] != MODEL:
                    return None
                if v in self.read or step in (-1, MODEL):
                    continue
                if step != MODEL - 1 or labels[v.node] not in by_label:
                    return None
                found[v] = by_label[labels[v.node]]
        return found or None

    def _matched(
        self, model: list[int], later: list[tuple[int, ...]], carried: dict[Value, int]
    ) -> Chain | None:
        """The chain, where each step is the model over what corresponds.

        The first steps may be unlike the others, and are left as they are then.
        """
        steps, begin, start = list(later), dict[Value, Value | None](), MODEL
        while start > 0:
            nodes, bound = self._bound(model, dict.fromkeys(carried), start - 1)
            if nodes is None or None in bound.values():
                break
            steps, begin, start = [nodes, *steps], bound, start - 1
        if start == MODEL:
            return None
        for i in range(1, len(steps)):
            if not self._follows(model, carried, steps[i - 1], steps[i], start + i):
                return None
        carries = tuple(carried)
        return Chain(
            self.reads,
            self.is_reversed,
            start,
            steps,
            tuple(model),
            carries,
            tuple(carried[v] for v in carries),
            tuple(v for c in carries if (v := begin[c]) is not None),
            self._outside(model),
            frozenset(p for p in steps[0] if self.step[p] < 0),
        )

    def _bound(
        self, model: list[int], start: dict[Value, None], t: int
    ) -> tuple[tuple[int, ...] | None, dict[Value, Value | None]]:
        """Nodes that are the model's of step t, and what stands in the place of carries."""
        bound: dict[Value, Value | None] = dict(start)
        moved: dict[int, int] = {}
        for position in model:
            node = self.graph.nodes[position]
            match = self._match(node, moved, bound, t)
            if match is None:
                return None, bound
            moved[position] = match
            for v, other in zip(node.operands, self.graph.nodes[match].operands, strict=True):
                if v in bound:
                    bound[v] = other
        return tuple(moved.values()), bound

    def _match(
        self, node: Node, moved: dict[int, int], bound: dict[Value, Value | None], t: int
    ) -> int | None:
        wanted = tuple(self._wanted(v, moved, bound, t) for v in node.operands)
        for other in self._alike.get((node.op, node.attributes), ()):
            operands = self.graph.nodes[other].operands
            is_at = self.step[other] == t or (t == 0 and self.step[other] < 0)
            pairs = list(zip(wanted, operands, strict=True))
            is_same = is_at and all(w is None or w == v for w, v in pairs)
            if is_same and all(self.step[v.node] < t for w, v in pairs if w is None):
                return other
        return None

    def _wanted(
        self, value: Value, moved: dict[int, int], bound: dict[Value, Value | None], t: int
    ) -> Value | None:
        if value in bound:
            return bound[value]
        own = self.read.get(value)
        if own is not None:
            values = self.reads[own[0]].values
            return values[self.length - 1 - t] if self.is_reversed else values[t]
        return Value(moved[value.node], value.output) if value.node in moved else value

    def _follows(
        self,
        model: list[int],
        carried: dict[Value, int],
        before: tuple[int, ...],
        nodes: tuple[int, ...],
        t: int,
    ) -> bool:
        """Whether nodes are the model's over the step before and what step t reads."""
        own = {p: i for i, p in enumerate(model)}
        for position, other in zip(model, nodes, strict=True):
            node, match = self.graph.nodes[position], self.graph.nodes[other]
            if (node.op, node.attributes) != (match.op, match.attributes):
                return False
            for v, w in zip(node.operands, match.operands, strict=True):
                if v in carried:
                    wanted: Value | None = Value(before[carried[v]], v.output)
                elif v.node in own:
                    wanted = Value(nodes[own[v.node]], v.output)
                else:
                    wanted = self._wanted(v, {}, {}, t)
                if w != wanted:
                    return False
        return True

    def _outside(self, model: list[int]) -> tuple[Value, ...]:
        operands = (v for p in model for v in self.graph.nodes[p].operands)
        found = (v for v in operands if self.step[v.node] < 0 and not self.flow.closed[v.node])
        return tuple(dict.fromkeys(found))
