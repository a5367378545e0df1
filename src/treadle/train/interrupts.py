"""Ctrl-C in the middle of a step must not tear it: the wish is noted, and met between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

NOTE = b"\nstopping after this step; press Ctrl-C again to stop at once\n"


class Interrupts:
    """While it is entered, the first Ctrl-C only sets `signal`; the next one raises.

    With `terminate` so does SIGTERM. Handlers that others have installed are left alone, and
    threads other than the main one have none.
    """

    def __init__(self, terminate: bool) -> None:
        self.signal = 0  # the one that came, or 0
        self.is_met = False  # it was raised between two steps
        self._usual: dict[int, object] = {signal.SIGINT: signal.default_int_handler}
        if terminate:
            self._usual[signal.SIGTERM] = signal.SIG_DFL
        self._replaced: list[int] = []

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, usual in self._usual.items():
                if signal.getsignal(number) is usual:
                    signal.signal(number, self._note)
                    self._replaced.append(number)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            self._raise(number)
        self.signal = number
        if number == signal.SIGINT:
            os.write(2, NOTE)  # print is not safe here: the signal may have come inside one

    def raise_if_asked(self) -> None:
        """Between two steps."""
        if self.signal:
            self.is_met = True
            self._raise(self.signal)

    def tore(self, error: BaseException) -> bool:
        """Whether an error may have come in the middle of a step."""
        is_signal = isinstance(error, SystemExit) and self.signal == signal.SIGTERM
        return not self.is_met and (isinstance(error, KeyboardInterrupt) or is_signal)

    def _raise(self, number: int) -> None:
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number in self._replaced:
            signal.signal(number, self._usual[number])  # type: ignore[arg-type]
        self._replaced.clear()
