"""Values that are others' elements, moved: where an element of one is in the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.domains.float64 import Array
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.ops.elementwise import CAST, STOP_GRADIENT
from treadle.ir.ops.shaping import Broadcast, Flip, Permute, Reshape, Slice
from treadle.verify.indices import ravel, unravel

Move = Callable[[Array], Array]  # flat indices of a value to those of what it is a view of


def viewed(graph: Graph, value: Value, with_casts: bool = True) -> tuple[Value, list[Move]]:
    """What a value is a view of, itself if it is none, and the moves to it. Floats of another
    dtype are views over the reals."""
    moves: list[Move] = []
    while True:
        node = graph.nodes[value.node]
        move = _move(graph, node)
        if move is None or (node.op is CAST and not with_casts):
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
