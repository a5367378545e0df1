"""What rules did to a graph, as plain facts: stages note them, reports show them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from treadle.base.origin import Origin


class Exactness(Enum):
    """How close a rewrite's result is to what it replaces."""

    EXACT = "exact"  # equal over the reals
    ROUNDED = "rounded constants"  # but for constants that differ by two ulps at most
    SATURATING = "saturating mask"  # but for a finite number that hides scores, taken for −∞


class Status(Enum):
    """How that is known."""

    PROVED = "proved"  # by normal form, for every number
    TESTED = "tested"  # by exact evaluation on random elements of finite fields


@dataclass(frozen=True, slots=True)
class Recognised:
    """Code that was found to be a composite: which one, how near, how surely, and where it is."""

    name: str  # of the composite
    exactness: Exactness
    origin: Origin | None
    status: Status = Status.PROVED

    def __str__(self) -> str:
        at = "" if self.origin is None else f" at {self.origin}"
        return f"{self.name}{at} ({self.exactness.value}, {self.status.value})"


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rule of an optimisation, how often it was applied, and the modelled cost around it.

    Costs are of the whole graph, in the optimiser's unit: before and after the stage that applied
    the rule, not the rule alone.
    """

    rule: str
    count: int
    before: float
    after: float
