"""Values that are others' elements, moved: where an element of one is in the other."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from treadle.domains.float64 import Array
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.ops.elementwise import CAST, STOP_GRADIENT
from treadle.ir.ops.leaves import Leaf
from treadle.ir.ops.shaping import Broadcast, Flip, Permute, Reshape, Slice
from treadle.verify.indices import ravel, unravel

MOST_BETWEEN = 1000  # values between one and what it may be made of

Move = Callable[[Array], Array]  # flat indices of a value to those of what it is a view of


def viewed(graph: Graph, value: Value) -> tuple[Value, list[Move]]:
    """What a value is a view of, itself if it is none, and the moves to it. Floats of another
    dtype are views over the reals."""
    moves: list[Move] = []
    while True:
        node = graph.nodes[value.node]
        move = _move(graph, node)
        if move is None:
            return value, moves
        moves.append(move)
        value = node.operands[0]


def _move(graph: Graph, node: Node) -> Move | None:
    if node.op is STOP_GRADIENT or isinstance(node.attributes, Reshape):
        return lambda at: at
    if node.op is CAST:
        is_float = node.types[0].is_float and graph.type_of(node.operands[0]).is_float
        return (lambda at: at) if is_float else None
    if not isinstance(node.attributes, (Permute, Broadcast, Slice, Flip)):
        return None
    attributes, shape = node.attributes, node.types[0].shape
    inner = graph.type_of(node.operands[0]).shape

    def moved(at: Array) -> Array:
        index = unravel(at, shape)
        match attributes:
            case Permute(axes):
                found = [index[axes.index(i)] for i in range(len(axes))]
            case Broadcast(_, axes):
                found = [index[i] for i in axes]
            case Slice(starts, _, strides):
                found = [i * s + b for i, s, b in zip(index, strides, starts, strict=True)]
            case Flip(axes):
                turned = enumerate(zip(index, inner, strict=True))
                found = [n - 1 - i if k in axes else i for k, (i, n) in turned]
        return np.broadcast_to(np.asarray(ravel(tuple(found), inner)), at.shape)

    return moved


def made_of_others(graph: Graph, values: Collection[Value]) -> set[Value]:
    """Those that are made of the others alone."""
    left = set(values)
    for value in sorted(left, key=lambda v: v.node, reverse=True):
        if _is_made_of(graph, value, left - {value}):
            left.remove(value)
    return {*values} - left


def _is_made_of(graph: Graph, value: Value, others: set[Value]) -> bool:
    """Looked at as far as it costs little."""
    pending = [*graph.nodes[value.node].operands]
    seen, is_made = {*pending}, bool(pending)
    while pending and is_made:
        v = pending.pop()
        if v not in others:
            node = graph.nodes[v.node]
            is_made = not isinstance(node.attributes, Leaf) and len(seen) < MOST_BETWEEN
            pending += {*node.operands} - seen
            seen |= {*node.operands}
    return is_made
