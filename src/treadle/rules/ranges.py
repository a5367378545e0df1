"""Between which numbers the elements of a tensor are, from the ops that make it.

Rounding is left out: what is at most 1 over the reals is at most 1 rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.ir.graph import Node, Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import Constant
from treadle.ir.ops.shaping import BROADCAST, CONCAT, FLIP, PERMUTE, RESHAPE, SLICE
from treadle.rules.pattern import Nodes, number_of

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
DEEP = 24  # nodes one behind the other that are looked at
_KEEPS = frozenset(
    [BROADCAST, CONCAT, FLIP, PERMUTE, RESHAPE, SLICE, e.CAST, e.STOP_GRADIENT, e.MAX, e.MIN]
)
_IN_ONE = frozenset([e.TANH, e.SIN, e.COS, e.ERF, e.SIGN])


def range_of(
    graph: Nodes, value: Value, outside: Callable[[Value], Range], deep: int = DEEP
) -> Range:
    """Of a float; `outside` says it of what is no node's result: inputs."""
    node = graph.nodes[value.node]
    number = number_of(graph, value)
    if number is not None:
        return float(number), float(number)
    if not node.operands or isinstance(node.attributes, Constant) or not deep:
        return outside(value)
    if not node.types[0].is_float or not graph.type_of(node.operands[0]).is_float:
        return _chosen(graph, node, outside, deep) if node.op is e.WHERE else ANY
    found = [range_of(graph, v, outside, deep - 1) for v in node.operands]
    is_square = node.op is e.MUL and node.operands[0] == node.operands[1]
    return _square(found[0]) if is_square else _of(node, found)


def _chosen(graph: Nodes, node: Node, outside: Callable[[Value], Range], deep: int) -> Range:
    return _all([range_of(graph, v, outside, deep - 1) for v in node.operands[1:]])


def _all(found: list[Range]) -> Range:
    return min(low for low, _ in found), max(high for _, high in found)


def _square(x: Range) -> Range:
    return 0.0, max(_times(x[0], x[0]), _times(x[1], x[1]))


def _times(x: float, y: float) -> float:
    """A bound of products: nothing times anything is nothing."""
    return 0.0 if x == 0 or y == 0 else x * y


def _of(node: Node, found: list[Range]) -> Range:
    (low, high), last = found[0], found[-1]
    if node.op in _IN_ONE:
        return -1.0, 1.0
    if node.op in _KEEPS:
        return _all(found)
    if node.op is e.NEG:
        return -high, -low
    if node.op is e.ABS:
        return max(0.0, low, -high), max(abs(low), abs(high))
    if node.op is e.EXP:
        return _exp(low), _exp(high)
    if node.op is e.LOG and low > 0:
        return math.log(low), math.log(high)
    if node.op is e.SQRT and low >= 0:
        return math.sqrt(low), math.sqrt(high)
    if node.op is e.ADD:
        return low + last[0], high + last[1]
    if node.op is e.SUB:
        return low - last[1], high - last[0]
    if node.op is e.MUL:
        return _product(found[0], last)
    if node.op is e.DIV and last[0] > 0:
        return _product(found[0], (1 / last[1], 1 / last[0]))
    return ANY


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def _product(x: Range, y: Range) -> Range:
    ends = [_times(a, b) for a in x for b in y]
    return min(ends), max(ends)
