"""What a compile leaves behind for its certificate: the graphs of its stages, and its programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from treadle.ir.composition import Composition
from treadle.ir.graph import Graph
from treadle.ir.marks import Pairs


class Relation(Enum):
    """What the graph after a stage is to the one before it."""

    EQUAL = "equal"  # the same outputs
    GRADIENTS = "gradients"  # the same outputs, and gradients of the first
    UPDATES = "updates"  # what becomes of the gradients
    PART = "part"  # some of the outputs; updates may wait for a look at indices


@dataclass(frozen=True, slots=True)
class Passage:
    """One stage: the graphs around it, and which values may be which."""

    stage: str
    relation: Relation
    before: Graph
    after: Graph
    pairs: Pairs = ()
    assumptions: tuple[str, ...] = ()  # under which the graphs are equal
    reason: str = ""  # why the compiler itself could not show it
    cotangents: Pairs = ()  # values before, and those after that may be their cotangents
    frozen: tuple[str, ...] = ()  # parameters that are not trained
    composition: Callable[[], Composition] | None = None  # of a stage that appends updates


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A program of a graph: its record as bytes, or what makes it."""

    name: str
    graph: Graph
    record: Callable[[], bytes]


@dataclass(slots=True)
class Evidence:
    """It grows as stages pass; nothing of it is copied or written before it is asked for."""

    passages: list[Passage] = field(default_factory=list)
    # Comparisons that are put off until a compiler works beside this thread.
    pending: list[Callable[[], None]] = field(default_factory=list)
    programs: list[Scheduled] = field(default_factory=list)

    def settle(self) -> None:
        """Compare what is left to compare, before anything runs: an error if graphs differ."""
        while self.pending:
            self.pending.pop(0)()
