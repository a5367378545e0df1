"""Canonical graphs, by rules that hold bit for bit, whatever the numbers are.

Equal nodes are one because builders intern them. Views of views become one view, views that change
nothing vanish, as do neutral elements, and constants are folded where the result is exact. The
rules are those of the set `canonical` in `egraph/rules.txt`.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from treadle.ir.graph import Graph
from treadle.rules.driver import rewrite
from treadle.rules.rule import RuleSet


@cache
def canonical() -> RuleSet:
    """The rules, read when they are first used: importing Treadle stays light."""
    from treadle.rules.from_data import driven_rules

    return RuleSet("canonical", driven_rules("canonical"))


def canonicalise(graph: Graph, fired: Counter[str] | None = None) -> Graph:
    """An equal graph of at most as many nodes; bodies of scans and calls stay as they are."""
    return rewrite(graph, canonical(), fired=fired)
