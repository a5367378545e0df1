"""A run: what callbacks see of training, and what they may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.data.loaders import Loader
from treadle.metrics.direction import Direction, direction_of
from treadle.step.programs import Watched
from treadle.step.train_step import TrainStep
from treadle.train.history import History
from treadle.train.loggers import Loggers, scalars
from treadle.train.trained import Out, Trained, step_values

NOTHING = Watched()


class Run:
    """How far training is, and what callbacks may ask for.

    `run.step` is the compiled step, or the first of several, which are `run.named_steps`: what is
    read of one is true at that moment, and what is written (parameters, rates) takes effect at the
    next call.

    A step is an update. Under accumulation several batches make one, and the hooks around a step
    are called for each batch; `run.is_updated` tells the one that completed it.
    """

    def __init__(
        self,
        step: TrainStep | Trained,
        loggers: Loggers,
        directions: Mapping[str, Direction] | None = None,
    ):
        self.trained = step if isinstance(step, Trained) else Trained(step)
        self.step = self.trained.main
        self.history = History()
        self.loader: Loader | None = None
        self.epoch = 0  # passes that were finished
        self.steps = 0  # updates
        self.batches = 0  # calls of the step
        self.epoch_batches = 0  # of this pass
        self.batch: Tree = None  # of the current step
        self.out: Out | None = None  # what the last step gave
        self.evaluation: dict[str, Any] = {}  # what the last validation gave, by name
        self.evaluated_at = -1  # steps then
        self.validates = False  # whether there is data to validate on
        self.stop_reason: str | None = None
        self.wants_checkpoint = False
        self.watched = NOTHING
        self._loggers = loggers
        self._directions = dict(directions or {})  # of the trainer's metrics

    def direction_of(self, name: str) -> Direction | None:
        """ "min" or "max", by the trainer's metric of this name, or as such names mean."""
        return self._directions.get(name.rpartition("/")[2]) or direction_of(name)

    @property
    def logged(self) -> int:
        """Rows that the loggers have of the current step."""
        return self._loggers.rows_at(self.steps)

    @property
    def named_steps(self) -> Mapping[str, TrainStep]:
        """All steps by name; one that was given by itself is "step"."""
        return self.trained.named

    def named_step(self, name: str | None) -> TrainStep:
        """A step by its name, or the first."""
        if name is None:
            return self.step
        if name not in self.named_steps:
            known = ", ".join(self.named_steps)
            raise ArgumentError("fit", f"there is no step {name!r}", f"There are: {known}.")
        return self.named_steps[name]

    @property
    def is_updated(self) -> bool:
        """Whether the last call completed a step."""
        return self.step.micro_step == 0

    @property
    def values(self) -> dict[str, Any]:
        """Numbers that belong to the current step: of the step, and of a validation after it."""
        found: dict[str, Any] = {} if self.out is None else step_values(self.out)
        return found | self.evaluation if self.evaluated_at == self.steps else found

    def stop(self, reason: str) -> None:
        """End training after this step. The first reason counts."""
        self.stop_reason = self.stop_reason or reason

    def save(self) -> None:
        """Ask for a checkpoint after this step, where checkpoints are written."""
        self.wants_checkpoint = True

    def log(self, values: Mapping[str, Any]) -> None:
        """Add numbers to the history and the loggers, at the current step."""
        kept = scalars(values)
        self.history.record(self.steps, kept)
        self._loggers.log(self.steps, kept)

    def watch(
        self, captures: bool = False, grad_norms: bool = False, histograms: bool = False
    ) -> None:
        """In on_step_start: have `run.out` of this call hold more. See `step(batch, ...)`."""
        before = self.watched
        self.watched = Watched(
            before.captures or captures,
            before.grad_norms or grad_norms,
            before.histograms or histograms,
        )
