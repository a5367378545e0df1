"""What goes back to the driver: memory, events, graphs, code. Never while a graph is captured."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

# Before these the driver waits for the work that uses what is given back, or lets it finish.
_WAITS_BY_ITSELF = frozenset(["cuMemFree", "cuEventDestroy", "cuGraphExecDestroy"])
_DROPPED = ""  # as a call: an object of a library that calls the driver itself


class Releases:
    """A queue that finalizers fill, and that is emptied where the driver may be called.

    Python runs finalizers wherever it drops or collects: on a thread without a context, and in the
    middle of a capture, which the driver gives up when it is asked to free. There is no lock:
    a finalizer may run while its own thread holds one.
    """

    def __init__(self, driver: Any, context: Any, stream: Any):
        self._driver, self._context, self._stream = driver, context, stream
        self._waiting: deque[tuple[str, Any]] = deque()
        self._is_held, self._is_open = False, True
        self.refused: Counter[str] = Counter()  # by call and what the driver said

    def give(self, call: str, handle: Any) -> None:
        """The driver's call on a handle: now, or after the capture that is under way."""
        if self._is_open:
            self._waiting.append((call, handle))
            self.drain()

    def drop(self, thing: object) -> None:
        """Refer to a library's object no more: now, or after the capture that is under way."""
        self.give(_DROPPED, thing)

    def hold(self) -> None:
        """From now on what is given waits."""
        self._is_held = True

    def go_on(self) -> None:
        self._is_held = False
        self.drain()

    def close(self) -> None:
        """The process ends: the driver takes back everything by itself."""
        self._is_open = False
        self._waiting.clear()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def drain(self) -> None:
        """Give back what waits, in its order; nothing while a graph is captured."""
        if not self._waiting or self._is_held:
            return
        self._driver.cuCtxPushCurrent(self._context)
        try:
            while self._waiting and not self._is_held:
                try:
                    call, handle = self._waiting.popleft()
                except IndexError:  # another thread took the last
                    return
                self._release(call, handle)
                del handle
        finally:
            self._driver.cuCtxPopCurrent()

    def _release(self, call: str, handle: Any) -> None:
        if call not in _WAITS_BY_ITSELF:
            self._driver.cuStreamSynchronize(self._stream)
        if call != _DROPPED:
            code = getattr(self._driver, call)(handle)[0]
            if int(code):
                self.refused[f"{call}: {getattr(code, 'name', int(code))}"] += 1
