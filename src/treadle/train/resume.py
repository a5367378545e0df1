"""A run on disk: checkpoints with the position in the data, and the history beside them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import (
    ArgumentError,
    CallbackError,
    CheckpointError,
    CheckpointWarning,
    LoadError,
)
from treadle.data.loaders import Loader, State
from treadle.train.callback import Callbacks, naming
from treadle.train.checkpoint import Checkpoint, CheckpointManager
from treadle.train.history import History, HistoryFile
from treadle.train.loggers import scalars
from treadle.train.manifest import as_json
from treadle.train.run import Run
from treadle.train.world import World

KIND, VERSION = "treadle run", 1
HISTORY = "history.jsonl"
COUNTERS = ("epoch", "steps", "batches", "epoch_batches", "evaluated_at")


class RunFolder:
    """Writes checkpoints of a run and finds the one to go on from."""

    def __init__(
        self,
        checkpoint: str | Path | CheckpointManager,
        callbacks: Callbacks,
        metric: str,
        world: World,
    ):
        self._world = world
        self._is_ours = not isinstance(checkpoint, CheckpointManager)
        self.manager = (
            checkpoint
            if isinstance(checkpoint, CheckpointManager)
            else CheckpointManager(checkpoint)
        )
        self.manager.rank_by_default(metric)
        self.folder = self.manager.folder
        self._callbacks = callbacks
        self._file = HistoryFile(self.folder / HISTORY)
        self.saved_at: tuple[int, int] | None = None  # batches and finished epochs then
        self.last: Checkpoint | None = None  # the last that was written or loaded

    def start(self, run: Run, is_known: bool) -> None:
        """A run from its beginning. A folder with checkpoints of another run is refused."""
        found = self.manager.latest()
        if found is not None and not is_known:
            raise CheckpointError(
                "fit",
                f"{self.folder} has checkpoints of another run, the last at step {found.count}",
                'Go on with that run by resume="auto", or use another folder.',
            )
        self._begin_file(run.history)

    def _begin_file(self, history: History) -> None:
        """The file of the history, which the first of several ranks writes."""
        if self._world.writes:
            self._file.begin(history)

    def restore(
        self, run: Run, which: str | Path, loader: Loader, validation: Loader | None
    ) -> Checkpoint | None:
        """Go on from a checkpoint: step, position in the data, callbacks, history, counters."""
        before = run.trained.state()
        positions = [(own, own.state_dict()) for own in (loader, validation) if own is not None]
        found = self.manager.restore(run.trained.saved, which)
        if found is None:
            self._begin_file(run.history)
            return None
        try:
            extra = _checked(found)
            _load_position(loader, extra["loader"], found)
            if validation is not None and extra["validation"] is not None:
                _load_validation(validation, extra["validation"], found)
            self._load_callbacks(extra["callbacks"], found)
        except BaseException:
            run.trained.load(before)
            for own, position in positions:
                own.load_state_dict(position)
            raise
        run.trained.load_calls(extra.get("forwards", []))
        for name in COUNTERS:
            setattr(run, name, extra[name])
        run.history = self._read_history(extra["steps"])
        self._world.gathered()  # all have read it before it is written
        self._begin_file(run.history)
        self.saved_at, self.last = (run.batches, run.epoch), found
        return found

    @property
    def logged(self) -> int:
        """Rows that loggers had of the step of the checkpoint that was loaded."""
        return 0 if self.last is None else int(self.last.extra["logged"])

    def _read_history(self, upto: int) -> History:
        try:
            history = self._file.read(upto)
        except (ValueError, KeyError, TypeError, LookupError, ArgumentError) as error:
            cause = f"{self.folder / HISTORY} cannot be read ({error}): the history begins anew"
            warnings.warn(cause, CheckpointWarning, stacklevel=4)
            return History()
        if upto and not len(history):
            cause = f"{self.folder} has no {HISTORY}: the history begins at step {upto}"
            warnings.warn(cause, CheckpointWarning, stacklevel=4)
        return history

    def _load_callbacks(self, states: Mapping[str, Any], found: Checkpoint) -> None:
        own = self._callbacks.named()
        arrays = found.arrays()
        for name, callback in own.items():
            start = f"{name}:"
            given = {n[len(start) :]: a for n, a in arrays.items() if n.startswith(start)}
            with naming(callback, "load_state_dict", found.path.name):
                if name in states:
                    callback.load_state_dict(states[name])
                if given:
                    callback.load_arrays(given)
        lost = [name for name, state in states.items() if name not in own and state]
        if lost:
            cause = f"{found.path.name} has the state of callbacks that are not here: "
            warnings.warn(cause + ", ".join(lost), CheckpointWarning, stacklevel=5)

    def is_saved(self, run: Run) -> bool:
        return self.saved_at == (run.batches, run.epoch)

    def save(
        self, run: Run, position: State, validation: State | None, is_rescue: bool = False
    ) -> Checkpoint | None:
        """Write a checkpoint; None, and a warning, where that fails: training goes on.

        A rescue is a checkpoint because of an error: callbacks that fail again are left out of it.
        """
        try:
            self._callbacks.call("on_save", run)
        except CallbackError as error:
            _raise_unless(is_rescue, error)
        states, arrays = self._callback_states(run, is_rescue)
        extra = {name: getattr(run, name) for name in COUNTERS} | {
            "kind": KIND,
            "version": VERSION,
            "loader": position,
            "validation": validation,
            "callbacks": states,
            "logged": run.logged,
            "forwards": run.trained.calls(),
        }
        values = scalars(run.values)
        metrics = values if self.manager.metric in values else {}
        try:
            self._append(run.history)
            steps = run.trained.saved
            self.last = self.manager.save(steps, metrics=metrics, extra=extra, arrays=arrays)
        except (CheckpointError, OSError) as error:
            cause = getattr(error, "cause", str(error))
            text = f"no checkpoint at step {run.steps}, training goes on: {cause}"
            if self._world.writes:
                warnings.warn(text, CheckpointWarning, stacklevel=3)
            return None
        self.saved_at = (run.batches, run.epoch)
        return self.last

    def _append(self, history: History) -> None:
        if self._world.is_alone:
            self._file.append(history)
        else:
            append = self._file.append
            self._world.agreed("save", lambda: append(history) if self._world.writes else None)

    def _callback_states(
        self, run: Run, is_rescue: bool
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        states: dict[str, Any] = {}
        arrays: dict[str, np.ndarray] = {}
        for name, callback in self._callbacks.named().items():
            try:
                with naming(callback, "state_dict", f"at step {run.steps}"):
                    state, own = as_json(callback.state_dict()), callback.arrays()
            except CallbackError as error:
                _raise_unless(is_rescue, error)
                continue
            if state:
                states[name] = state
            arrays |= {f"{name}:{key}": array for key, array in own.items()}
        return states, arrays

    def check_metric(self, run: Run) -> None:
        """After a validation: the best is by something that is known by now."""
        wanted = self.manager.metric
        if self.manager.keep_best and wanted not in scalars(run.values):
            known = ", ".join(scalars(run.values))
            raise ArgumentError(
                "fit",
                f"the best checkpoint is by {wanted!r}, which a validation does not give",
                f"Make the CheckpointManager with one of: {known}; or with keep_best=0.",
            )

    def close(self) -> None:
        """Let others write."""
        self._file.close()
        if self._is_ours:
            self.manager.close()


def _raise_unless(is_rescue: bool, error: CallbackError) -> None:
    if not is_rescue:
        raise error
    warnings.warn(f"{error.cause}: it has no state in the checkpoint", CheckpointWarning, 6)


def _checked(found: Checkpoint) -> dict[str, Any]:
    """What a trainer wrote beside the step."""
    extra = found.extra
    if not isinstance(extra, dict) or extra.get("kind") != KIND:
        raise CheckpointError(
            "fit",
            f"{found.path} was not written by a Trainer: it has no position in the data",
            "Load it with CheckpointManager.restore, and train without resume.",
        )
    if extra.get("version") != VERSION:
        cause = f"{found.path} is of version {extra.get('version')} of runs, not {VERSION}"
        raise CheckpointError("fit", cause, "Use the version of Treadle that wrote it.")
    # A manifest's checksum is no signature: what it says of a run may be anything.
    lacking = [name for name in (*COUNTERS, "loader", "validation") if name not in extra]
    lacking += [n for n in (*COUNTERS[:-1], "logged") if not _is_count(extra.get(n))]
    lacking += [] if isinstance(extra.get("callbacks"), dict) else ["callbacks"]
    if lacking:
        cause = f"{found.path} says nothing that makes sense of {', '.join(lacking)}"
        raise CheckpointError("fit", cause, "Use another checkpoint.")
    return extra


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _load_position(loader: Loader, state: Mapping[str, int], found: Checkpoint) -> None:
    try:
        loader.load_state_dict(state)
    except LoadError as error:
        raise CheckpointError(
            "fit",
            f"{found.path} is of a run on other data: {error.cause}",
            "Pass the data it was trained on, or use another folder.",
        ) from error


def _load_validation(loader: Loader, state: Mapping[str, int], found: Checkpoint) -> None:
    """A validation begins at its beginning, so that other data is no reason not to go on."""
    try:
        loader.load_state_dict(state)
    except LoadError as error:
        cause = f"{found.path.name} was validated on other data: {error.cause}"
        advice = "numbers from here on cannot be compared with those before"
        warnings.warn(f"{cause}: {advice}", CheckpointWarning, stacklevel=5)
