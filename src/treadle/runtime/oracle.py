"""The oracle as a device: graphs run through the float64 interpreter."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.domains.domain import Typed, evaluate
from treadle.domains.float64 import Float64, carrier, lift
from treadle.ir.graph import Graph
from treadle.ir.op import Attributes, Op, Types
from treadle.ir.types import TensorType
from treadle.runtime.memory import Held, HostValues, Values

# Floats of 32 bits and more are carried as float64; narrower ones are rounded, which is what
# precision="float16" and "bfloat16" are about.
_ROUNDED: frozenset[DType] = frozenset([dtypes.bfloat16, dtypes.float16, *dtypes.FLOAT8])


class OracleProgram:
    """A graph ready to run. It keeps no state of its own."""

    is_in_place = False

    def __init__(self, graph: Graph):
        self.graph = graph
        self._types = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
        self._domain = Float64(_ROUNDED)

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order. Leaves are taken from `values` by name; more may be there."""
        inputs = {name: lift(values[name], t) for name, t in self._types.items()}
        return evaluate(self.graph, inputs, self._domain)

    def profile(self, values: Mapping[str, np.ndarray]) -> dict[str, OpTime]:
        """What the primitives of a run take, by op. Composites and calls count as their parts."""
        inputs = {name: lift(values[name], t) for name, t in self._types.items()}
        domain = _TimedOps(self._domain)
        evaluate(self.graph, inputs, domain)
        return domain.taken


class OpTime(NamedTuple):
    """What all nodes of an op took: how many there were, seconds, bytes read and written."""

    calls: int = 0
    seconds: float = 0.0
    nbytes: int = 0


class _TimedOps:
    """A domain that notes what each op takes in another."""

    def __init__(self, domain: Float64):
        self._domain, self.keeps = domain, domain.keeps
        self.taken: dict[str, OpTime] = {}

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[np.ndarray]], types: Types
    ) -> Sequence[np.ndarray]:
        start = time.perf_counter()
        found = self._domain.apply(op, attributes, operands, types)
        seconds = time.perf_counter() - start
        nbytes = sum(a.nbytes for a in (*(o.value for o in operands), *found))
        before = self.taken.get(op.name, OpTime())
        self.taken[op.name] = OpTime(
            before.calls + 1, before.seconds + seconds, before.nbytes + nbytes
        )
        return found


@dataclass(frozen=True, slots=True)
class WideMemory:
    """Arrays of the host; every float is a float64."""

    device: str
    is_host: bool = True
    is_wide: bool = True

    def new_values(self) -> Values:
        return HostValues()

    def holder(self) -> Held:
        return self.held

    def held(self, array: np.ndarray, type_: TensorType) -> np.ndarray:
        return np.array(array, dtype=carrier(type_.dtype), copy=True)

    def found(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        return None
