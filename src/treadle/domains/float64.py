"""The oracle: every float is a float64. Every backend is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from treadle.base.dtypes import DType, float64, narrowed
from treadle.domains.domain import Typed, evaluate
from treadle.ir.graph import Graph
from treadle.ir.op import Attributes, Op, RuleTable, Types
from treadle.ir.ops.elementwise import CAST
from treadle.ir.types import TensorType

# NumPy's own stubs type most results as Any.
Array = np.ndarray[Any, Any]

# The meaning of each primitive: arrays to an array, or to a tuple for several results.
MEANING: RuleTable[Callable[..., Any]] = RuleTable("meaning")


class Float64:
    """Floats of every dtype are carried as float64; results of dtypes in `rounded` are rounded.

    Integers and bool have their own width. With nothing rounded, a cast between floats is the
    identity: this is what a graph means. Rounding float16 or bfloat16 shows what it does there;
    then a cast of a float64 is rounded too, as somebody asked for it.
    """

    keeps: frozenset[Op] = frozenset()

    def __init__(self, rounded: frozenset[DType] = frozenset()):
        self.rounded = rounded

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[Array]], types: Types
    ) -> Sequence[Array]:
        arrays = [o.value for o in operands]
        with np.errstate(all="ignore"):
            found = MEANING[op](attributes, *arrays) if op.has_attributes else MEANING[op](*arrays)
        results = found if isinstance(found, tuple) else (found,)
        found = [self._finish(r, t) for r, t in zip(results, types, strict=True)]
        is_narrowed = op is CAST and operands[0].type.dtype is float64
        if self.rounded and types[0].is_float and is_narrowed:
            return [_rounded(found[0], types[0].dtype)]
        return found

    def _finish(self, array: Array, type_: TensorType) -> Array:
        array = np.asarray(array, carrier(type_.dtype))
        assert array.shape == type_.shape, (array.shape, type_)
        return _rounded(array, type_.dtype) if type_.dtype in self.rounded else array


def _rounded(array: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return narrowed(array, dtype).astype(np.float64)


def carrier(dtype: DType) -> np.dtype[np.generic]:
    """The NumPy dtype the oracle holds a dtype in."""
    return np.dtype(np.float64) if dtype.is_float else dtype.numpy


def lift(array: object, type_: TensorType) -> Array:
    """A user's array as the oracle holds it."""
    return np.asarray(array).astype(carrier(type_.dtype))


def evaluate_float64(
    graph: Graph, inputs: Mapping[str, object], rounded: frozenset[DType] = frozenset()
) -> tuple[Array, ...]:
    """All outputs of a graph for arrays given by leaf name."""
    leaves = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
    lifted = {name: lift(inputs[name], t) for name, t in leaves.items() if name in inputs}
    return evaluate(graph, lifted, Float64(rounded))
