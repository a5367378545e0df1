"""Callbacks that average parameters along training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.train.callback import Callback
from treadle.train.run import Run

Arrays = dict[str, np.ndarray]


class Average(Callback):
    """Averages of the trained parameters, used in validations; `params` are they.

    `step` is the name of the one that is averaged, where there are several; else the first. The
    averages are made on the host, which costs a copy of the parameters each time.
    """

    def __init__(self, evaluate: bool = True, load_at_end: bool = False, step: str | None = None):
        self._evaluates, self._loads, self._step = evaluate, load_at_end, step
        self.count = 0  # of parameters that went into it
        self._average: Arrays = {}
        self._trained: Arrays = {}  # set aside while the averages are in their place

    @property
    def params(self) -> Arrays:
        """Copies of the averages, by name."""
        return {name: value.copy() for name, value in self._average.items()}

    def take(self, run: Run, share: float) -> None:
        """average ← average + share · (parameters − average)"""
        step = run.named_step(self._step)
        params = step.params
        for name in step.recipe.trained():
            value = params[name]
            before = self._average.get(name, value)
            self._average[name] = (before + share * (value - before)).astype(value.dtype)
        self.count += 1

    def on_eval_start(self, run: Run) -> None:
        if self._evaluates and self._average:
            step = run.named_step(self._step)
            params = step.params
            self._trained = {name: params[name] for name in self._average}
            step.load_params(self._average, strict=False)

    def on_eval_end(self, run: Run) -> None:
        if self._trained:
            run.named_step(self._step).load_params(self._trained, strict=False)
            self._trained = {}

    def on_exception(self, run: Run, error: BaseException) -> None:
        self.on_eval_end(run)

    def on_fit_end(self, run: Run) -> None:
        if self._loads and self._average:
            run.named_step(self._step).load_params(self._average, strict=False)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]

    def arrays(self) -> Arrays:
        return self._average

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._average = dict(arrays)


class EMA(Average):
    """An exponential moving average of the parameters, after every `every`-th step.

    Early on the share of the newest is larger than 1 − `decay`, so that the first parameters are
    forgotten. Validations use the averages; `load_at_end=True` leaves them in the step.
    """

    def __init__(
        self,
        decay: float = 0.999,
        every: int = 1,
        evaluate: bool = True,
        load_at_end: bool = False,
        step: str | None = None,
    ):
        super().__init__(evaluate, load_at_end, step)
        if not 0 <= decay < 1 or every < 1:
            cause = f"decay = {decay}, every = {every}"
            raise ArgumentError("EMA", cause, "0 ≤ decay < 1, and every is at least 1.")
        self._decay, self._every = decay, every

    def on_step_end(self, run: Run) -> None:
        if run.is_updated and run.steps % self._every == 0:
            self.take(run, 1 - min(self._decay, (1 + self.count) / (10 + self.count)))


class SWA(Average):
    """The mean of the parameters at the ends of epochs, from epoch `start` (counted from 0) on.

    Running statistics of norms are not averaged: they are those of the trained parameters.
    """

    def __init__(
        self,
        start: int,
        evaluate: bool = True,
        load_at_end: bool = False,
        step: str | None = None,
    ):
        super().__init__(evaluate, load_at_end, step)
        if start < 0:
            raise ArgumentError("SWA", f"start = {start}", "An epoch, counted from 0.")
        self._start = start

    def on_epoch_end(self, run: Run) -> None:
        if run.epoch >= self._start:
            self.take(run, 1 / (self.count + 1))
