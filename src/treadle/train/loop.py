"""The loop of `Trainer.fit`. Everything in it can be done by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from treadle.base.errors import ArgumentError, CheckpointWarning, NotFiniteError
from treadle.base.trees import Tree
from treadle.data.loaders import Loader, State
from treadle.metrics.metric import Group
from treadle.train.callback import Callbacks
from treadle.train.evaluation import evaluate
from treadle.train.interrupts import Interrupts
from treadle.train.loggers import Loggers
from treadle.train.not_finite import not_finite_error
from treadle.train.progress import Display, rate_of
from treadle.train.resume import RunFolder
from treadle.train.run import NOTHING, Run
from treadle.train.trained import Out, losses_of, results_of, step_values
from treadle.train.world import World

END = object()
VALIDATION = "val/"


class Plan(NamedTuple):
    """What one call of `fit` was asked for."""

    loader: Loader
    validation: Loader | None
    epochs: int | None  # until so many are finished
    steps: int | None  # until so many are made
    validate_every: int | None  # steps; None: at the end of each epoch
    save_every: int | None  # steps; None: at the end of each epoch
    most_validation: int | None = None  # batches
    stop_on_nan: bool = True
    log_every: int = 1


class Loop:
    """One call of `fit`. `position` is that of the data after the last step that was made."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        callbacks: Callbacks,
        loggers: Loggers,
        display: Display,
        folder: RunFolder | None,
        group: Group | None,
        interrupts: Interrupts,
        world: World,
    ):
        self.world = world
        self.run, self.plan, self.folder = run, plan, folder
        self._callbacks, self._loggers, self._display = callbacks, loggers, display
        self._group, self.interrupts = group, interrupts
        self._has_start, self._has_end = (
            callbacks.has("on_step_start"),
            callbacks.has("on_step_end"),
        )
        self.position: State = plan.loader.state_dict()
        self._held_out_position = self._next_pass()
        # Overflow is a matter of the loss scale there, and such steps are skipped.
        self._skips = run.trained.skips_overflows
        self.is_torn = False  # an error came between two steps of one call

    def train(self) -> None:
        """Passes over the data until what was asked for is done."""
        self._agree()
        self._catch_up()
        while not self._is_over() and not self._has_all_epochs():
            self._pass()
        self._finish()

    def _catch_up(self) -> None:
        """A run that was stopped while it validated does so first, and keeps it."""
        run = self.run
        before = run.evaluated_at
        if run.epoch_batches and self._is_due(self.plan.validate_every):
            self._validate()
        if run.evaluated_at != before and self.folder is not None:
            self.folder.saved_at = None
            self.save()

    def _is_over(self) -> bool:
        run, limit = self.run, self.plan.steps
        return run.stop_reason is not None or (limit is not None and run.steps >= limit)

    def _has_all_epochs(self) -> bool:
        return self.plan.epochs is not None and self.run.epoch >= self.plan.epochs

    def _pass(self) -> None:
        """The rest of a pass over the data; it is left where training is over."""
        run = self.run
        if not run.epoch_batches:
            self._callbacks.call("on_epoch_start", run)
        batches = iter(self.plan.loader)
        batch: Tree = next(batches, END)
        self.world.check_goes_on(batch is END, f"epoch {run.epoch}")
        while batch is not END:
            self._step(batch)
            self._agree()
            if self._is_over():
                return
            # The next batch tells whether this was the last: what is done at the end of an epoch
            # belongs to its last step, and a checkpoint comes after all that belongs to a step.
            self.interrupts.raise_if_asked()
            batch = next(batches, END)
            self.world.check_goes_on(batch is END, f"epoch {run.epoch}")
            if batch is not END:
                self._between()
                if self._is_over():
                    return
        self._end_epoch()

    def _agree(self) -> None:
        """What a callback or a signal asks of one rank is done by all, after the same step."""
        run, world = self.run, self.world
        if world.is_alone:
            return
        wishes = run.stop_reason is not None, run.wants_checkpoint, self.interrupts.signal
        stops, saves, signals = world.gathered(*map(int, wishes)).T
        run.wants_checkpoint = bool(saves.any())
        self.interrupts.signal = int(signals.max())
        if stops.any():
            reasons = world.told(run.stop_reason)
            rank = int(np.argmax(stops))
            run.stop(reasons[rank] if stops.all() else f"{reasons[rank]} (rank {rank})")

    def _step(self, batch: Tree) -> None:
        run, calls = self.run, self._callbacks.call
        run.batch, run.watched = batch, NOTHING
        if self._has_start:
            calls("on_step_start", run)
        out = run.out = self._call(batch)
        run.batches += 1
        run.epoch_batches += 1
        self.position = self.plan.loader.state_dict()
        if run.step.micro_step == 0:
            run.steps += 1
            values = step_values(out)
            run.history.record(run.steps, values)
            if run.steps % self.plan.log_every == 0:
                self._loggers.log(run.steps, {"epoch": run.epoch, **values})
        if self.plan.stop_on_nan:
            self._refuse_not_finite(out)
        if self._has_end:
            calls("on_step_end", run)
        self._display.step(run)

    def _call(self, batch: Tree) -> Out:
        """The step, or the user's function of several: what it left undone is noted."""
        trained = self.run.trained
        if not trained.can_tear:
            return trained(batch, self.run.watched)
        before = trained.position
        try:
            return trained(batch, self.run.watched)
        except BaseException:
            self.is_torn = trained.position != before
            raise

    def _refuse_not_finite(self, out: Out) -> None:
        """A loss that is no number ends training, before a checkpoint of it can be written.

        So does a gradient that made something of the step no number. Not every such gradient does:
        its norm may overflow by itself, and a transform may have dealt with it.
        """
        for result in results_of(out).values():
            if not math.isfinite(result.loss) and (result.updated or not self._skips):
                raise self._not_finite((), result.loss)
            norm = result.grad_norm
            if result.updated and norm is not None and not math.isfinite(norm):
                self._refuse_values()

    def _refuse_values(self) -> None:
        """Parameters or states that are no numbers end training, a last step's too."""
        wrong = self.run.trained.not_finite()
        if not self.world.is_alone:  # each rank has its part of the optimizer's state
            wrong = tuple(dict.fromkeys(n for names in self.world.told(wrong) for n in names))
        if wrong:
            found = {} if self.run.out is None else losses_of(self.run.out)
            raise self._not_finite(wrong, next(iter(found.values()), None))

    def _not_finite(self, names: tuple[str, ...], loss: float | None) -> NotFiniteError:
        run = self.run
        at = run.steps if run.is_updated else run.steps + 1
        last = None if self.folder is None else self.folder.manager.latest()
        place = f" (epoch {run.epoch}, batch {run.epoch_batches})"
        return not_finite_error("fit", names, at, last, loss, place)

    def _is_due(self, every: int | None) -> bool:
        run = self.run
        return every is not None and run.is_updated and run.steps > 0 and run.steps % every == 0

    def _between(self) -> None:
        """What comes after some steps inside a pass."""
        run = self.run
        if self._is_due(self.plan.validate_every):
            self._validate()
        is_due = self._is_due(self.plan.save_every) or run.wants_checkpoint
        if is_due and not self._is_over():
            self.save()

    def _end_epoch(self) -> None:
        run = self.run
        if not run.epoch_batches:
            raise ArgumentError("fit", f"epoch {run.epoch} has no batches", "The data is empty.")
        if self.plan.validate_every is None or self._is_due(self.plan.validate_every):
            self._validate()
        if self.plan.validation is None:
            run.log(self._rate())
        self._callbacks.call("on_epoch_end", run)
        self._agree()
        self._check_rates()
        run.epoch, run.epoch_batches = run.epoch + 1, 0
        self.position = self.plan.loader.state_dict()
        is_due = self.plan.save_every is None or self._is_due(self.plan.save_every)
        is_last = self._is_over() or self._has_all_epochs()  # then _finish has the last word
        if (is_due or run.wants_checkpoint) and not is_last:
            self.save()

    def _validate(self) -> None:
        """Once at a step, however often it is asked for."""
        run, data = self.run, self.plan.validation
        if data is None or run.evaluated_at == run.steps:
            return
        self._callbacks.call("on_eval_start", run)
        values = evaluate(run.step, self._stoppable(data), self._group, self.plan.most_validation)
        run.evaluation = {f"{VALIDATION}{name}": value for name, value in values.items()}
        run.evaluated_at = run.steps
        self._held_out_position = self._next_pass()
        run.log(run.evaluation | self._rate())
        self._callbacks.call("on_eval_end", run)
        self._agree()
        self._check_rates()
        if self.folder is not None:
            self.folder.check_metric(run)
        self._display.evaluated(run)

    def _check_rates(self) -> None:
        """A callback that lowers rates lowers them on every rank."""
        for name, step in self.run.named_steps.items():
            remedy = "Callbacks run on every rank: let them go by numbers that all ranks have."
            self.world.check_same("fit", f"the lr_scale of {name}", step.lr_scale, remedy)

    def _next_pass(self) -> State | None:
        """Where the next validation begins; one that is left begins again."""
        return None if self.plan.validation is None else self.plan.validation.state_dict()

    def _stoppable(self, batches: Iterable[Tree]) -> Iterator[Tree]:
        """An evaluation changes nothing, so that it can be left at any batch.

        Ranks finish it: they leave between two steps, all at the same one.
        """
        for batch in batches:
            if self.world.is_alone:
                self.interrupts.raise_if_asked()
            self.world.check_goes_on(False, "validation")
            yield batch
        self.world.check_goes_on(True, "validation")

    def _rate(self) -> dict[str, float]:
        rate = rate_of(self.run)
        return {} if rate is None else {"lr": rate}

    def save(self, is_rescue: bool = False) -> None:
        """A checkpoint of what was done so far, unless there is one."""
        run = self.run
        run.wants_checkpoint = False
        if self.folder is None or self.folder.is_saved(run):
            return
        try:
            self.folder.save(run, self.position, self._held_out_position, is_rescue)
        except NotFiniteError as error:
            if self.plan.stop_on_nan:
                raise
            cause = f"no checkpoint at step {run.steps}, training goes on: {error.cause}"
            warnings.warn(cause, CheckpointWarning, stacklevel=3)

    def _finish(self) -> None:
        """The last numbers and the last checkpoint."""
        run = self.run
        is_saved = self.folder is not None and self.folder.is_saved(run)
        if run.steps and self.plan.stop_on_nan and not is_saved:
            self._refuse_values()
        if run.steps:
            self._validate()
        self.save()
        run.history.stopped = run.stop_reason
        if run.stop_reason is not None:
            self._display.note(f"stopped after step {run.steps}: {run.stop_reason}")
        self._callbacks.call("on_fit_end", run)


def totals(plan: Plan, accumulate: int) -> int | None:
    """How many steps there will be, where that is known."""
    known: list[int] = [] if plan.steps is None else [plan.steps]
    length: Any = getattr(plan.loader, "__len__", None)
    if plan.epochs is not None and length is not None:
        with suppress(TypeError):  # a Prefetch of something without a length
            known.append(plan.epochs * int(length()) // accumulate)
    return min(known, default=None)
