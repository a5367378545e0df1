"""What a callback is, and how callbacks are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, CallbackError
from treadle.train.run import Run

HOOKS = (
    "on_fit_start",
    "on_fit_end",
    "on_epoch_start",
    "on_epoch_end",
    "on_step_start",
    "on_step_end",
    "on_eval_start",
    "on_eval_end",
    "on_save",
    "on_load",
    "on_exception",
)


class Callback:
    """Base of callbacks: override what you need. Every hook gets the `Run`.

    What a callback must remember over a restart goes through `state_dict` (JSON) and `arrays`.
    An exception that is no failure of it, but says to the caller of `fit` how training ended, is
    one of `passes`: it gets there as it is.
    """

    passes: tuple[type[Exception], ...] = ()

    def on_fit_start(self, run: Run) -> None:
        """Before anything, also before a checkpoint is loaded."""

    def on_fit_end(self, run: Run) -> None:
        """After everything, where nothing was raised."""

    def on_epoch_start(self, run: Run) -> None:
        """Before the first batch of a pass; not where a pass is resumed in its middle."""

    def on_epoch_end(self, run: Run) -> None:
        """After the last batch of a pass, and after the validation that belongs to it."""

    def on_step_start(self, run: Run) -> None:
        """Before the step is called: `run.batch` is what it will get."""

    def on_step_end(self, run: Run) -> None:
        """After the step was called: `run.out` is what it gave."""

    def on_eval_start(self, run: Run) -> None:
        """Before a validation."""

    def on_eval_end(self, run: Run) -> None:
        """After a validation: `run.evaluation` has its values."""

    def on_save(self, run: Run) -> None:
        """Before a checkpoint is written, and before the states of callbacks are asked for."""

    def on_load(self, run: Run) -> None:
        """After a checkpoint was loaded, the states of callbacks too."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Training ends by an error, Ctrl-C too. What this raises is only a warning."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps for this callback: JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays that a checkpoint keeps for this callback."""
        return {}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from what `arrays` gave."""


class Lambda(Callback):
    """A callback of functions: `Lambda(on_epoch_end=lambda run: print(run.epoch))`."""

    def __init__(self, **hooks: Callable[..., None]):
        unknown = [name for name in hooks if name not in HOOKS]
        if unknown or not hooks:
            cause = f"no hook {', '.join(unknown)}" if unknown else "no hooks"
            raise ArgumentError("Lambda", cause, f"There are {', '.join(HOOKS)}.")
        self.__dict__ |= hooks


class Callbacks:
    """Callbacks as one. For each hook only those that have it are called."""

    def __init__(self, callbacks: Iterable[Callback] = ()):
        if isinstance(callbacks, Callback):
            cause = f"callbacks is one {type(callbacks).__name__}"
            raise ArgumentError("Trainer", cause, "Pass a list of them: [...].")
        self.all = tuple(callbacks)
        wrong = [c for c in self.all if not isinstance(c, Callback)]
        if wrong:
            is_class = isinstance(wrong[0], type)
            remedy = "Make one: add ()." if is_class else "Derive from td.callbacks.Callback."
            raise ArgumentError("Trainer", f"{wrong[0]!r} is not a callback", remedy)
        self._by_hook = {hook: [c for c in self.all if _has(c, hook)] for hook in HOOKS}

    def has(self, hook: str) -> bool:
        """Whether anything is called there."""
        return bool(self._by_hook[hook])

    def call(self, hook: str, run: Run) -> None:
        """Call a hook of all. Where one fails the others are called too, and then it is named."""
        failed: list[tuple[Callback, Exception]] = []
        for callback in self._by_hook[hook]:
            try:
                getattr(callback, hook)(run)
            except Exception as error:
                failed.append((callback, error))
        if failed:
            callback, cause = failed[0]
            if isinstance(cause, callback.passes):
                raise cause
            place = f"at step {run.steps}, epoch {run.epoch}"
            more = ", ".join(f"{type(c).__name__}: {e!r}" for c, e in failed[1:])
            remedy = "The step and the history are as they were before it."
            raise CallbackError(
                callback, hook, cause, place, f"{remedy} Also raised: {more}." if more else remedy
            ) from cause

    def exception(self, run: Run, error: BaseException) -> list[str]:
        """Tell all of an error; what they raise themselves, in words."""
        failed = []
        for callback in self._by_hook["on_exception"]:
            try:
                callback.on_exception(run, error)
            except Exception as own:
                failed.append(f"the callback {type(callback).__name__} raised {own!r}")
        return failed

    def named(self) -> dict[str, Callback]:
        """By class, and where a class is there several times by a number too."""
        found: dict[str, Callback] = {}
        for callback in self.all:
            name, number = type(callback).__name__, 1
            while (key := name if number == 1 else f"{name}.{number}") in found:
                number += 1
            found[key] = callback
        return found


@contextmanager
def naming(callback: Callback, hook: str, place: str) -> Iterator[None]:
    """What a callback raises inside is raised with its name."""
    try:
        yield
    except Exception as error:
        raise CallbackError(callback, hook, error, place, "Nothing was saved or loaded.") from error


def _has(callback: Callback, hook: str) -> bool:
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)
