"""Masks that are known before a program runs: numbers, positions, and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from treadle.base.dtypes import bool_
from treadle.ir.graph import Node, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import Constant, Iota
from treadle.ir.ops.shaping import Broadcast, Permute, Reshape
from treadle.rules.pattern import Nodes

MOST = 1 << 24  # elements of what is computed: positions of 4,096 queries and keys
_FUNCTIONS: dict[Op, Callable[..., Any]] = {
    e.ADD: np.add,
    e.SUB: np.subtract,
    e.MUL: np.multiply,
    e.ABS: np.abs,
    e.NEG: np.negative,
    e.MAX: np.maximum,
    e.MIN: np.minimum,
    e.EQ: np.equal,
    e.LT: np.less,
    e.LE: np.less_equal,
    e.AND: np.logical_and,
    e.OR: np.logical_or,
    e.NOT: np.logical_not,
    e.WHERE: lambda holds, x, y: np.where(holds != 0, x, y),
}


def is_causal(mask: np.ndarray) -> bool:
    """Whether a mask of queries and keys, its last axes, lets query t see keys 0 … t."""
    shape = mask.shape
    if math.prod(shape[:-2]) != 1 or min(shape[-2:]) < 2:
        return False
    return bool((mask == (np.tri(shape[-2], shape[-1]) > 0)).all())


def known(graph: Nodes, value: Value, found: dict[Value, np.ndarray | None]) -> np.ndarray | None:
    """A value in float64, if nothing that a program is given decides it; `found` keeps them.

    Each result is rounded to the dtype that it has; None where an integer wraps.
    """
    if value not in found:
        found[value] = _known(graph, value, found)
    return found[value]


def _known(
    graph: Nodes, value: Value, known_values: dict[Value, np.ndarray | None]
) -> np.ndarray | None:
    type_ = graph.type_of(value)
    if math.prod(type_.shape) > MOST:
        return None
    node = graph.nodes[value.node]
    found = _leaf(node)
    if found is None and node.operands:
        operands = [known(graph, v, known_values) for v in node.operands]
        if any(x is None for x in operands):
            return None
        found = _computed(node, operands)
    if found is None:
        return None
    held = found.astype(type_.dtype.numpy).astype(np.float64)
    return held if type_.is_float or np.array_equal(held, found) else None


def _computed(node: Node, operands: Sequence[Any]) -> np.ndarray | None:
    if node.op in _FUNCTIONS:
        return np.asarray(_FUNCTIONS[node.op](*operands), np.float64)
    return _view(node, operands[0])


def _leaf(node: Node) -> np.ndarray | None:
    match node.attributes:
        case Constant(ArrayLiteral() as literal, _):
            return literal.array.astype(np.float64)
        case Constant(int() | float() | Fraction() as number, type_):
            return np.full(list(type_.shape), float(number))
        case Iota(axis, shape, _):
            along = [-1 if i == axis else 1 for i in range(len(shape))]
            return np.broadcast_to(np.arange(shape[axis], dtype=np.float64).reshape(along), shape)
        case _:
            return None


def _view(node: Node, x: np.ndarray) -> np.ndarray | None:
    match node.attributes:
        case Broadcast(shape, axes):
            return np.broadcast_to(
                x.reshape([shape[i] if i in axes else 1 for i in range(len(shape))]), shape
            )
        case Reshape(shape):
            return x.reshape(shape)
        case Permute(axes):
            return x.transpose(axes)
        case e.Cast(dtype) if dtype.is_float:
            return x
        case e.Cast(dtype):
            return (x != 0).astype(np.float64) if dtype is bool_ else np.trunc(x)
        case _:
            return None
