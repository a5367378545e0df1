"""What an op promises: where it is defined, how exact it is, what its gradient is at edges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Determinism(Enum):
    """How far two runs of an op agree."""

    EVERYWHERE = "the same bits on every backend"
    PER_BACKEND = "the same bits on one backend, for any number of threads"
    IN_ORDER = "the same bits on one backend; on CUDA with deterministic=True"


@dataclass(frozen=True, slots=True)
class Exact:
    """No rounding: the result is the mathematical one (moves, comparisons, integers)."""

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True, slots=True)
class Ulps:
    """Within `count` units in the last place of the exact result."""

    count: float

    def __str__(self) -> str:
        return f"{self.count:g} ulp"


@dataclass(frozen=True, slots=True)
class SumError:
    """Within factor · n · u · Σ|terms|, n terms, u the unit roundoff of the accumulator."""

    factor: float = 2.0

    def __str__(self) -> str:
        return f"{self.factor:g}·n·u·Σ|terms|"


@dataclass(frozen=True, slots=True)
class ProductError:
    """Within factor · n · u · |product|, n factors, u the unit roundoff of the accumulator."""

    factor: float = 2.0

    def __str__(self) -> str:
        return f"{self.factor:g}·n·u·|product|"


@dataclass(frozen=True, slots=True)
class DefinitionError:
    """As the definition's own ops promise, added up over the definition's graph."""

    def __str__(self) -> str:
        return "by its definition"


ErrorBound = Exact | Ulps | SumError | ProductError | DefinitionError


@dataclass(frozen=True, slots=True)
class Contract:
    """The promise of one row of the op table."""

    error: ErrorBound
    domain: str = "all values; NaN and infinities as IEEE 754"
    subgradient: str = "smooth on its domain"
    determinism: Determinism = Determinism.PER_BACKEND
