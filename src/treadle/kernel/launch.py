"""How a GPU runs the entries of a plan: the shape of each launch, and products that a library has.

Plain data that can be stored beside a plan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatrixFacts:
    """A matrix of a batch: elements between rows, columns and matrices, and the first's place."""

    dtype: str
    rows: int
    columns: int
    batch: int
    start: int


@dataclass(frozen=True, slots=True)
class MatmulCall:
    """target (m, n) ← left (m, k) · right (k, n), for each of a batch."""

    m: int
    n: int
    k: int
    batch: int
    target: MatrixFacts
    left: MatrixFacts
    right: MatrixFacts
    bias: int = -1  # the argument that has it
    adds: bool = False  # to what the target has


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a library reads or writes, in the buffer of a call by its number."""

    argument: int
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LibraryLaunch:
    """What a library computes, by name."""

    name: str
    results: tuple[Tensor, ...]
    operands: tuple[Tensor, ...]
    numbers: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """An entry's grid and block; `calls` is how many calls one launch takes at most."""

    symbol: str
    grid: int
    block: int
    shared: int = 0
    calls: int = 1
    matmul: MatmulCall | None = None
    called: LibraryLaunch | None = None


@dataclass(frozen=True, slots=True)
class CooperativeLaunch:
    """Phases that are one launch: where they start among the steps of a plan, and their entries.

    The path names the repeats around them. A phase lists its entries and how often it calls each.
    """

    symbol: str
    path: tuple[int, ...]
    first: int
    phases: tuple[tuple[tuple[int, int], ...], ...]
    grid: int = 0
    block: int = 0
    shared: int = 0
