"""Proofs: which rules were applied, and where, so that two graphs are equal.

A proof is data: all nodes that it speaks of, and applications in the order in which they were made.
Whoever has the rules can replay it: each application stands on nodes that are equal by then to what
its pattern says, and merges its roots with its results; nodes over equal children are equal.
"""

from __future__ import annotations

from collections.abc import Iterable

from treadle.egraph.graph import Application, Congruence, EGraph


def needed(graph: EGraph, pairs: Iterable[tuple[int, int]]) -> list[Application]:
    """The applications that some equalities rest on, in order."""
    used: dict[int, Application] = {}
    seen: set[tuple[int, int]] = set()
    stack = list(pairs)
    while stack:
        pair = stack.pop()
        if pair[0] == pair[1] or pair in seen:
            continue
        seen.add(pair)
        for reason in _path(graph, *pair):
            if isinstance(reason, Congruence):
                stack += _children(graph, reason)
            elif id(reason) not in used:
                used[id(reason)] = reason
                stack += reason.sides
    return [step for step in graph.log if id(step) in used]


def _children(graph: EGraph, reason: Congruence) -> list[tuple[int, int]]:
    left, right = graph.children[reason.left], graph.children[reason.right]
    return list(zip(left, right[::-1] if reason.crossed else right, strict=True))


def _path(graph: EGraph, left: int, right: int) -> list[Application | Congruence]:
    """Reasons along the forest from one node to another."""
    above = _to_root(graph, left)
    places = {node: i for i, (node, _) in enumerate(above)}
    found: list[Application | Congruence] = []
    node = right
    while node not in places:
        node, reason = graph.proof[node]
        assert reason is not None, "the nodes are not equal"
        found.append(reason)
    found += [reason for _, reason in above[: places[node]] if reason is not None]
    return found


def _to_root(graph: EGraph, node: int) -> list[tuple[int, Application | Congruence | None]]:
    found = []
    while True:
        above, reason = graph.proof[node]
        found.append((node, reason))
        if above == node:
            return found
        node = above
