"""Where in the user's code something came from."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parent.parent)
LIBRARY = os.path.dirname(os.__file__)  # Python's own


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of the user's code.

    `mark` is the position of a node before a pass, which those that come of it still have after it.
    """

    file: str
    line: int
    function: str
    mark: int = field(default=-1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


_ours: dict[str, bool] = {}
_origins: dict[tuple[str, int, str], Origin] = {}


def is_own(file: str) -> bool:
    """Whether a file is of this package or of Python, and so no place of the user's."""
    known = _ours.get(file)
    if known is None:
        # Methods that dataclasses generate have no file of their own.
        known = _ours[file] = file.startswith(PACKAGE) or file == "<string>" or _is_python(file)
    return known


def _is_python(file: str) -> bool:
    """Whether it is the standard library: contextlib calls what a `with` enters."""
    inside = file.removeprefix(LIBRARY) if file.startswith(LIBRARY) else ""
    return file.startswith("<frozen ") or bool(inside and "-packages" not in inside)


def user_origin() -> Origin | None:
    """The innermost frame outside this package and Python's own; if there is none, the outermost.

    A function of the user's that the standard library calls is still the user's.
    """
    frame = sys._getframe(1)
    while is_own(frame.f_code.co_filename):
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    key = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    origin = _origins.get(key)
    if origin is None:
        origin = _origins[key] = Origin(*key)
    return origin
