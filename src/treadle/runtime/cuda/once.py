"""What a process has one of: a library, its handle, memory that all programs share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """A function whose first result is everybody's; threads that ask meanwhile wait for it.

    `functools.cache` would call it for each of them. An error is not kept: the next one asks anew.
    """

    def __init__(self, function: Callable[[], T]):
        self._function, self._lock = function, threading.RLock()
        self._found: list[T] = []
        self.__doc__ = function.__doc__

    def __call__(self) -> T:
        if not self._found:  # afterwards nobody needs the lock
            with self._lock:
                if not self._found:
                    self._found.append(self._function())
        return self._found[0]

    @property
    def is_known(self) -> bool:
        return bool(self._found)

    def cache_clear(self) -> None:
        """The next that asks finds out anew."""
        self._found = []


def once(function: Callable[[], T]) -> Once[T]:
    return Once(function)
