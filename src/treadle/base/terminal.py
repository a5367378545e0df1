"""Text for a terminal: styles, tables, and one line that is drawn over itself."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO, cast

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36", "figure": "1;36"}
GREYS = 232, 24  # the first of the 256 colours that are shades of grey, and how many there are
BAR = 24  # columns


class Terminal:
    """A stream, and what may be written to it: colours, a line that is drawn over."""

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        is_live: bool | None = None,
        has_colours: bool | None = None,
    ):
        self.file = sys.stdout if file is None else file
        self.is_live = self.file.isatty() if is_live is None else is_live
        self.has_colours = _has_colours(self.is_live) if has_colours is None else has_colours

    def styled(self, text: str, style: str | None) -> str:
        if style is None or not text or not self.has_colours:
            return text
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m"

    def say(self, text: str, style: str | None = None) -> None:
        print(self.styled(text, style), file=self.file, flush=True)

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns


def _has_colours(is_live: bool) -> bool:
    """As https://no-color.org and https://force-color.org say, else on a terminal that can."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (is_live and os.environ.get("TERM") != "dumb")


def grey(value: float) -> str:
    """Two columns in a shade from black, 0, to white, 1."""
    first, count = GREYS
    return f"\x1b[48;5;{first + round(value * (count - 1))}m  \x1b[0m"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, each as wide as its widest cell. The first line has the titles."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (titles, *rows)
    ]


class Line:
    """A line at the bottom that is drawn over. What is printed meanwhile goes above it."""

    def __init__(self, terminal: Terminal):
        self.terminal = terminal
        self._is_drawn = self._is_within = False  # within a line that someone else began
        self._streams = self._ours = sys.stdout, sys.stderr
        encoding = terminal.file.encoding or "utf-8"
        self._ink = "━" if _can_encode("━", encoding) else "#"

    def start(self) -> None:
        self._streams = sys.stdout, sys.stderr
        sys.stdout = cast(TextIO, _Above(self, sys.stdout))
        sys.stderr = cast(TextIO, _Above(self, sys.stderr))
        self._ours = sys.stdout, sys.stderr

    def stop(self, keep: bool = True) -> None:
        """Give the streams back. The line stays, or is wiped out."""
        if (sys.stdout, sys.stderr) == self._ours:  # else someone redirected them meanwhile
            sys.stdout, sys.stderr = self._streams
        if keep and self._is_drawn:
            self._write("\n")
            self._is_drawn = False
        self.erase()

    def draw(self, left: str, share: float | None, right: str) -> None:
        """A bar between two texts: how much of it is full, or None for none at all."""
        if self._is_within:
            return
        room = self.terminal.width - 1  # a full line would wrap
        left = left[:room]
        has_bar = share is not None and len(left) + BAR + 2 <= room
        right = right[: max(0, room - len(left) - (BAR + 2 if has_bar else 1))]
        bar = f"{self._bar(share or 0.0)} " if has_bar else ""
        text = f"{left} {bar}{right}".rstrip()
        self._write(f"\r{text}\x1b[K")
        self._is_drawn = True

    def _bar(self, share: float) -> str:
        done = round(min(max(share, 0.0), 1.0) * BAR)
        full = self.terminal.styled(self._ink * done, "cyan")
        if not self.terminal.has_colours:
            return full + " " * (BAR - done)
        return full + self.terminal.styled(self._ink * (BAR - done), "dim")

    def say(self, text: str) -> None:
        """A line above."""
        self.erase()
        self._write(text + "\n")

    def erase(self) -> None:
        if self._is_drawn:
            self._write("\r\x1b[K")
            self._is_drawn = False

    def printed(self, text: str) -> None:
        """Someone else printed this, and may go on where it ends."""
        if text:
            self._is_within = not text.endswith("\n")

    def _write(self, text: str) -> None:
        self.terminal.file.write(text)
        self.terminal.file.flush()


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _Above:
    """Stands for a stream while a line is drawn, and wipes it out before anything is written."""

    def __init__(self, line: Line, stream: TextIO):
        self._line, self._stream = line, stream

    def write(self, text: str) -> int:
        self._line.erase()
        self._line.printed(text)
        return self._stream.write(text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
