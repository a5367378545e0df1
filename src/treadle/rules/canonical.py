"""Canonical graphs, by rules that hold bit for bit, whatever the numbers are.

Equal nodes are one because builders intern them. Views of views become one view, views that change
nothing vanish, as do neutral elements, and constants are folded where the result is exact.
"""

from __future__ import annotations

from collections import Counter

from treadle.ir.graph import Graph
from treadle.rules import arithmetic, views
from treadle.rules.driver import rewrite
from treadle.rules.rule import RuleSet

CANONICAL = RuleSet("canonical", (*views.RULES, *arithmetic.RULES))


def canonicalise(graph: Graph, fired: Counter[str] | None = None) -> Graph:
    """An equal graph of at most as many nodes; bodies of scans and calls stay as they are."""
    return rewrite(graph, CANONICAL, fired=fired)
