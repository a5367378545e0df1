"""What a training step is composed of, beside its graphs: what a certificate says of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Composition:
    """What a step is composed of: how gradients become new parameters.

    The optimizer is one that the checker defines, by `name` and `flags`, or else a `graph`.
    """

    mode: str
    prefix: str  # of the names of all state that the step owns
    clips: bool
    accumulates: bool
    scales: bool
    name: str
    flags: Mapping[str, bool]
    decayed: tuple[str, ...] = ()  # parameters that weight decay applies to
    rate: Graph | None = None  # of the learning rate, unless it is constant
    graph: Graph | None = None
    reason: str = ""  # why there is no graph
