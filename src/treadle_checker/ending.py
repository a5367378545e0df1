"""How a command ends when its reader goes away or Ctrl-C is pressed.

The codes are those of a shell for signals, so that neither is taken for a verdict.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE


def ended(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, once all of its output is written."""
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # a short output is written here, and may find its reader gone
    except BrokenPipeError:
        if not has_lost_reader():
            raise
        _discard()
        return CLOSED_PIPE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def has_lost_reader() -> bool:
    """Whether stdout or stderr is a pipe that nobody reads any more: a pager, or `head`."""
    return any(map(_is_lost, (sys.stdout, sys.stderr)))


def _is_lost(stream: TextIO) -> bool:
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # it is no file
        return False
    watched = select.poll()
    watched.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def _discard() -> None:
    """What is still buffered goes nowhere: the interpreter flushes it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if _is_lost(stream):
            os.dup2(nowhere, stream.fileno())
