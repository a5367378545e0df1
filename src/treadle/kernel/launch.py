"""How a GPU runs the entries of a plan: the shape of each launch, and products that a library has.

Plain data that can be stored beside a plan.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


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


def cooperative_to_json(cooperative: tuple[CooperativeLaunch, ...]) -> str:
    return json.dumps([asdict(b) for b in cooperative], separators=(",", ":"))


def cooperative_from_json(text: str) -> tuple[CooperativeLaunch, ...]:
    """What was written; KeyError, TypeError or ValueError if it is none."""
    found: list[dict[str, Any]] = json.loads(text)
    return tuple(
        CooperativeLaunch(
            **item
            | {
                "path": tuple(int(i) for i in item["path"]),
                "phases": tuple(tuple((int(i), int(n)) for i, n in p) for p in item["phases"]),
            }
        )
        for item in found
    )


def launches_to_json(launches: tuple[Launch, ...]) -> str:
    return json.dumps([asdict(launch) for launch in launches], separators=(",", ":"))


def launches_from_json(text: str) -> tuple[Launch, ...]:
    """What was written; KeyError, TypeError or ValueError if it is none."""
    found: list[dict[str, Any]] = json.loads(text)
    return tuple(_launch(item) for item in found)


def _launch(item: dict[str, Any]) -> Launch:
    called = item.pop("called")
    if called is not None:
        tensors = {
            n: tuple(
                Tensor(
                    t["argument"], t["dtype"], t["start"], tuple(t["shape"]), tuple(t["strides"])
                )
                for t in called[n]
            )
            for n in ("results", "operands")
        }
        numbers = tuple((str(n), float(x)) for n, x in called["numbers"])
        called = LibraryLaunch(called["name"], numbers=numbers, **tensors)
    matmul = item.pop("matmul")
    if matmul is not None:
        target, left, right = (MatrixFacts(**matmul.pop(n)) for n in ("target", "left", "right"))
        matmul = MatmulCall(**matmul, target=target, left=left, right=right)
    return Launch(**item, matmul=matmul, called=called)
