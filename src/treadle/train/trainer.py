"""`Trainer`: the loop around a step, with everything that is usually written by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from treadle.base.errors import ArgumentError, CheckpointWarning, NotFiniteError
from treadle.base.trees import Tree
from treadle.base.uncopied import uncopied
from treadle.data.loaders import IterableLoader, Loader, Rewindable, State, as_loader
from treadle.metrics.metric import Group, Metric
from treadle.train.callback import Callback, Callbacks
from treadle.train.checkpoint import CheckpointManager
from treadle.train.evaluation import Predictor, evaluate
from treadle.train.history import History
from treadle.train.interrupts import Interrupts
from treadle.train.loggers import Logger, Loggers
from treadle.train.loop import Loop, Plan, totals
from treadle.train.progress import Display, make_display
from treadle.train.restoring import Steps
from treadle.train.resume import RunFolder
from treadle.train.run import Run
from treadle.train.trained import Trained, TrainingStep
from treadle.train.world import World


@uncopied("Save its step, and make another trainer with a step that loads the file.")
class Trainer:
    """Trains a step on batches: validation, history, callbacks, loggers, checkpoints, progress.

    Several steps are a dict, and `training_step(steps, batch)` says how they are called; it returns
    what they gave, by name, with numbers of its own. The first of them validates.
    It is one run: a second `fit` goes on where the first one stopped. `metrics` is the
    `metrics.Group` that the loss captures, or a dict of its metrics; `progress` is "auto" (a bar on
    a terminal, else lines), "bar", "lines" or "off"; loggers get every `log_every`-th step.
    """

    def __init__(
        self,
        step: Steps,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Logger] = (),
        *,
        training_step: TrainingStep | None = None,
        metrics: Group | Mapping[str, Metric] | None = None,
        progress: str | bool = "auto",
        stop_on_nan: bool = True,
        log_every: int = 1,
    ):
        self._trained = Trained(step, training_step)
        _check_counts("Trainer", log_every=log_every)
        make_display(progress)  # a wrong name is an error here
        self.step = self._trained.main
        self._world = world = World.of(self._trained.named.values())
        # Of several ranks the first one logs and shows; all of them count the rows.
        self._callbacks = Callbacks(callbacks)
        self._loggers = Loggers(loggers if world.writes else ())
        self._progress = progress if world.writes else "off"
        group = metrics if metrics is None or isinstance(metrics, Group) else Group(metrics)
        self._group, self._stop_on_nan, self._log_every = group, stop_on_nan, log_every
        self._directions = {} if group is None else group.directions
        self._predictor = Predictor(self.step)
        self._run = Run(self._trained, self._loggers, self._directions)
        self._folder: Path | None = None  # that this run has written to
        self._data: tuple[object, Loader] | None = None  # what was trained on last
        self._position: State | None = None  # and how far

    @property
    def history(self) -> History:
        """What was recorded so far."""
        return self._run.history

    def fit(
        self,
        data: Iterable[Tree],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        validation: Iterable[Tree] | None = None,
        validate_every: int | None = None,
        checkpoint: str | Path | CheckpointManager | None = None,
        checkpoint_every: int | None = None,
        resume: str | Path | None = None,
        fast_dev_run: bool | int = False,
        overfit_batches: int | None = None,
    ) -> History:
        """Train for some epochs (passes over the data), or steps (updates), whichever ends first.

        Both are totals of the run: they count from its beginning, in a second `fit` and after
        `resume`, too. Validation and checkpoints come at the end of each epoch, or every so many
        steps, and at the end. `checkpoint` is a folder or a manager. `resume="auto"` goes on from
        its last checkpoint if there is one.
        `fast_dev_run` tries everything on one batch (or so many) and leaves the step as it was;
        `overfit_batches` trains and validates on the first few batches only.
        """
        _check_counts(
            "fit",
            epochs=epochs,
            steps=steps,
            validate_every=validate_every,
            checkpoint_every=checkpoint_every,
            overfit_batches=overfit_batches,
        )
        if resume is not None and checkpoint is None:
            raise ArgumentError("fit", "resume without checkpoint", "Say where: checkpoint=folder.")
        if fast_dev_run:
            return self._try_out(data, validation, int(fast_dev_run))
        if epochs is None and steps is None:
            raise ArgumentError("fit", "neither epochs nor steps", "Say how long to train.")
        held_out = None if validation is None else as_loader(validation)
        loader = self._loader(data, resume is None)
        if overfit_batches is not None:
            few = first_batches(loader, overfit_batches)
            loader, held_out = IterableLoader(few), IterableLoader(few)
        if held_out is loader:
            raise ArgumentError(
                "fit",
                "validation is the loader that is trained on, which has one position",
                "Make a second loader of the same data.",
            )
        plan = Plan(
            loader,
            held_out,
            epochs,
            steps,
            validate_every,
            checkpoint_every,
            stop_on_nan=self._stop_on_nan,
            log_every=self._log_every,
        )
        return self._fit(plan, checkpoint, resume)

    def _loader(self, data: Iterable[Tree], goes_on: bool) -> Loader:
        """The data as a loader; the one of the last fit, if the data is the same, goes on."""
        if self._data is not None and self._data[0] is data:
            loader = self._data[1]
            if goes_on and self._run.epoch_batches and self._position is not None:
                loader.load_state_dict(self._position)
            return loader
        self._run.epoch_batches = 0
        loader = as_loader(data)
        self._data = data, loader
        return loader

    def _fit(
        self, plan: Plan, checkpoint: str | Path | CheckpointManager | None, resume: Any
    ) -> History:
        run, folder = self._run, None
        if resume is None:
            _check_left(plan, run)
        run.loader, run.validates = plan.loader, plan.validation is not None
        run.stop_reason = run.history.stopped = None
        metric = "loss" if plan.validation is None else "val/loss"
        if checkpoint is not None:
            folder = RunFolder(checkpoint, self._callbacks, metric, self._world)
        try:
            with Interrupts(terminate=folder is not None) as interrupts:
                self._callbacks.call("on_fit_start", run)
                note = self._begin(plan, folder, resume)
                display = make_display(self._progress)
                loop = Loop(
                    run,
                    plan,
                    self._callbacks,
                    self._loggers,
                    display,
                    folder,
                    self._group,
                    interrupts,
                    self._world,
                )
                with _shown(display, run, plan):
                    if note:
                        display.note(note)
                    self._guarded(loop)
        finally:
            if folder is not None:
                folder.close()
            for loader in (plan.loader, plan.validation):
                if isinstance(loader, Rewindable):
                    loader.begin_again()  # whoever iterates over it next gets a whole pass
        return run.history

    def _begin(self, plan: Plan, folder: RunFolder | None, resume: Any) -> str:
        """From the start, or from a checkpoint; what to say of it."""
        run = self._run
        if folder is None:
            return ""
        if resume is None:
            folder.start(run, folder.folder == self._folder)
            self._folder = folder.folder
            return ""
        found = folder.restore(run, resume, plan.loader, plan.validation)
        self._folder = folder.folder
        if found is None:
            self._loggers.resume(0)
            return ""
        self._position = plan.loader.state_dict()
        self._loggers.resume(run.steps, folder.logged)
        self._callbacks.call("on_load", run)
        return f"resumed at step {run.steps} from {found.path}"

    def _guarded(self, loop: Loop) -> None:
        """Whatever ends training early, what was done so far is saved, unless it is broken."""
        run, folder = self._run, loop.folder
        try:
            try:
                loop.train()
            finally:
                self._position = loop.position
        except BaseException as error:
            for problem in self._callbacks.exception(run, error):
                warnings.warn(f"on_exception: {problem}", RuntimeWarning, stacklevel=4)
            kept = _keep(loop, error)
            if isinstance(error, KeyboardInterrupt) and not error.args:
                error.args = (f"stopped after step {run.steps}",)
            if kept and folder is not None:
                error.add_note(
                    f"Training got to step {run.steps}, which is saved in {folder.folder}: "
                    'go on with resume="auto".'
                )
            raise

    def _try_out(
        self, data: Iterable[Tree], validation: Iterable[Tree] | None, batches: int
    ) -> History:
        """Everything once, without a trace: no loggers, no checkpoints, the step as it was."""
        before = self._trained.state()
        run = Run(self._trained, Loggers(), self._directions)
        run.validates = validation is not None
        loader = IterableLoader(first_batches(as_loader(data), batches))
        held_out = None if validation is None else as_loader(validation)
        plan = Plan(loader, held_out, 1, None, None, None, batches, self._stop_on_nan)
        display: Display = make_display(self._progress)
        try:
            with Interrupts(terminate=False) as interrupts, _shown(display, run, plan):
                self._callbacks.call("on_fit_start", run)
                Loop(
                    run,
                    plan,
                    self._callbacks,
                    Loggers(),
                    display,
                    None,
                    self._group,
                    interrupts,
                    self._world,
                ).train()
        finally:
            self._trained.load(before)
        return run.history

    def evaluate(self, data: Iterable[Tree]) -> dict[str, Any]:
        """Loss and metrics over all batches, each row counted once; nothing changes."""
        return evaluate(self.step, as_loader(data), self._group)

    def predict(self, data: Iterable[Tree], forward: Callable[..., Any] | None = None) -> Tree:
        """`forward(model, batch)` of every batch, put together along the first axis.

        Without a forward it is the model of the batch, or of its "x" where batches are dicts.
        """
        return self._predictor.predict(as_loader(data), forward)

    def close(self) -> None:
        """Close the loggers."""
        self._loggers.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _shown(display: Display, run: Run, plan: Plan) -> Iterator[None]:
    display.start(run, plan.epochs, totals(plan, run.step.recipe.accumulate))
    try:
        yield
    finally:
        display.close(run)


def _check_counts(operation: str, **counts: int | None) -> None:
    for name, count in counts.items():
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if count is not None and not is_count:
            raise ArgumentError(operation, f"{name} = {count!r}", "A whole number of at least 1.")


def first_batches(loader: Loader, count: int) -> list[Tree]:
    found = list(islice(iter(loader), count))
    if not found:
        raise ArgumentError("fit", "there are no batches", "The data is empty.")
    return found


def _check_left(plan: Plan, run: Run) -> None:
    """A fit that would do nothing is an error, unless it resumes."""
    counts = (("epochs", plan.epochs, run.epoch), ("steps", plan.steps, run.steps))
    for name, wanted, done in counts:
        if wanted is not None and done >= wanted:
            raise ArgumentError(
                "fit",
                f"{name}={wanted}, and this run has had {done} {name}",
                f"{name} counts from the beginning of the run: pass {name}={done + wanted} for "
                f"{wanted} more, or make a new Trainer.",
            )


def _keep(loop: Loop, error: BaseException) -> bool:
    """Save what was done before an error, where that is a whole number of steps."""
    if loop.folder is None or not loop.run.batches or loop.interrupts.tore(error) or loop.is_torn:
        return False
    if isinstance(error, NotFiniteError):
        return False
    # All ranks save together: where one has failed by itself, the others do not come.
    if not (loop.world.is_alone or loop.interrupts.is_met):
        return False
    try:
        loop.save(is_rescue=True)
    except Exception as own:
        warnings.warn(f"no checkpoint at the end: {own}", CheckpointWarning, stacklevel=5)
    return loop.folder.is_saved(loop.run)
