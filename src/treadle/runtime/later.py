"""Work that nobody waits for: done a moment later by a thread, or by whoever needs it done."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

DELAY = 2.0  # seconds: a program that was compiled is then past its first run


class Later:
    """Work by key, each done once, in the order in which it was given.

    A process that ends does what is left first. One that is forked leaves it to its parent.
    """

    def __init__(self) -> None:
        self._begin()
        atexit.register(self.finish)
        if hasattr(os, "register_at_fork"):
            # A thread that is at it is not in the child, and would hold its locks forever there.
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}
        self._lock, self._working = threading.Lock(), threading.RLock()
        self._thread: threading.Thread | None = None

    def add(self, key: str, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[key] = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def finish(self, key: str | None = None) -> None:
        """Do what is left now, if it has this key or any."""
        with self._working:  # another thread may be at it
            if key is not None and key not in self._waiting:
                return
            while self._waiting:
                with self._lock:
                    work = self._waiting.pop(next(iter(self._waiting)))
                work()

    def _run(self) -> None:
        threading.Event().wait(DELAY)
        with self._lock:
            self._thread = None  # what is given from now on has another
        self.finish()
