"""How much memory there is, a refusal that says how much was wanted, and giving memory back."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from treadle.base.errors import OutOfMemoryError

MOST = 2**47  # bytes that a process can address, where nothing else is known


@cache
def memory_there() -> int:
    """Bytes of memory and swap of this machine."""
    try:
        own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return MOST
    return own + _swap() if own > 0 else MOST


def _swap() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(n.split()[1]) << 10 for n in lines if n.startswith("SwapTotal:")), 0)


def refuse_beyond(operation: str, what: str, nbytes: int) -> None:
    """An error for what needs more bytes than the machine has."""
    if nbytes <= memory_there():
        return
    raise OutOfMemoryError(
        operation,
        f"{what} needs {shown(nbytes)} ({nbytes:,} bytes), and this machine has "
        f"{shown(memory_there())}",
        "Use smaller sizes or batches.",
    )


def shown(nbytes: int) -> str:
    """An amount of memory, to read."""
    amount, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:,.4g} {unit}"


_UNITS = ("", "k", "M", "G", "T")


def bytes_in(text: str) -> int | None:
    """Bytes that a text says, as in "2GiB" and "1.5 MB"; None if it says none."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) *([kKMGT]?)(i?)B", text.strip())
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _UNITS.index(match[2].replace("K", "k")))


def give_back_memory() -> None:
    """What building freed goes back to the system, where the C library would keep it.

    Values are made in float64 and copied: a process would stay larger than its report says.
    """
    if os.name == "posix":
        with suppress(AttributeError, OSError):  # other C libraries have no such function
            ctypes.CDLL(None).malloc_trim(0)
