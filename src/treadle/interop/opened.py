"""A file that is not trusted, as bytes that are read where they are: every access is checked."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from treadle.base.errors import LoadError
from treadle.runtime.files import as_path

MOST_ELEMENTS = 1 << 48  # what a process can address


def mapped(path: str | Path, what: str) -> tuple[Path, np.ndarray]:
    """The bytes of a file, uint8, mapped into memory: only what is looked at is read."""
    source = as_path("load", path)
    check_file(source)
    try:
        if not os.stat(source).st_size:
            raise LoadError("load", f"{source} is empty, not {what}", "Use another copy.")
        return source, np.memmap(source, np.uint8, "r")
    except OSError as error:
        raise LoadError("load", f"{source}: {error.strerror}", "Check the path.") from error


def check_file(source: Path) -> None:
    """An error for what is not there, a folder, a device or a pipe."""
    try:
        mode = os.stat(source).st_mode
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise LoadError("load", f"there is no file {source}", "Check the path.") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise LoadError("load", f"{source} is {what}, not a file", "Name a file.")


def is_possible(shape: Sequence[int]) -> bool:
    """Whether there can be an array of a shape: one without elements may still have huge axes."""
    return math.prod(max(1, n) for n in shape) <= MOST_ELEMENTS


def damaged(source: Path, cause: str) -> LoadError:
    return LoadError("load", f"{source} is damaged: {cause}", "Use another copy.")


@contextmanager
def damage(source: Path, *kinds: type[Exception]) -> Iterator[None]:
    """What another library raises at a file becomes an error that names it."""
    try:
        yield
    except LoadError:
        raise
    except kinds as error:
        raise damaged(source, f"{type(error).__name__}: {str(error)[:200]}") from error
