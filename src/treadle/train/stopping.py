"""Callbacks that look at a number: stop when it no longer improves, or lower the rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle import optim
from treadle.base.errors import ArgumentError
from treadle.metrics.direction import DIRECTIONS, checked_direction
from treadle.train.callback import Callback
from treadle.train.run import Run

Metrics = str | Sequence[str] | Mapping[str, str | None]


class Improvement:
    """The best values so far of some numbers, and for how many looks none was better."""

    def __init__(self, operation: str, metrics: Metrics, mode: str | None, min_delta: float):
        self.operation, self.min_delta = operation, min_delta
        names = [metrics] if isinstance(metrics, str) else metrics
        self._given = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, mode)
        if not self._given:
            raise ArgumentError(operation, "there are no metrics", 'For instance "val/loss".')
        wrong = [f"{n}: {m!r}" for n, m in self._given.items() if m not in (None, *DIRECTIONS)]
        if wrong:
            cause = f"modes are {', '.join(wrong)}"
            raise ArgumentError(operation, cause, 'A mode is "min" or "max".')
        self.modes: dict[str, str | None] = dict(self._given)  # all of them known after `check`
        if min_delta < 0:
            raise ArgumentError(operation, f"min_delta = {min_delta}", "Not negative.")
        self.clear()

    def clear(self) -> None:
        self.best: dict[str, float | None] = dict.fromkeys(self.modes)
        self.waited = 0

    def check(self, run: Run) -> None:
        """Before training: numbers of a validation need one, and every number a direction."""
        self.modes = {
            n: checked_direction(self.operation, n, m or run.direction_of(n))
            for n, m in self._given.items()
        }
        names = [n for n in self.modes if n.startswith("val/")]
        if names and not run.validates:
            raise ArgumentError(
                self.operation,
                f"{', '.join(names)} is of a validation, and there is none",
                "Pass validation= to fit, or watch a number of training such as 'loss'.",
            )

    def found(self, run: Run) -> dict[str, float]:
        """The numbers after the current step."""
        values = run.values
        missing = [n for n in self.modes if n not in values]
        if missing:
            raise ArgumentError(
                self.operation,
                f"there is no {', '.join(missing)}",
                f"There are: {', '.join(values)}.",
            )
        return {n: float(values[n]) for n in self.modes}

    def look(self, run: Run) -> bool:
        """Whether one of the numbers is better than ever. NaN is never better."""
        values = self.found(run)
        improved = [n for n in self.modes if self._is_better(n, values[n])]
        for name in improved:
            self.best[name] = values[name]
        self.waited = 0 if improved else self.waited + 1
        return bool(improved)

    def _is_better(self, name: str, value: float) -> bool:
        best = self.best[name]
        if best is None:
            return not np.isnan(value)
        gain = best - value if self.modes[name] == "min" else value - best
        return bool(gain > self.min_delta)

    def state_dict(self) -> dict[str, Any]:
        finite = {n: b if b is not None and np.isfinite(b) else None for n, b in self.best.items()}
        return {"best": finite, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best |= {n: b for n, b in state["best"].items() if n in self.best}
        self.waited = state["waited"]


class Watcher(Callback):
    """Looks at numbers after each validation, or after each epoch where there is none."""

    def __init__(self, metrics: Metrics, mode: str | None, min_delta: float, patience: int):
        operation = type(self).__name__
        if patience < 1:
            raise ArgumentError(operation, f"patience = {patience}", "At least 1.")
        self.improvement = Improvement(operation, metrics, mode, min_delta)
        self.patience = patience

    def on_fit_start(self, run: Run) -> None:
        self.improvement.check(run)
        self.improvement.clear()

    def on_eval_end(self, run: Run) -> None:
        self.looked(run, self.improvement.look(run))

    def on_epoch_end(self, run: Run) -> None:
        if not run.validates:
            self.looked(run, self.improvement.look(run))

    def looked(self, run: Run, is_better: bool) -> None:
        """After a look."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return self.improvement.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.improvement.load_state_dict(state)


class EarlyStopping(Watcher):
    """Stops when a metric did not improve for `patience` validations in a row.

    A known metric has a direction: "val/loss" should fall, "val/accuracy" rise. For any other name
    `mode` is "min" or "max". Several metrics are a list, or a dict of their modes, `{"val/loss":
    "min", "val/gap": "max"}`: it stops when none of them improved. `restore_best=True` loads the
    parameters of the best in the end.
    """

    def __init__(
        self,
        metrics: Metrics = "val/loss",
        mode: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ):
        super().__init__(metrics, mode, min_delta, patience)
        self._restores = restore_best
        self._params: dict[str, np.ndarray] = {}

    def looked(self, run: Run, is_better: bool) -> None:
        if is_better and self._restores:
            self._params = run.trained.params()
        self._stop_if_due(run)

    def on_load(self, run: Run) -> None:
        self._stop_if_due(run)  # a run that had stopped is over, unless it may now wait longer

    def _stop_if_due(self, run: Run) -> None:
        waited = self.improvement.waited
        if waited >= self.patience:
            names = ", ".join(self.improvement.modes)
            run.stop(f"{names} did not improve for {waited} validations")

    def on_fit_end(self, run: Run) -> None:
        if self._params:
            run.trained.load_params(self._params)

    def arrays(self) -> dict[str, np.ndarray]:
        return self._params

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._params = dict(arrays)


class ReduceOnPlateau(Callback):
    """Multiplies the learning rate when a metric has not improved for `patience` validations.

    The rules and the other options are those of `optim.ReduceOnPlateau`, and `mode` is that of
    `EarlyStopping`. `step` is the name of the one whose rate it is, where there are several; else
    the first.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        mode: str | None = None,
        factor: float = 0.1,
        patience: int = 2,
        step: str | None = None,
        **options: Any,
    ):
        self._step = step
        self._metric = Improvement("ReduceOnPlateau", metric, mode, 0.0)
        self._options = {"factor": factor, "patience": patience, **options}
        self._plateau: optim.ReduceOnPlateau | None = None
        optim.ReduceOnPlateau(_Nothing(), **self._options)  # what is wrong is an error here

    def on_fit_start(self, run: Run) -> None:
        self._metric.check(run)
        (mode,) = self._metric.modes.values()
        assert mode is not None  # `check` has found it
        step = run.named_step(self._step)
        self._plateau = optim.ReduceOnPlateau(step, mode=mode, **self._options)

    def on_eval_end(self, run: Run) -> None:
        assert self._plateau is not None
        (value,) = self._metric.found(run).values()
        self._plateau.update(value)

    def on_epoch_end(self, run: Run) -> None:
        if not run.validates:
            self.on_eval_end(run)

    def state_dict(self) -> dict[str, Any]:
        if self._plateau is None:
            return {}
        state: dict[str, Any] = dict(self._plateau.state_dict())
        state["best"] = state["best"] if math.isfinite(state["best"]) else None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._plateau is not None
        best = self._plateau.best if state["best"] is None else state["best"]
        self._plateau.load_state_dict({**state, "best": best})


class _Nothing:
    """Stands for a step where options are only looked at."""

    lr_scale = 1.0
