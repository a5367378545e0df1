"""Processes that plan convolutions of cuDNN beside this one, begun while a program is scheduled.

cuDNN compiles kernels of one plan after the other, whatever threads ask for them: 0.23 s for each
depthwise convolution, of which a network has dozens. Other processes do so meanwhile; a plan of
theirs is read here in 15 ms. Where none can be started everything is planned here.
"""

from __future__ import annotations

import base64
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from treadle.base.records import to_json
from treadle.kernel.launch import LibraryLaunch
from treadle.runtime.cpu.processors import default_threads

READY = b"ready\n"
MODULE = "treadle.runtime.cuda.plan_worker"
PATIENCE = 20  # seconds without an answer after which a process counts as gone


@dataclass(frozen=True, slots=True)
class Asked:
    """A convolution, and the number of the plan that is wanted."""

    call: LibraryLaunch
    number: int


class PlanWorker:
    """A process, which one thread at a time may ask."""

    def __init__(self, command: Sequence[str]):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment
        )

    def is_ready(self) -> bool:
        """Waits until it can be asked; whether it ever can."""
        return self._line() == READY

    def planned(self, asked: Asked) -> bytes | None:
        """A packed plan; nothing where it has none, None where the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_json(asked).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            return None
        line = self._line()
        return base64.b64decode(line.strip()) if line else None

    def _line(self) -> bytes:
        found = self._process.stdout
        assert found is not None
        try:
            # It writes a line for each that it reads: nothing waits in the buffer.
            return found.readline() if select.select([found], [], [], PATIENCE)[0] else b""
        except (OSError, ValueError):  # it was closed meanwhile
            return b""

    def close(self) -> threading.Thread:
        """It ends at once; the thread takes away what is left of it."""
        self._process.kill()
        thread = threading.Thread(target=self._process.communicate)
        thread.start()
        return thread


_begun: list[PlanWorker] = []  # by the program that is being scheduled; taken when it is loaded


def begin_workers(count: int) -> None:
    """Start some, unless some wait already or there are few processors."""
    is_program = bool(getattr(sys, "frozen", False)) or not sys.executable  # no interpreter
    if _begun or is_program or default_threads() < 4:
        return
    with suppress(OSError):  # no more processes
        for _ in range(count):
            _begun.append(PlanWorker([sys.executable, "-P", "-m", MODULE]))


def begun_workers() -> list[PlanWorker]:
    """Those that were begun; they are the caller's to close."""
    found = _begun.copy()
    _begun.clear()
    return found


def close_workers(workers: Sequence[PlanWorker], waits: bool = False) -> None:
    """They end; `waits` until they are gone, with their memory."""
    closing = [worker.close() for worker in workers]
    for thread in closing if waits else ():
        thread.join()
