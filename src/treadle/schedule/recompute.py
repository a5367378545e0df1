"""What the backward pass computes anew rather than that the forward pass keeps it in memory.

A training step takes most memory between its two passes: what was computed waits there for the
gradients. Much of it is little arithmetic on other tensors that wait anyway: an activation beside
what it was computed from, a normalised tensor beside its input, masks, wider copies. Such a tensor
is not kept. Its nodes are there a second time, behind the peak, for whoever reads it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.leaves import Leaf
from treadle.kernel.target import Target
from treadle.schedule.inline import ELEMENTWISE
from treadle.schedule.keep import COSTLY, VIEWS, homes_of, is_inline, is_root, materialized_values
from treadle.schedule.patterns import biased_matmuls


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A graph with nodes that are there a second time, and the node that each of those waits for.

    Nothing that such a node reads tells that it belongs to the backward pass.
    """

    graph: Graph
    waits: Mapping[int, int]


def recomputed(graph: Graph, target: Target) -> Recomputed:
    """The graph with what is better computed again, if that is worth anything."""
    live = _Live(graph, target)
    dropped = live.dropped()
    sizes = target.materialization
    saved = sum(graph.type_of(v).nbytes for v in dropped)
    return _Copying(live, dropped).graph() if saved > sizes.waiting_bytes else Recomputed(graph, {})


class _Live:
    """Which tensors are in memory at the peak, in the order of the graph."""

    def __init__(self, graph: Graph, target: Target):
        self.graph, self.sizes = graph, target.materialization
        self.stored = materialized_values(graph, True, target)
        biased = biased_matmuls(graph, self.stored, target.matmuls)
        self.made = {b.sum for b in biased.values()}  # by a library, from what is not in memory
        self.made |= {o.value for o in graph.outputs}
        readers = homes_of(graph, self.stored)
        last = {v: max(readers.get(v, {v.node})) for v in self.stored if v not in biased}
        change = np.zeros(len(graph.nodes) + 1, np.int64)
        for v, position in last.items():
            change[v.node] += graph.type_of(v).nbytes
            change[position] -= graph.type_of(v).nbytes
        self.peak = int(change.cumsum().argmax())
        # What is there at the peak and is read after it.
        self.waiting = {v for v, position in last.items() if v.node <= self.peak < position}

    def dropped(self) -> set[TensorValue]:
        """Tensors that need not wait, the first ones first: later ones may be made of them."""
        found: set[TensorValue] = set()
        for value in sorted(self.waiting):
            node, nbytes = self.graph.nodes[value.node], self.graph.type_of(value).nbytes
            is_made = value in self.made or is_root(self.graph, node) or not is_inline(node)
            if is_made or nbytes < self.sizes.least_recomputed:
                continue
            more = self._more(value, found)
            if more is not None:
                found.add(value)
                self.waiting |= more
        return found

    def _more(self, value: TensorValue, dropped: set[TensorValue]) -> set[TensorValue] | None:
        """What has to wait so that a value need not; None if that, or computing it, is too much.

        What waits is read by the backward pass anyway, as a rule by the same kernel; what is made
        of parameters or inputs alone would be read once more for nothing else.
        """
        sources = self._sources(value, dropped)
        if sources is None:
            return None
        size = self.graph.type_of(value).size
        large = {v for v in sources if self.graph.type_of(v).size * self.sizes.small_share > size}
        is_read = not large or any(v in self.waiting for v in large)
        more = {v for v in sources if v in self.stored} - self.waiting
        return more if is_read and not more & large else None

    def _sources(self, value: TensorValue, dropped: set[TensorValue]) -> set[TensorValue] | None:
        """What computing a value reads of memory; None if it takes too many operations."""
        pending, seen, found, cost = [value], {value}, set[TensorValue](), 0
        while pending:
            current = pending.pop()
            node = self.graph.nodes[current.node]
            is_kept = current in self.stored and current not in dropped and current != value
            if is_kept or isinstance(node.attributes, Leaf):
                found.add(current)
                continue
            cost += operations(node)
            if cost > self.sizes.most_recomputed:
                return None
            pending += [v for v in node.operands if v not in seen]
            seen.update(node.operands)
        return found


def operations(node: Node) -> int:
    """What computing an element costs; more than any limit unless it is cheap."""
    if node.op in VIEWS:
        return 0
    if node.op not in ELEMENTWISE:
        return 1 << 30
    return 6 if node.op in COSTLY else 1


class _Copying:
    """The graph anew: nodes behind the peak read copies of what is dropped."""

    def __init__(self, live: _Live, dropped: set[TensorValue]):
        self.live, self.old = live, live.graph
        self.nodes: list[Node] = []
        self.moved: list[int] = []
        self.copies: dict[int, int] = {}
        self.waits: dict[int, int] = {}
        self.last = -1  # the latest node that has a kernel of its own
        # By node up to the peak: whether it is not in memory, and whether it needs what is dropped.
        self.is_inline: list[bool] = []
        self.is_gone: list[bool] = []
        for position, node in enumerate(self.old.nodes[: live.peak + 1]):
            value = TensorValue(position)
            is_there = value in live.stored or isinstance(node.attributes, Leaf)
            behind = any(self.is_gone[v.node] for v in node.operands)
            self.is_inline.append(value in dropped or not is_there)
            self.is_gone.append(value in dropped or (behind and not is_there))

    def graph(self) -> Recomputed:
        for position, node in enumerate(self.old.nodes):
            is_late = position > self.live.peak
            operands = tuple(self._operand(v, is_late) for v in node.operands)
            self.moved.append(len(self.nodes))
            self.nodes.append(replace(node, operands=operands))
            if is_root(self.old, node):
                self.last = self.moved[-1]
        outputs = (
            replace(o, value=TensorValue(self.moved[o.value.node], o.value.output))
            for o in self.old.outputs
        )
        return Recomputed(Graph(tuple(self.nodes), tuple(outputs), self.old.name), self.waits)

    def _operand(self, value: TensorValue, is_late: bool) -> TensorValue:
        is_gone = is_late and value.node <= self.live.peak and self.is_gone[value.node]
        moved = self._copied(value.node) if is_gone else self.moved[value.node]
        return TensorValue(moved, value.output)

    def _copied(self, position: int) -> int:
        """A node a second time, with what it is made of as far as that is not in memory."""
        pending = [position]
        while pending:
            current = pending[-1]
            node = self.old.nodes[current]
            inline = [v.node for v in node.operands if self.is_inline[v.node]]
            missing = [n for n in inline if n not in self.copies]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in self.copies:
                moved = (self.copies.get(v.node, self.moved[v.node]) for v in node.operands)
                pairs = zip(moved, node.operands, strict=True)
                operands = tuple(TensorValue(n, v.output) for n, v in pairs)
                self.copies[current] = len(self.nodes)
                if self.last >= 0:
                    self.waits[len(self.nodes)] = self.last
                self.nodes.append(replace(node, operands=operands))
        return self.copies[position]
