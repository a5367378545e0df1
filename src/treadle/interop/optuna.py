"""Optuna: a callback of the trainer that reports a number and ends trials that promise little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.metrics.direction import direction_of
from treadle.train.callback import Callback
from treadle.train.run import Run
from treadle.train.stopping import Improvement


class PruningCallback(Callback):
    """Reports a number to a trial after each validation; `fit` raises TrialPruned when it should.

    `monitor` is a name of the run's values, "val/loss" or "loss" where nothing is validated. The
    steps of a report count validations (epochs where there are none), so that trials with other
    sizes of batches can be compared.
    """

    def __init__(self, trial: Any, monitor: str = "val/loss"):
        try:
            import optuna
        except ImportError as error:
            remedy = 'Install it: pip install "treadle[optuna]".'
            raise ArgumentError("PruningCallback", "Optuna is not installed", remedy) from error
        if len(trial.study.directions) > 1:
            raise ArgumentError(
                "PruningCallback",
                f"the study has {len(trial.study.directions)} objectives",
                "Optuna prunes studies of one objective only.",
            )
        wanted = str(trial.study.direction.name).lower()[:3]  # "minimize", "maximize"
        if direction_of(monitor) not in (None, wanted):
            raise ArgumentError(
                "PruningCallback",
                f"the study's direction is {trial.study.direction.name}, but the best "
                f"{monitor!r} is its {direction_of(monitor)}imum",
                f'Use create_study(direction="{direction_of(monitor)}imize").',
            )
        self._trial, self._metric = trial, Improvement("PruningCallback", monitor, wanted, 0.0)
        self._pruned, self._looks = optuna.TrialPruned, 0
        self.passes = (optuna.TrialPruned,)

    def on_fit_start(self, run: Run) -> None:
        self._metric.check(run)

    def on_eval_end(self, run: Run) -> None:
        ((name, value),) = self._metric.found(run).items()
        self._looks += 1
        self._trial.report(value, self._looks)
        if self._trial.should_prune():
            raise self._pruned(f"pruned after {self._looks} looks: {name} is {value:.6g}")

    def on_epoch_end(self, run: Run) -> None:
        if not run.validates:
            self.on_eval_end(run)

    def state_dict(self) -> dict[str, Any]:
        return {"looks": self._looks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._looks = int(state["looks"])
