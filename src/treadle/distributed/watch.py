"""A rank's side of the monitor: signs of life, what to do when another rank ends, one error."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from treadle.base.errors import DistributedError

BEAT = 1.0  # seconds between signs of life
ANSWER = 10.0  # seconds that the monitor has to answer
ADDRESS, TAG = 256, 0x7D  # bytes of an address; the tag of messages while ranks join
PAUSE = 0.005  # seconds between looks while ranks join
STATUS = "TREADLE_STATUS"  # where the monitor leaves what ended a job, for who has launched it
MOST_TEXT = 2000  # characters of an error
PACKAGE = str(Path(__file__).resolve().parents[1])


class Watch:
    """What this rank tells the monitor, and hears from it. `waits` counts exchanges."""

    def __init__(self, rank: int, size: int, address: dict[str, Any]):
        self.rank, self.size = rank, size
        self.waits, self.since = 0, 0.0  # when the current wait began; 0: it does not wait
        # Of machine code: how often it has waited, and whether it does. Another thread looks.
        self.native = np.zeros(2, np.int64)
        self.limit = float("inf")  # seconds that machine code may wait
        self._seen, self._seen_at = 0, 0.0  # the count of its current wait, and since when
        self._main = threading.main_thread().ident
        self._answered, self._may_tell = threading.Event(), True
        self._code: int | None = None  # of a failure that was told
        self._life = self._connect(address, "life")
        self._beats = self._connect(address, "beat")
        self._is_over = False
        self._rest = b""
        # A child that is forked must not hold the lifeline when this rank has died.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="treadle-watch", daemon=True).start()

    def _forget(self) -> None:
        global _watch
        _watch = None
        atexit.unregister(self.leave)
        for link in (self._life, self._beats):
            link.close()

    def _connect(self, address: dict[str, Any], kind: str) -> socket.socket:
        link = socket.create_connection((address["host"], address["port"]), ANSWER)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.set_inheritable(False)
        hello = {"token": address["token"], "rank": self.rank, "kind": kind}
        _send(link, **hello, process=os.getpid(), host=socket.gethostname())
        return link

    def begin_wait(self) -> None:
        self.waits += 1
        self.since = time.monotonic()

    def end_wait(self) -> None:
        self.since = 0.0

    def _listen(self) -> None:
        """In a thread: signs of life, and the end when the monitor says so."""
        while not self._is_over:
            waited = time.monotonic() - self.since if self.since else self._native_wait()
            _send(
                self._beats, waits=self.count, place=self._place(), waits_for_left=waited > 2 * BEAT
            )
            if not self.since and waited > self.limit:
                self._say_late(self.limit)
            with suppress(OSError, ValueError):
                if select.select([self._life], [], [], BEAT)[0]:
                    self._hear(self._life.recv(1 << 12))

    @property
    def count(self) -> int:
        """Waits so far."""
        return self.waits + int(self.native[0])

    def _native_wait(self) -> float:
        """Seconds of the wait that machine code is in."""
        count, waits = (int(word) for word in self.native)
        if not waits or count != self._seen:
            self._seen, self._seen_at = count, time.monotonic()
            return 0.0
        return time.monotonic() - self._seen_at

    def _say_late(self, seconds: float) -> None:
        _send(self._life, late=self.count, seconds=seconds)

    def _hear(self, data: bytes) -> None:
        if not data:  # without a monitor there are still the time limits of exchanges
            self._is_over = True
            self._answered.set()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if "end" in message:
                end_now(int(message["end"]))
            if "tells" in message:
                self._may_tell = bool(message["tells"])
                self._answered.set()

    def _place(self) -> str:
        """Where the main thread is, by the innermost line that is not the package's."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        innermost = frame
        while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, "<frozen")):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "nowhere"
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"

    def late(self, seconds: float) -> None:
        """This rank has waited too long. The monitor names who is missing and ends all ranks."""
        self._say_late(seconds)
        self._answered.wait(ANSWER)

    def may_tell(self, error: BaseException, code: int) -> bool:
        """Report a failure that ends this rank; whether it is the one that is shown."""
        if self._code is None:
            self._code = code
            text = f"{type(error).__name__}: {error}"[:MOST_TEXT]
            _send(self._life, failed=text, code=code, echo=_is_echo(error))
            self._answered.wait(ANSWER)
        return self._may_tell

    def leave(self) -> None:
        """At the end of the process, before MPI ends, which would wait for all ranks."""
        if self._code is not None:
            end_now(self._code)
        _send(self._life, left=self.count)
        self._is_over = True


def _is_echo(error: BaseException) -> bool:
    """Whether an error only repeats what another rank says."""
    return isinstance(error, DistributedError)


def _send(link: socket.socket, **message: object) -> None:
    with suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")


def end_now(code: int) -> None:
    """End the process as it is: MPI would wait for ranks that do not come."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


_watch: Watch | None = None


def failed(error: BaseException, code: int = 1) -> bool:
    """Whether an error that ends this process is to be shown here: of all ranks one shows its.

    A process by itself shows what it has; a rank's is under a line that names it.
    """
    if _watch is None:
        return True
    if not _watch.may_tell(error, code):
        return False
    if isinstance(error, Exception):  # a Ctrl-C is nobody's failure
        print(f"treadle: rank {_watch.rank} of {_watch.size} failed:", file=sys.stderr, flush=True)
    return True


def watching(world: Any, timeout: float) -> Watch | None:
    """The watch of this process, which the first call starts. All ranks call it."""
    global _watch
    rank, size = int(world.Get_rank()), int(world.Get_size())
    if _watch is None and size > 1:
        address = _meet(world, rank, size, timeout)
        if address is None:
            return None
        _watch = Watch(rank, size, address)
        atexit.register(_watch.leave)
        sys.excepthook = _shown_once(sys.excepthook)
    return _watch


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _shown_once(shows: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if failed(error, 130 if issubclass(kind, KeyboardInterrupt) else 1):
            shows(kind, error, trace)

    return hook


def _meet(world: Any, rank: int, size: int, timeout: float) -> dict[str, Any] | None:
    """Wait for all ranks, with a time limit, and tell them where the monitor listens."""
    end = time.monotonic() + timeout
    host = np.zeros(ADDRESS, np.uint8)
    name = socket.gethostname().encode()[:ADDRESS]
    host[: len(name)] = np.frombuffer(name, np.uint8)
    if rank:
        _await([world.Isend(host, 0, TAG)], [0], end, timeout, world)
        taken = np.zeros(ADDRESS, np.uint8)
        _await([world.Irecv(taken, 0, TAG)], [0], end, timeout, world)
        return _read_address(taken)
    hosts = np.zeros((size - 1, ADDRESS), np.uint8)
    requests = [world.Irecv(row, i + 1, TAG) for i, row in enumerate(hosts)]
    _await(requests, list(range(1, size)), end, timeout, world)
    is_one_host = all((row == host).all() for row in hosts)
    address = _start_monitor(size, "127.0.0.1" if is_one_host else socket.gethostname())
    given = np.zeros(ADDRESS, np.uint8)
    text = json.dumps(address).encode()
    given[: len(text)] = np.frombuffer(text, np.uint8)
    sent = [world.Isend(given, i, TAG) for i in range(1, size)]
    _await(sent, list(range(1, size)), end, timeout, world)
    return address


def _read_address(taken: np.ndarray) -> dict[str, Any] | None:
    found = json.loads(taken.tobytes().rstrip(b"\0") or b"null")
    return found if isinstance(found, dict) else None


def _await(requests: list[Any], ranks: list[int], end: float, timeout: float, world: Any) -> None:
    while late := [r for r, request in zip(ranks, requests, strict=True) if not request.Test()]:
        if time.monotonic() > end:
            atexit.register(world.Abort, 1)  # finalizing would wait for them
            raise DistributedError(
                "DataParallel",
                f"rank {', '.join(map(str, late))} has not joined within {timeout:g} s",
                "Every rank compiles the step. Allow more with DataParallel(timeout=…).",
            )
        time.sleep(PAUSE)


def _start_monitor(size: int, host: str) -> dict[str, Any] | None:
    """A process that outlives the ranks. Where there can be none, time limits must do."""
    token = os.urandom(16).hex()
    told = {"size": size, "token": token, "host": host, "status": os.environ.get(STATUS)}
    monitor = str(Path(__file__).with_name("monitor.py"))
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", monitor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.close()
        port = int(process.stdout.readline())
        process.stdout.close()
    except (OSError, ValueError):
        traceback.print_exc()
        return None
    process.returncode = 0  # it is nobody's to wait for
    return {"host": host, "port": port, "token": token}
