"""What steps tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from treadle.ir.graph import OutputKind
from treadle.optim.append import Mode
from treadle.step.batches import Arrays
from treadle.step.watching import Histogram

WAITING = 64  # steps of a run whose results may still be on their way


class StepResult:
    """What one call of a step tells; a GPU is waited for when something is looked at.

    With accumulation, loss and metrics are means over the micro-steps since the last update.
    """

    def __init__(self, outputs: Mapping[str, Any], mode: Mode):
        self._outputs, self._mode = outputs, mode

    @property
    def loss(self) -> float:
        return float(self._outputs["result:loss"])

    @property
    def grad_norm(self) -> float | None:
        """Of the mean gradient, before clipping; None without an update."""
        norm = self._outputs.get("result:grad_norm")
        return None if norm is None else float(norm)

    @property
    def metrics(self) -> dict[str, float]:
        return named(self._outputs, "metric:")

    @property
    def skipped(self) -> bool:
        """Whether a gradient overflowed in float16: nothing was updated."""
        return not bool(self._outputs.get("result:updated", True))

    @property
    def updated(self) -> bool:
        return self._mode is not Mode.ACCUMULATE and not self.skipped

    @cached_property
    def captures(self) -> Arrays:
        return arrays_of(self._outputs, OutputKind.CAPTURE)

    @cached_property
    def grad_norms(self) -> dict[str, float]:
        return named(self._outputs, "result:grad_norm:")

    @cached_property
    def histograms(self) -> dict[str, Histogram]:
        """Of gradients."""
        gradients = arrays_of(self._outputs, OutputKind.GRADIENT)
        return {n: Histogram.of(g) for n, g in gradients.items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepResult):
            return NotImplemented
        if self._mode != other._mode or self._outputs.keys() != other._outputs.keys():
            return False
        pairs = ((v, other._outputs[k]) for k, v in self._outputs.items())
        return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]  # as of anything that holds arrays

    def __repr__(self) -> str:
        names = ("loss", "grad_norm", "metrics", "updated")
        return f"StepResult({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"


class RunResult:
    """What several steps tell: a loss each, metrics over all of them; a GPU's wait to be looked at.

    `losses` is an array, `skipped` counts updates left out because a gradient overflowed.
    """

    def __init__(self, steps: Iterable[tuple[Mapping[str, Any], Mode]]):
        self._losses: list[float] = []
        self._means = Means()
        self._updates, self._skipped = 0, 0
        self._pending: list[tuple[Mapping[str, Any], Mode]] = []
        for step in steps:
            self._pending.append(step)
            if len(self._pending) >= 2 * WAITING:
                self._count(WAITING)

    def _count(self, most: int | None = None) -> None:
        """Look at the first of the steps that nobody has looked at."""
        some = self._pending[:most]
        del self._pending[: len(some)]
        for outputs, mode in some:
            result = StepResult(outputs, mode)
            self._losses.append(result.loss)
            self._updates += result.updated
            self._skipped += result.skipped
            if mode is not Mode.ACCUMULATE:
                self._means.add(outputs)

    @property
    def losses(self) -> np.ndarray:
        self._count()
        return np.array(self._losses)

    @property
    def metrics(self) -> dict[str, float]:
        self._count()
        return self._means.values()

    @property
    def updates(self) -> int:
        self._count()
        return self._updates

    @property
    def skipped(self) -> int:
        self._count()
        return self._skipped

    @property
    def loss(self) -> float:
        losses = self.losses
        return float(losses.mean()) if len(losses) else math.nan

    def __repr__(self) -> str:
        names = ("losses", "metrics", "updates", "skipped")
        return f"RunResult({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"


@dataclass(slots=True)
class Done:
    """Updates, and micro-steps since the last one."""

    steps: int = 0
    micro: int = 0

    def advance(self, mode: Mode) -> None:
        """A call of a step was made."""
        if mode is Mode.ACCUMULATE:
            self.micro += 1
        else:
            self.steps, self.micro = self.steps + 1, 0

    def add(self, made: int) -> None:
        self.steps += made


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Loss and metrics in evaluation mode, and the weight they stand for."""

    loss: float
    weight: float
    metrics: dict[str, float]
    weights: dict[str, float]
    captures: Arrays = field(default_factory=dict)


class Means:
    """Weighted means of metrics over several steps."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def add(self, outputs: Mapping[str, np.ndarray]) -> None:
        weights = named(outputs, "weight:")
        for name, value in named(outputs, "metric:").items():
            counted = value * weights[name] if weights[name] else 0.0
            self.totals[name] = self.totals.get(name, 0.0) + counted
            self.weights[name] = self.weights.get(name, 0.0) + weights[name]

    def values(self) -> dict[str, float]:
        """NaN where nothing had a weight."""
        weights = self.weights
        return {n: t / weights[n] if weights[n] else math.nan for n, t in self.totals.items()}


def named(outputs: Mapping[str, np.ndarray], prefix: str) -> dict[str, float]:
    return {k[len(prefix) :]: float(v) for k, v in outputs.items() if k.startswith(prefix)}


def arrays_of(outputs: Mapping[str, np.ndarray], kind: OutputKind) -> Arrays:
    prefix = f"{kind.value}:"
    return {k[len(prefix) :]: np.asarray(v) for k, v in outputs.items() if k.startswith(prefix)}
