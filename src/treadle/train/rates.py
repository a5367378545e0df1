"""A search for a learning rate: raise it from step to step and see where the loss falls most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.data.loaders import Loader, as_loader
from treadle.step.train_step import TrainStep
from treadle.train.callback import Callback
from treadle.train.curves import Plot
from treadle.train.run import Run

SMOOTHING = 0.9
BLOWN_UP = 4.0  # times the best loss: the search is over


class RateSearch(NamedTuple):
    """Rates that were tried, the smoothed loss at each, and a rate to start from."""

    rates: np.ndarray
    losses: np.ndarray
    suggestion: float

    def plot(self) -> Plot:
        """The loss over the logarithm of the rate."""
        return Plot({"loss over log10(rate)": (np.log10(self.rates), self.losses)})


def find_rate(
    step: TrainStep,
    data: Iterable[Tree],
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = 100,
) -> RateSearch:
    """Train for some steps with a rate that grows from `low` to `high`; then undo it all.

    The suggestion is the rate at which the smoothed loss falls fastest.
    """
    if not 0 < low < high or steps < 10:
        cause = f"low = {low}, high = {high}, steps = {steps}"
        raise ArgumentError("find_rate", cause, "0 < low < high, and at least 10 steps.")
    loader = as_loader(data)
    state, position = step.state_dict(), loader.state_dict()
    try:
        return _search(step, _endless(loader), np.geomspace(low, high, steps))
    finally:
        step.load_state_dict(state)
        loader.load_state_dict(position)


def _endless(loader: Loader) -> Iterator[Tree]:
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ArgumentError("find_rate", "there are no batches", "The data is empty.")


def _search(step: TrainStep, batches: Iterator[Tree], rates: np.ndarray) -> RateSearch:
    losses: list[float] = []
    average, best = 0.0, math.inf
    for count, rate in enumerate(rates, 1):
        set_rate(step, float(rate))
        loss = _update(step, batches)
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smooth = average / (1 - SMOOTHING**count)
        if not math.isfinite(smooth) or smooth > BLOWN_UP * best:
            break
        losses.append(smooth)
        best = min(best, smooth)
    if len(losses) < 3:
        cause = f"the loss blew up after {len(losses)} steps, at a rate of {rates[len(losses)]:.3g}"
        raise ArgumentError("find_rate", cause, "Begin with a smaller low.")
    found, tried = np.array(losses), rates[: len(losses)]
    fall = np.gradient(found, np.log(tried))
    upto = int(found.argmin()) + 1  # beyond the minimum a fall is noise
    return RateSearch(tried, found, float(tried[int(fall[:upto].argmin())]))


def _update(step: TrainStep, batches: Iterator[Tree]) -> float:
    """One update, of as many batches as it needs."""
    out = step(next(batches))
    while step.micro_step:
        out = step(next(batches))
    return out.loss


def set_rate(step: TrainStep, rate: float) -> None:
    """The rate of the next update, whatever the schedule."""
    now = step.learning_rate
    if not (now > 0 and step.lr_scale > 0):
        cause = f"the schedule's rate is {now} at update {step.count}, which no factor can change"
        raise ArgumentError("find_rate", cause, "Search with a constant rate.")
    step.lr_scale *= rate / now


class RateFinder(Callback):
    """Searches for a rate before training, and starts with it; `search` is what was found."""

    def __init__(self, low: float = 1e-6, high: float = 1.0, steps: int = 100):
        self._low, self._high, self._steps = low, high, steps
        self.search: RateSearch | None = None

    def on_fit_start(self, run: Run) -> None:
        if run.steps == 0 and run.loader is not None:
            self.search = find_rate(run.step, run.loader, self._low, self._high, self._steps)
            set_rate(run.step, self.search.suggestion)
