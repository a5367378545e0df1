"""A file that grows by rows, and never has half of one in its middle."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path


class LogFile:
    """Rows of a log, as bytes. Each is in the file at once, or not at all."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._handle: int | None = None
        self._closing: weakref.finalize | None = None  # closes it, also if nobody does
        self._end = 0  # of the last whole row
        self._is_torn = False  # half a row follows it

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def begin(self, content: bytes = b"") -> None:
        """Exactly this, written aside and renamed; what comes next is appended."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            aside.write_bytes(content)
            aside.replace(self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        self.close()
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        self._closing = weakref.finalize(self, os.close, self._handle)
        self._end, self._is_torn = len(content), False

    def lines(self) -> list[str]:
        """Whole lines that are there: a process that was killed may have left half of one."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        return whole.decode("utf-8", errors="replace").split("\n")[:-1]

    def append(self, content: bytes) -> None:
        """One row more."""
        assert self._handle is not None
        if self._is_torn:
            self._mend(self._handle)
        written = 0
        try:
            while written < len(content):
                written += os.write(self._handle, content[written:])
        except OSError:
            self._is_torn = written > 0
            with suppress(OSError):
                self._mend(self._handle)
            raise
        self._end += len(content)

    def sync(self) -> None:
        """What was appended reaches the disk."""
        if self._handle is not None:
            os.fsync(self._handle)

    def _mend(self, handle: int) -> None:
        os.ftruncate(handle, self._end)
        self._is_torn = False

    def close(self) -> None:
        """Nothing more will come."""
        if self._closing is not None:
            self._closing()
        self._handle = self._closing = None
