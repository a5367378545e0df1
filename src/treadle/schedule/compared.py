"""Values that are compared with what was selected from them: a tensor with its own maximum.

A compiler may round a product and a sum once or twice, and choose differently in two kernels. What
is compared for equality must then be one value: it is materialized, and read by both sides.
"""

from __future__ import annotations

from collections.abc import Mapping

from treadle.ir.graph import Graph, Node, Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, linear, reductions, shaping
from treadle.ir.ops.leaves import Leaf

COMPARISONS = frozenset([e.EQ, e.LT, e.LE])
# Ops whose results are elements of their first operand, or of any operand.
_MOVES = frozenset([e.STOP_GRADIENT, shaping.RESHAPE])  # at the same place
_PICKS = frozenset(
    [
        reductions.REDUCE_MAX, reductions.REDUCE_MIN, reductions.SORT, reductions.TOP_K,
        indexing.GATHER, shaping.DYNAMIC_SLICE, shaping.PERMUTE, shaping.BROADCAST,
        shaping.SLICE, shaping.FLIP, linear.WINDOW, shaping.PAD,
    ]
)  # fmt: skip
_CHOOSES = frozenset([e.MAX, e.MIN, e.WHERE, shaping.CONCAT, shaping.DYNAMIC_UPDATE])

Origins = Mapping[Value, bool]  # whether elements come from other places


def compared_values(graph: Graph) -> set[Value]:
    """Computed floats that a node compares with elements selected from them."""
    if not any(node.op in COMPARISONS for node in graph.nodes):
        return set()
    known: dict[Value, Origins] = {}
    found = set[Value]()
    for position, node in enumerate(graph.nodes):
        if node.op in COMPARISONS:
            left, right = (known[v] for v in node.operands)
            found |= {v for v in left.keys() & right.keys() if left[v] or right[v]}
        for i, type_ in enumerate(node.types):
            value = Value(position, i)
            is_made = type_.dtype.is_float and not isinstance(node.attributes, Leaf)
            own: Origins = {value: False} if is_made else {}
            known[value] = _selected(node, i, known) if type_.dtype.is_float else {}
            known[value] = known[value] or own
    return found


def _selected(node: Node, output: int, known: Mapping[Value, Origins]) -> dict[Value, bool]:
    """What the elements of a result were selected from; nothing if the node computes them."""
    if node.op in _MOVES:
        return dict(known[node.operands[0]])
    if node.op in _PICKS:
        return dict.fromkeys(known[node.operands[0]], True) if output == 0 else {}
    if node.op not in _CHOOSES:
        return {}
    moves = node.op in (shaping.CONCAT, shaping.DYNAMIC_UPDATE)
    found = dict[Value, bool]()
    for v in node.operands:
        for origin, is_moved in known[v].items():
            found[origin] = found.get(origin, False) or is_moved or moves
    return found
