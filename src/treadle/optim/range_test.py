"""The learning-rate range test: losses while the rate grows, on a step that is put back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FACTOR, STEPS, UNIT, check_number, check_whole
from treadle.base.trees import Tree

LEAST_POINTS = 4  # fewer have no slope worth the name


@dataclass(frozen=True, slots=True)
class RangeTest:
    """Rates that were tried, their losses, and the rate of the steepest fall.

    The suggestion is NaN where the loss never fell.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float

    def plot(self, path: str | Path | None = None) -> Any:
        """A figure of losses over rates, with matplotlib; written to a file if there is a path."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ArgumentError(
                "plot", "matplotlib is not installed", 'Install it: pip install "treadle[plot]".'
            ) from error
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, alpha=0.3, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if math.isfinite(self.suggestion):
            axes.axvline(self.suggestion, linestyle="--", label=f"{self.suggestion:.2g}")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def find_learning_rate(
    step: Any,
    batches: Iterable[Tree],
    low: float = 1e-7,
    high: float = 10.0,
    count: int = 100,
    smoothing: float = 0.9,
    diverged: float = 4.0,
) -> RangeTest:
    """Train while the rate grows from `low` to `high` in `count` updates, then undo it all.

    Batches are repeated if there are too few. It stops early when the smoothed loss is `diverged`
    times its least, or not finite. With several groups the rates are values of `lr_scale`.
    """
    name = "find_learning_rate"
    least, most = (check_number(name, k, v, FACTOR) for k, v in (("low", low), ("high", high)))
    check_whole(name, "count", count, LEAST_POINTS)
    check_number(name, "smoothing", smoothing, UNIT)
    check_number(name, "diverged", diverged, STEPS)
    if not least < most:
        raise ArgumentError(name, f"low = {low}, high = {high}", "Give low < high.")
    before = step.state_dict()
    try:
        rates, losses, smoothed = _tried(
            step, itertools.cycle(batches), np.geomspace(least, most, count), smoothing, diverged
        )
    finally:
        step.load_state_dict(before)
    return RangeTest(rates, losses, smoothed, _steepest(rates, smoothed))


def _tried(
    step: Any, batches: Iterable[Tree], rates: np.ndarray, smoothing: float, diverged: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    losses: list[float] = []
    smoothed: list[float] = []
    mean, stream = 0.0, iter(batches)
    for i, rate in enumerate(rates):
        step.lr_scale = 1.0
        step.lr_scale = float(rate) / _unscaled(step)
        loss = _one_update(step, stream)
        mean = smoothing * mean + (1 - smoothing) * loss
        current = mean / (1 - smoothing ** (i + 1))
        if not math.isfinite(current):
            break
        losses.append(loss)
        smoothed.append(current)
        if current > diverged * min(smoothed) > 0:
            break
    tried = len(losses)
    return rates[:tried], np.array(losses), np.array(smoothed)


def _unscaled(step: Any) -> float:
    """The rate in force at lr_scale = 1; 1 where groups have rates of their own."""
    if len(step.recipe.optimizer.schedules) != 1:
        return 1.0
    rate = float(step.learning_rate)
    if rate == 0:
        raise ArgumentError(
            "find_learning_rate",
            f"the schedule's rate is 0 at update {step.count}, which no factor changes",
            "Test with a constant rate.",
        )
    return rate


def _one_update(step: Any, batches: Iterable[Tree]) -> float:
    """The loss of one update, of all its micro-batches."""
    for batch in batches:
        out = step(batch)
        if out.grad_norm is not None:
            return float(out.loss)
    raise ArgumentError("find_learning_rate", "there are no batches", "Give one or more.")


def _steepest(rates: np.ndarray, smoothed: np.ndarray) -> float:
    """Where the loss falls most for a factor on the rate, before its least."""
    end = int(np.argmin(smoothed)) + 1 if len(smoothed) else 0
    if end < LEAST_POINTS:
        return math.nan
    slopes = np.gradient(smoothed[:end], np.log(rates[:end]))
    return float(rates[np.argmin(slopes)])
