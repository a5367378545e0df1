"""Where in the user's code something came from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


_ours: dict[str, bool] = {}
_origins: dict[tuple[str, int, str], Origin] = {}


def _is_ours(file: str) -> bool:
    known = _ours.get(file)
    if known is None:
        # Methods that dataclasses generate have no file of their own.
        known = _ours[file] = file.startswith(PACKAGE) or file == "<string>"
    return known


def user_origin() -> Origin | None:
    """The innermost frame outside this package; the outermost one if there is none."""
    frame = sys._getframe(1)
    while _is_ours(frame.f_code.co_filename):
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    key = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    origin = _origins.get(key)
    if origin is None:
        origin = _origins[key] = Origin(*key)
    return origin
