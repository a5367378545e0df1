"""Calls in a thread of their own, which Ctrl-C does not cut short.

Python raises KeyboardInterrupt in the main thread alone, between any two of its instructions.
llvmlite frees memory in one and notes it in the next: cut between them it frees the same memory
once more, and the process ends. A lock that it holds then is never released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event
from typing import Generic, TypeVar

T = TypeVar("T")


class _Call(threading.Thread, Generic[T]):
    """One call. The interpreter waits for it before it ends."""

    def __init__(self, function: Callable[[Callable[[], bool]], T]):
        super().__init__(name="treadle-aside")
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.is_wanted, self.is_over = True, Event()

    def run(self) -> None:
        try:
            _do_later()
            self._results.append(self._function(lambda: self.is_wanted))
        except BaseException as error:
            self._error = error
        if not self.is_wanted:
            self._results.clear()  # what was made is freed here
        self.is_over.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results.pop()


def aside(function: Callable[[Callable[[], bool]], T]) -> T:
    """What a function returns. It is given a function that says whether it is still waited for.

    Where the caller is interrupted, the function runs on and its result is dropped. `Thread.join`
    is not used: an interrupt in it lets Python forget the thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(lambda: True)
    call = _Call(function)
    try:
        call.start()
        call.is_over.wait()
    except BaseException:
        call.is_wanted = False
        raise
    return call.result()


_later = SimpleQueue[Callable[[], object]]()


def with_next(function: Callable[[], object]) -> None:
    """Call a function with the next call aside. A finalizer may ask for it at any moment."""
    _later.put(function)


def _do_later() -> None:
    while True:
        try:
            function = _later.get_nowait()
        except Empty:
            return
        function()
