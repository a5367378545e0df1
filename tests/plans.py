"""What the tests of the plan cache share: entries, where they lie, and calls that fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treadle.runtime.cache import fingerprint

PARTS = {"plan": b'{"kernels": []}', "object": bytes(range(256)) * 3, "empty": b""}
KEY = fingerprint(["graph", "options", "target"])
OTHER = fingerprint(["another graph"])


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "v1"))


def entry(folder: Path, key: str = KEY) -> Path:
    return folder / "v1" / f"{key}.plan"


def key(number: int) -> str:
    return fingerprint([str(number)])


def age(path: Path, seconds: float) -> None:
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def place(folder: Path, content: bytes, key: str = KEY) -> Path:
    """An entry's file with any content, such as the cache itself would not write."""
    path = entry(folder, key)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail
