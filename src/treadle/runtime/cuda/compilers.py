"""NVRTC in processes beside this one: a compiler that crashes ends its own process, not ours.

The processes wait for the next text, and end by themselves after a minute without one.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from treadle.base.errors import DeviceError
from treadle.runtime.cuda.device import INSTALL
from treadle.runtime.cuda.once import once

WORKER = Path(__file__).with_name("nvrtc_worker.py")


class CompilerProcess:
    """One process, which one thread at a time may ask."""

    def __init__(self, command: Sequence[str]):
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing)

    def compiled(self, text: str, options: Sequence[str]) -> tuple[int, bytes] | None:
        """NVRTC's result, and the cubin or what it said; None if the process ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        given = text.encode()
        head = " ".join([str(len(given)), *options]).encode() + b"\n"
        try:
            self._process.stdin.write(head + given)
            self._process.stdin.flush()
            answer = self._process.stdout.readline().split()
            if len(answer) != 2:
                return None
            result, count = map(int, answer)
            found = self._process.stdout.read(count)
        except OSError:
            return None
        return (result, found) if len(found) == count else None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and read what is left in its pipes."""
        self._process.kill()
        with suppress(OSError):
            self._process.communicate()


class Compilers:
    """Processes that compile; each is taken by one thread, and given back."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)
        self._idle: list[CompilerProcess] = []
        self._lock = threading.Lock()

    def begin(self, count: int) -> None:
        """Start some that will be asked soon."""
        with suppress(OSError), self._lock:
            while len(self._idle) < count:
                self._idle.append(CompilerProcess(self._command))

    def compiled(self, text: str, options: Sequence[str]) -> tuple[int, bytes] | None:
        """As a process gives it; None if the process ended while it compiled."""
        process = self._taken()
        found = process.compiled(text, options)
        if found is None:
            process.close()
        else:
            with self._lock:
                self._idle.append(process)
        return found

    def close(self) -> None:
        """End the processes that wait."""
        while self._idle:
            self._idle.pop().close()

    def _taken(self) -> CompilerProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive():
                    return process
                process.close()
        return CompilerProcess(self._command)


@once
def compilers() -> Compilers | None:
    """The processes of this one; None where no interpreter is there to run them."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return None
    found = Compilers([sys.executable, "-I", "-S", str(WORKER), nvrtc_path()])
    atexit.register(found.close)
    return found


def nvrtc_path() -> str:
    """The file of the library."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise DeviceError(
            "cuda", "the package cuda-pathfinder is not installed", INSTALL
        ) from error
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except RuntimeError as error:
        raise DeviceError("cuda", "NVRTC is not installed", INSTALL) from error
    assert path is not None
    return str(path)
