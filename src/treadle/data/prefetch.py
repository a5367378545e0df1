"""Batches made ahead by a thread, so many at most, with the position of what was handed over."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_whole
from treadle.base.trees import Tree
from treadle.data.loaders import Loader, Rewindable, State

PATIENCE = 1.0  # seconds that the end of the program waits for a loader that is blocked


class Prefetch:
    """A loader whose batches a thread makes ahead: at most `depth` of them wait.

    `state_dict` is the position of what was handed over, not of what was made. What the loader
    raises is raised where the batch was asked for. Starting another pass ends the one before.
    """

    def __init__(self, loader: Iterable[Tree], depth: int = 2):
        check_whole("Prefetch", "depth", depth)
        self._loader, self._depth = loader, depth
        self._run: _Run | None = None
        self._state: State | None = _state_of(loader)
        self._began: State | None = None  # where a pass that is not finished began

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Tree]:
        """The rest of the pass. One that is left early begins again where it began."""
        self.close()
        if self._began is not None and isinstance(self._loader, Loader):
            self._loader.load_state_dict(self._began)  # it ran ahead of what was handed over
        batches = iter(self._loader)  # first: it puts a loader back to where its pass begins
        self._began = self._state = _state_of(self._loader)
        self._run = _Run(self._loader, batches, self._depth)
        return self._delivered(self._run)

    def _delivered(self, run: _Run) -> Iterator[Tree]:
        try:
            while True:
                made = run.take()
                self._state = made.state
                if made.is_end:
                    self._began = None
                    return
                yield made.batch
        finally:
            run.stop()

    def state_dict(self) -> State:
        """The loader's position after the last batch that was handed over."""
        if self._state is None:
            raise ArgumentError(
                "Prefetch",
                f"a {type(self._loader).__name__} has no position",
                "Wrap it in an IterableLoader.",
            )
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next pass continues there."""
        self.close()
        if not isinstance(self._loader, Loader):
            raise ArgumentError(
                "Prefetch",
                f"a {type(self._loader).__name__} has no position",
                "Wrap it in an IterableLoader.",
            )
        self._loader.load_state_dict(state)
        self._state, self._began = _state_of(self._loader), None

    def begin_again(self) -> None:
        """The next pass begins at its first batch, wherever one that was left began."""
        self.close()
        if isinstance(self._loader, Loader) and self._began is not None:
            self._loader.load_state_dict(self._began)
        self._began = None
        if isinstance(self._loader, Rewindable):
            self._loader.begin_again()

    def close(self) -> None:
        """End the thread of a pass that was left."""
        if self._run is not None:
            self._run.stop()
            self._run = None


def _state_of(loader: object) -> State | None:
    return dict(loader.state_dict()) if isinstance(loader, Loader) else None


@dataclass(frozen=True, slots=True)
class _Made:
    """What the thread hands over: a batch, the end, or what was raised; and the position then."""

    batch: Tree = None
    state: State | None = None
    is_end: bool = False
    error: BaseException | None = None


class _Run:
    """One pass: a thread, and a queue that a semaphore bounds."""

    def __init__(self, loader: Iterable[Tree], batches: Iterator[Tree], depth: int):
        self._process = os.getpid()
        self._slots, self._stopped = threading.Semaphore(depth), threading.Event()
        self._queue: queue.SimpleQueue[_Made] = queue.SimpleQueue()
        # The thread holds no reference to this object, so that a pass that is dropped ends.
        arguments = (loader, batches, self._slots, self._queue, self._stopped)
        self._thread = threading.Thread(
            target=_produce, args=arguments, name="treadle-prefetch", daemon=True
        )
        _running.add(self)
        self._thread.start()

    def take(self) -> _Made:
        """The next batch; waits for it."""
        if self._process != os.getpid():
            raise ArgumentError(
                "Prefetch",
                "the process was forked in the middle of a pass, and threads stay behind",
                "Begin a pass in the child.",
            )
        if self._stopped.is_set():
            raise _ended()
        made = self._queue.get()
        self._slots.release()
        if made.error is not None:
            raise made.error
        return made

    def stop(self, seconds: float | None = None) -> None:
        """Wait for the thread to end. In a forked child there is none, and locks are not safe."""
        if self._process != os.getpid():
            return
        self._stopped.set()
        self._slots.release()
        # Joining is impossible from the thread itself, or once the interpreter stops threads.
        if threading.current_thread() is not self._thread and not sys.is_finalizing():
            self._thread.join(seconds)


def _produce(
    loader: Iterable[Tree],
    batches: Iterator[Tree],
    slots: threading.Semaphore,
    made: queue.SimpleQueue[_Made],
    stopped: threading.Event,
) -> None:
    try:
        while True:
            slots.acquire()
            if stopped.is_set():
                made.put(_Made(error=_ended()))  # for whoever still waits
                return
            try:
                batch = next(batches)
            except StopIteration:
                made.put(_Made(state=_state_of(loader), is_end=True))
                return
            made.put(_Made(batch, _state_of(loader)))
    except BaseException as error:
        made.put(_Made(error=error))


def _ended() -> ArgumentError:
    return ArgumentError(
        "Prefetch", "this pass was ended by another one or by close()", "Iterate again."
    )


_running: weakref.WeakSet[_Run] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Before the interpreter stops threads: afterwards a wait for one would never end."""
    for run in list(_running):
        run.stop(PATIENCE)
