"""The oracle as a device: graphs run through the float64 interpreter."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.domains.domain import evaluate
from treadle.domains.float64 import Float64, carrier, lift
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType

# Floats of 32 bits and more are carried as float64; narrower ones are rounded, which is what
# precision="float16" and "bfloat16" are about.
_ROUNDED: frozenset[DType] = frozenset([dtypes.bfloat16, dtypes.float16])


class OracleProgram:
    """A graph ready to run. It keeps no state of its own."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._types = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
        self._domain = Float64(_ROUNDED)

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order. Leaves are taken from `values` by name; more may be there."""
        inputs = {name: lift(values[name], t) for name, t in self._types.items()}
        return evaluate(self.graph, inputs, self._domain)


def holding(array: np.ndarray, type_: TensorType) -> np.ndarray:
    """An array as this device holds it: a copy, floats as float64."""
    return np.array(array, dtype=carrier(type_.dtype), copy=True)
