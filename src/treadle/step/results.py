"""What steps tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from treadle.ir.graph import OutputKind
from treadle.optim.append import Mode
from treadle.step.batches import Arrays
from treadle.step.watching import Histogram


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one call of a step tells.

    With accumulation, loss and metrics are means over the micro-steps since the last update.
    """

    loss: float
    grad_norm: float | None  # of the mean gradient, before clipping; None without an update
    metrics: dict[str, float]
    updated: bool
    captures: Arrays = field(default_factory=dict)
    grad_norms: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)  # of gradients
    skipped: bool = False  # a gradient overflowed in float16: nothing was updated


@dataclass(frozen=True, slots=True)
class RunResult:
    """What several steps tell: a loss each, metrics over all of them."""

    losses: np.ndarray
    metrics: dict[str, float]
    updates: int
    skipped: int = 0  # updates left out because a gradient overflowed

    @property
    def loss(self) -> float:
        return float(self.losses.mean()) if len(self.losses) else math.nan


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
    return {k[len(prefix) :]: v for k, v in outputs.items() if k.startswith(prefix)}


def step_result(outputs: Mapping[str, np.ndarray], mode: Mode) -> StepResult:
    norm = outputs.get("result:grad_norm")
    is_fine = bool(outputs.get("result:updated", True))
    return StepResult(
        float(outputs["result:loss"]),
        None if norm is None else float(norm),
        named(outputs, "metric:"),
        is_fine and mode is not Mode.ACCUMULATE,
        arrays_of(outputs, OutputKind.CAPTURE),
        named(outputs, "result:grad_norm:"),
        {n: Histogram.of(g) for n, g in arrays_of(outputs, OutputKind.GRADIENT).items()},
        not is_fine,
    )
