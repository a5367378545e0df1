"""What the backward pass computes anew rather than that the forward pass keeps it in memory.

A training step takes most memory between its two passes: what was computed waits there for the
gradients. Much of it is little arithmetic on other tensors that wait anyway: an activation beside
what it was computed from, a normalised tensor beside its input, masks, wider copies. Such a tensor
is not kept. Its nodes are there a second time, behind the peak, for whoever reads it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from treadle.base import dtypes
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import linear
from treadle.ir.ops.leaves import Constant, Leaf
from treadle.kernel.target import Target
from treadle.schedule.compared import compared_values
from treadle.schedule.homes import homes_of
from treadle.schedule.inline import ELEMENTWISE
from treadle.schedule.keep import (
    COSTLY,
    VIEWS,
    Materialized,
    is_decoded,
    is_inline,
    is_root,
)
from treadle.schedule.patterns import matmul_epilogues
from treadle.schedule.templates import CONVOLUTIONS

Values = set[TensorValue]


class Told(NamedTuple):
    """An operand of a comparison, and what compares as it does."""

    of: TensorValue
    by: TensorValue


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A graph with nodes that are there a second time, and the node that each of those waits for.

    Nothing that such a node reads tells that it belongs to the backward pass. That holds for what
    `td.checkpoint` computes again, too.
    """

    graph: Graph
    waits: Mapping[int, int]


def recomputed(graph: Graph, target: Target) -> Recomputed:
    """The graph with what is better computed again, if that is worth anything."""
    sizes, peak = target.materialization, _Peak(graph, target)
    found = _without(peak)
    if not (target.matmuls.by_library and any(map(peak.is_operand, peak.dropped))):
        return found
    # Operands that are written once more for a library: they are kept if that takes little memory.
    keeping = replace(target, materialization=replace(sizes, kept_operand=sizes.least_kept))
    kept = _without(_Peak(graph, keeping))
    least = _Peak(found.graph, target).nbytes
    is_little = _Peak(kept.graph, target).nbytes <= least + least // sizes.kept_part
    return kept if is_little else found


def _without(peak: _Peak) -> Recomputed:
    """The graph of which what need not wait at a peak is computed again."""
    graph = peak.graph
    peak.drop()
    if sum(graph.type_of(v).nbytes for v in peak.dropped) <= peak.sizes.waiting_bytes:
        peak.dropped.clear()
    found = _Copying(peak).graph()
    return found if found.waits else Recomputed(graph, {})


class _Peak:
    """Which tensors wait at the peak, in the order of the graph, and which of them need not."""

    def __init__(self, graph: Graph, target: Target):
        self.graph, self.sizes = graph, target.materialization
        self.stored = Materialized(graph, True, target).values()
        epilogues = matmul_epilogues(graph, self.stored, target.matmuls)
        self.made = {
            found.sum for found in epilogues.values()
        }  # by a library, from what is not in memory
        self.made |= {o.value for o in graph.outputs} | compared_values(graph)
        self.readers = readers = homes_of(graph, self.stored)
        last = {v: max(readers.get(v, {v.node})) for v in self.stored if v not in epilogues}
        change = np.zeros(len(graph.nodes) + 1, np.int64)
        for v, position in last.items():
            change[v.node] += graph.type_of(v).nbytes
            change[position] -= graph.type_of(v).nbytes
        waiting = change.cumsum()
        self.position = int(waiting.argmax())
        self.nbytes = int(waiting[self.position])
        self.waiting = {v for v, position in last.items() if v.node <= self.position < position}
        self.dropped: Values = set()
        self.inside: set[int] = set()  # nodes that are computed on the way to those
        self.told: dict[int, Told] = {}  # comparisons that look at another value
        self.users: dict[TensorValue, list[int]] = {}
        for position, node in enumerate(graph.nodes[: self.position + 1]):
            for v in node.operands if node.op in (e.WHERE, e.CAST) else ():
                self.users.setdefault(v, []).append(position)

    def drop(self) -> None:
        """Drop what need not wait, the first ones first: later ones may be made of them."""
        for value in sorted(self.waiting):
            is_small = self.graph.type_of(value).nbytes < self.sizes.least_recomputed
            if self._is_made(value) or is_small or self._is_written_again(value):
                continue
            found = self._sources(value)
            if found is not None and self._pays(value, found[0]):
                self.dropped.add(value)
                self.inside |= found[1]
                self.waiting |= {v for v in found[0] if v in self.stored}
                continue
            told = self._told_by(value)
            if told is not None:
                self.dropped.add(value)
                self.told[value.node] = told
                self.made.add(told.by)  # it stays

    def _is_written_again(self, value: TensorValue) -> bool:
        """Whether the backward pass would write a large value to memory for a library to read."""
        is_large = self.graph.type_of(value).nbytes > self.sizes.kept_operand
        return is_large and self._is_multiplied(value)

    def _is_multiplied(self, value: TensorValue) -> bool:
        """Whether a matmul or a convolution of the backward pass reads a value."""
        late = (self.graph.nodes[n] for n in self.readers.get(value, ()) if n > self.position)
        return any(n.op is linear.CONTRACT or n.op in CONVOLUTIONS for n in late)

    def is_operand(self, value: TensorValue) -> bool:
        """Whether a value might be kept as an operand, if that took little memory."""
        is_large = self.graph.type_of(value).nbytes > self.sizes.least_kept
        return is_large and self._is_multiplied(value)

    def _pays(self, value: TensorValue, sources: Values) -> bool:
        """Whether a value is better made of some others than that it waits.

        Those that are large must wait anyway. The backward pass reads them then, as a rule in the
        same kernel; parameters and inputs it would read for this alone, which pays for those of
        few bits.
        """
        type_of, share = self.graph.type_of, self.sizes.small_share
        large = {v for v in sources if type_of(v).size * share > type_of(value).size}
        leaves = {v for v in large if v not in self.stored}
        nbytes = sum(type_of(v).nbytes for v in large)
        is_little = nbytes <= self.sizes.recomputed_reads * type_of(value).nbytes
        is_read_anyway = not leaves or large != leaves
        is_read_anyway = is_read_anyway or is_decoded(self.graph, value, sources, self.sizes)
        return is_little and large - leaves <= self.waiting and is_read_anyway

    def _sources(self, value: TensorValue) -> tuple[Values, set[int]] | None:
        """What computing a value reads, and the nodes between; None if that are too many."""
        size = self.graph.type_of(value).size
        pending, seen, found, inside, cost = [value], {value}, set[TensorValue](), set[int](), 0
        while pending:
            current = pending.pop()
            is_read = current not in self.dropped and self._is_there(current, size)
            if current != value and is_read:
                found.add(current)
                continue
            inside.add(current.node)
            cost += operations(self.graph.nodes[current.node])
            if cost > self.sizes.most_recomputed:
                return None
            operands = self.operands(current.node)
            pending += [v for v in operands if v not in seen]
            seen.update(operands)
        return found, inside

    def operands(self, position: int) -> tuple[TensorValue, ...]:
        """Of a node, with what stands for one of them."""
        operands, told = self.graph.nodes[position].operands, self.told.get(position)
        return operands if told is None else tuple(told.by if v == told.of else v for v in operands)

    def _is_there(self, value: TensorValue, size: int) -> bool:
        """Whether a value is read rather than computed: what does not wait may be made anew too."""
        if isinstance(self.graph.nodes[value.node].attributes, Leaf) or value in self.waiting:
            return True
        is_small = self.graph.type_of(value).size * self.sizes.small_share <= size
        return value in self.stored and (is_small or self._is_made(value))

    def _is_made(self, value: TensorValue) -> bool:
        """Whether a value has a kernel of its own, or must be in memory."""
        node = self.graph.nodes[value.node]
        return value in self.made or is_root(self.graph, node) or not is_inline(node)

    def _told_by(self, value: TensorValue) -> Told | None:
        """What compares as a comparison's operand does, and waits: relu(x) is above 0 where x is.

        That is a choice by this very comparison, between its two operands.
        """
        node = self.graph.nodes[value.node]
        for user in self.users.get(value, ()) if node.op in (e.LE, e.LT) else ():
            choice = self.graph.nodes[user]
            if choice.op is not e.WHERE or choice.operands[0] != value:
                continue
            # Equal operands are no reason to choose otherwise: x ≤ x is true, x < x is not.
            same, given = choice.operands[1:] if node.op is e.LE else choice.operands[:0:-1]
            if {same, given} != set(node.operands) or same == given:
                continue
            for found in (TensorValue(user), *self._rounded(TensorValue(user), same)):
                if found in self.waiting and found not in self.dropped:
                    return Told(given, found)
        return None

    def _rounded(self, value: TensorValue, bound: TensorValue) -> list[TensorValue]:
        """Copies of a value in another dtype that are above 0 where it is: exponents are the same.

        (The very smallest numbers become 0, as they do wherever a GPU computes with them.)
        """
        attributes = self.graph.nodes[bound.node].attributes
        if not isinstance(attributes, Constant) or attributes.value != 0:
            return []
        wide, own = {dtypes.float32, dtypes.bfloat16}, self.graph.type_of(value).dtype
        casts = [u for u in self.users.get(value, ()) if self.graph.nodes[u].op is e.CAST]
        return [TensorValue(u) for u in casts if {own, self.graph.nodes[u].types[0].dtype} <= wide]


def operations(node: Node) -> int:
    """What computing an element costs; more than any limit unless it is cheap."""
    if node.op in VIEWS:
        return 0
    if node.op not in ELEMENTWISE:
        return 1 << 30
    return 6 if node.op in COSTLY else 1


class _Copying:
    """The graph anew: nodes behind the peak read copies of what is dropped."""

    def __init__(self, peak: _Peak):
        self.peak, self.old = peak, peak.graph
        self.nodes: list[Node] = []
        self.moved: list[int] = []
        self.copies: dict[int, int] = {}
        self.waits: dict[int, int] = {}
        self.last = -1  # the latest node with a kernel of its own, in its place
        self.is_after: list[bool] = []  # by node: whether it comes after the peak in any case
        self.is_renamed: list[bool] = []  # by node: whether a checkpoint computes it again
        self.is_gone: list[bool] = []  # by node up to the peak: whether it needs what is dropped
        for position, node in enumerate(self.old.nodes[: peak.position + 1]):
            value = TensorValue(position)
            is_there = value in peak.stored or isinstance(node.attributes, Leaf)
            behind = any(self.is_gone[v.node] for v in node.operands)
            self.is_gone.append(value in peak.dropped or (behind and not is_there))

    def graph(self) -> Recomputed:
        for position, node in enumerate(self.old.nodes):
            is_late = position > self.peak.position
            operands = tuple(self._operand(v, is_late) for v in node.operands)
            self.moved.append(self._add(node, operands))
            is_renamed = any(self.is_renamed[v.node] for v in node.operands)
            self.is_renamed.append(is_late and (is_renamed or node.op is e.STOP_GRADIENT))
            self.is_after.append(is_late and self._comes_after(position, node))
            if is_root(self.old, node) and self.is_after[-1] >= self.is_renamed[-1]:
                self.last = self.moved[-1]
        outputs = (
            replace(o, value=TensorValue(self.moved[o.value.node], o.value.output))
            for o in self.old.outputs
        )
        return Recomputed(Graph(tuple(self.nodes), tuple(outputs), self.old.name), self.waits)

    def _comes_after(self, position: int, node: Node) -> bool:
        """Whether a node behind the peak cannot run before it.

        What a checkpoint computes again is made of the forward pass alone: if large, it waits.
        """
        if any(self.is_after[v.node] for v in node.operands):
            return True
        has_kernel = TensorValue(position) in self.peak.stored
        is_large = sum(t.nbytes for t in node.types) >= self.peak.sizes.least_recomputed
        if not (self.is_renamed[position] and has_kernel and is_large):
            return False
        self.waits[self.moved[position]] = self.last
        return True

    def _add(self, node: Node, operands: tuple[TensorValue, ...]) -> int:
        self.nodes.append(replace(node, operands=operands))
        return len(self.nodes) - 1

    def _operand(self, value: TensorValue, is_late: bool) -> TensorValue:
        is_gone = is_late and value.node <= self.peak.position and self.is_gone[value.node]
        moved = self._copied(value.node) if is_gone else self.moved[value.node]
        return TensorValue(moved, value.output)

    def _copied(self, position: int) -> int:
        """A node a second time, with what it is made of as far as that is not in memory."""
        pending = [position]
        while pending:
            current = pending[-1]
            operands = self.peak.operands(current)
            nodes = {v.node for v in operands if self._is_copied(v.node)}
            missing = [n for n in nodes if n not in self.copies]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in self.copies:
                self.copies[current] = self._copy(current, operands)
        return self.copies[position]

    def _is_copied(self, position: int) -> bool:
        return self.is_gone[position] or position in self.peak.inside

    def _copy(self, position: int, operands: tuple[TensorValue, ...]) -> int:
        node, first = self.old.nodes[position], len(self.nodes)
        moved = [
            TensorValue(self.copies.get(v.node, self.moved[v.node]), v.output) for v in operands
        ]
        for i, (old, new) in enumerate(zip(node.operands, operands, strict=True)):
            type_ = self.old.type_of(old)
            if self.old.type_of(new) != type_:  # it stands for the operand in another dtype
                cast = Node(e.CAST, e.Cast(type_.dtype), (moved[i],), (type_,), node.origin)
                moved[i] = TensorValue(self._add(cast, cast.operands))
        self._add(node, tuple(moved))
        if self.last >= 0:
            self.waits |= dict.fromkeys(range(first, len(self.nodes)), self.last)
        return len(self.nodes) - 1
