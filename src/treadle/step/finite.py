"""Which values of a step are NaN or infinite, and should not be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treadle.nn.module import Module
from treadle.optim.append import UpdatePlan
from treadle.runtime.oracle import OracleProgram
from treadle.step.batches import Arrays


def not_finite(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Names of float arrays in which something is NaN or infinite."""
    floats = {n: a for n, a in arrays.items() if a.dtype.kind == "f" or a.dtype.name == "bfloat16"}
    return [n for n, a in floats.items() if not np.isfinite(a).all()]


class FiniteValues:
    """What must be finite: everything but what begins with infinities, or was loaded with them.

    Sums of metrics may be NaN, and with float16 sums of gradients may overflow: such an update is
    skipped.
    """

    def __init__(self, model: Module, plan: UpdatePlan, init: OracleProgram):
        self._model, self._plan, self._init = model, plan, init
        self._loaded: set[str] = set()  # with infinities: a mask, say

    def note_loaded(self, arrays: Arrays) -> None:
        """Values of the model that a user gave. What is trained has no reason to be infinite."""
        given = {n: a for n, a in arrays.items() if n not in self._plan.parameters}
        self._loaded -= given.keys()
        self._loaded |= set(not_finite(given))

    def forget_loaded(self) -> None:
        self._loaded.clear()

    def wrong(self, values: Mapping[str, np.ndarray], names: list[str], seed: int) -> list[str]:
        """Those of some names whose values should be finite and are not."""
        sums = "accumulator" if self._plan.scales_loss else "accumulator:metric"
        checked = [n for n in names if not n.startswith(self._plan.name(sums))]
        found = [n for n in checked if not_finite({n: values[n]})]
        return [n for n in found if not self._begins_so(n, seed)]

    def _begins_so(self, name: str, seed: int) -> bool:
        """Whether a first value is not finite. It is made again: few ever ask."""
        declared = self._model.declarations()
        if name in declared:
            first = declared[name].first_value(seed, name)
            return name in self._loaded or bool(not_finite({name: first}))
        outputs = [o.name for o in self._init.graph.outputs]
        if name not in outputs:
            return False
        params = {n: declared[n].first_value(seed, n) for n in self._plan.parameters}
        return bool(not_finite({name: self._init.run(params)[outputs.index(name)]}))
