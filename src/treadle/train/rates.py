"""A callback that searches for a learning rate before training."""

from __future__ import annotations

import math

from treadle import optim
from treadle.base.errors import ArgumentError
from treadle.train.callback import Callback
from treadle.train.run import Run


class RateFinder(Callback):
    """Starts a run with the rate that `optim.find_learning_rate` suggests; `test` is what it found.

    The search leaves the step and the data as they were.
    """

    def __init__(self, low: float = 1e-7, high: float = 10.0, count: int = 100):
        self._low, self._high, self._count = low, high, count
        self.test: optim.RangeTest | None = None

    def on_fit_start(self, run: Run) -> None:
        if run.steps or run.loader is None:
            return
        if run.trained.can_tear:
            cause = "the trainer has a training_step of its own"
            remedy = "Search with optim.find_learning_rate on one step before."
            raise ArgumentError("RateFinder", cause, remedy)
        position = run.loader.state_dict()
        try:
            self.test = optim.find_learning_rate(
                run.step, run.loader, self._low, self._high, self._count
            )
        finally:
            run.loader.load_state_dict(position)
        rate = self.test.suggestion
        if math.isnan(rate):
            raise ArgumentError(
                "RateFinder",
                f"the loss fell at no rate from {self._low:g} to {self._high:g}",
                "Look at the loss, or search elsewhere.",
            )
        run.step.lr_scale *= rate / run.step.learning_rate
