"""What every device gives: a graph that can be run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from treadle.ir.graph import Graph


class Executable(Protocol):
    """A graph ready to run. It keeps no state of its own."""

    @property
    def graph(self) -> Graph: ...

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order. Leaves are taken by name; more may be there."""
        ...
