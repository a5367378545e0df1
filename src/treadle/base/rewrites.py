"""What rules did to a graph, as plain facts: stages note them, reports show them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from treadle.base.origin import Origin


class Exactness(Enum):
    """How close a rewrite's result is to what it replaces."""

    EXACT = "exact"  # the same function, for all values
    ROUNDED = "rounded"  # constants differ by their rounding: x/√2 and x·√½
    SATURATING = "saturating"  # a large negative number in a mask stands for −∞


class Status(Enum):
    """How it is known that two graphs are equal."""

    PROVED = "proved"  # by normal form, for every number
    TESTED = "tested"  # by exact evaluation on random elements of finite fields


@dataclass(frozen=True, slots=True)
class Recognised:
    """Code that was found to be a composite: which one, how near, and where it is written.

    `cause` names what was assumed, where it is not exact.
    """

    name: str  # of the composite
    exactness: Exactness
    origin: Origin | None
    cause: str = ""
    status: Status = Status.PROVED

    def __str__(self) -> str:
        at = "" if self.origin is None else f" at {self.origin}"
        told = self.exactness.value + (f": {self.cause}" if self.cause else "")
        return f"{self.name}{at} ({told}; {self.status.value})"


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
