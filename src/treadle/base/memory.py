"""How much memory there is, and a refusal that says how much was wanted."""

from __future__ import annotations

import os
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
