"""The cheapest graph in an e-graph: each class is computed once, however often it is read.

The search begins with the graph as it was and takes moves that save something: another node for a
class, or several at once where one rule gave several. It is greedy and deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from treadle.egraph.graph import EGraph

Moves = Sequence[tuple[int, int]]  # classes, and the node that each would take


class Extraction:
    """A choice of a node for each class, and how often each class is read by the others chosen."""

    def __init__(
        self, graph: EGraph, roots: Sequence[int], cost: Callable[[int], float], originals: int
    ) -> None:
        self.graph = graph
        self._cost = cost
        self._own: dict[int, float] = {}
        self._children: dict[int, tuple[int, ...]] = {}
        self.roots = [graph.find(r) for r in roots]
        self.choice: dict[int, int] = {}
        for node in range(originals):
            self.choice.setdefault(graph.find(node), node)
        self.reads: dict[int, int] = {}
        self._choose_new()
        self.total = sum(map(self._take, self.roots))
        self.before = self.total

    def own(self, node: int) -> float:
        known = self._own.get(node)
        if known is None:
            known = self._own[node] = self._cost(node)
        return known

    def children(self, node: int) -> tuple[int, ...]:
        """Classes that a node reads."""
        known = self._children.get(node)
        if known is None:
            find = self.graph.find
            known = tuple(dict.fromkeys([find(c) for c in self.graph.children[node]]))
            self._children[node] = known
        return known

    def _choose_new(self) -> None:
        """For classes that the graph did not have: the least tree over classes that it had."""
        members = self.graph.members
        new = sorted(c for c in members if c not in self.choice)
        best = dict.fromkeys(new, inf)
        improved = True
        while improved:
            improved = False
            for class_ in new:
                for node in members[class_]:
                    found = self.own(node) + sum(best.get(c, 0.0) for c in self.children(node))
                    if found < best[class_]:
                        best[class_], self.choice[class_] = found, node
                        improved = True

    def _take(self, class_: int) -> float:
        """What it costs to read a class once more."""
        reads, choice = self.reads, self.choice
        cost, stack = 0.0, [class_]
        while stack:
            c = stack.pop()
            count = reads.get(c, 0)
            reads[c] = count + 1
            if not count:
                node = choice[c]
                cost += self.own(node)
                stack += self.children(node)
        return cost

    def _drop(self, class_: int) -> float:
        """What is saved when a class is read once less."""
        reads, choice = self.reads, self.choice
        saved, stack = 0.0, [class_]
        while stack:
            c = stack.pop()
            reads[c] -= 1
            if not reads[c]:
                node = choice[c]
                saved += self.own(node)
                stack += self.children(node)
        return saved

    def _switch(self, class_: int, node: int) -> float:
        """The difference that another node for a class makes."""
        before = self.choice[class_]
        if not self.reads.get(class_):
            self.choice[class_] = node
            return 0.0
        self.choice[class_] = node
        more = self.own(node) + sum(map(self._take, self.children(node)))
        return more - self.own(before) - sum(map(self._drop, self.children(before)))

    def improve(self, moves: Iterable[Moves], least: float, rounds: int = 4) -> None:
        """Take moves that save more than the least, until none does."""
        listed = [m for m in moves if all(self._is_possible(node) for _, node in m)]
        for _ in range(rounds):
            if not sum([self._tried(m, least) for m in listed]):
                return

    def _is_possible(self, node: int) -> bool:
        return all(c in self.choice for c in self.children(node))

    def _tried(self, moves: Moves, least: float) -> bool:
        """Whether a move saves something, and then it is made."""
        if all(self.choice[c] == node or not self.reads.get(c) for c, node in moves):
            return False
        before = [(c, self.choice[c]) for c, _ in moves]
        change = sum([self._switch(c, node) for c, node in moves])
        if change < -least and not self._has_cycle([c for c, _ in moves]):
            self.total += change
            return True
        for c, node in reversed(before):
            self._switch(c, node)
        return False

    def _has_cycle(self, starts: Sequence[int]) -> bool:
        """Whether one of the classes is computed from itself."""
        done: set[int] = set()
        for start in starts:
            path: set[int] = set()
            stack = [(start, False)]
            while stack:
                c, is_left = stack.pop()
                if is_left:
                    path.discard(c)
                    done.add(c)
                elif c in path:
                    return True
                elif c not in done:
                    path.add(c)
                    stack.append((c, True))
                    stack += [(x, False) for x in self.children(self.choice[c])]
        return False


def moves_of(graph: EGraph) -> list[Moves]:
    """What rules gave for several classes at once, then every node of every class that has some."""
    together: list[Moves] = []
    for step in graph.log:
        if len(step.roots) > 1:
            pairs = zip(map(graph.find, step.roots), step.results, strict=True)
            together.append(tuple(pairs))
    single = [
        ((c, node),)
        for c, nodes in sorted(graph.members.items())
        if len(nodes) > 1
        for node in nodes
    ]
    return [*together, *single]
