"""Programs whose indices are looked at after each run, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from treadle.base.errors import IndexRangeError
from treadle.ir.graph import Graph
from treadle.kernel.plan import IndexCheck
from treadle.runtime.executable import InPlaceProgram


class CheckedProgram:
    """A program that raises where an index was out of range; its results are then dropped."""

    is_in_place = False

    def __init__(self, graph: Graph, program: InPlaceProgram, checks: Sequence[IndexCheck]):
        self.graph, self.program, self.checks = graph, program, checks

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        found = self.program.run(values)
        count = len(self.graph.outputs)
        for i, check in enumerate(self.checks):
            low, high = (int(v) for v in found[count + 2 * i : count + 2 * i + 2])
            if low < 0 or high >= check.extent:
                raise IndexRangeError(
                    check.op,
                    f"indices from {low} to {high} for an axis of {check.extent}, at "
                    f"{check.origin or 'an unknown line'}",
                    "Look at the data: labels and tokens count from 0.",
                )
        return found[:count]
