"""Named arrays on disk: safetensors, written aside and renamed, read without trust."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from treadle.base.errors import LoadError

SCHEMA = 1


def save_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], kind: str) -> None:
    """Write the file aside, flush it to the disk, then rename: a reader sees all of it or none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = encode_arrays(arrays, kind)
    handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, target)
        sync_folder(target.parent)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def encode_arrays(arrays: Mapping[str, np.ndarray], kind: str) -> bytes:
    """The bytes of a safetensors file that `load_arrays` reads."""
    from safetensors.numpy import save

    metadata = {"treadle": json.dumps({"schema": SCHEMA, "kind": kind})}
    return save({n: np.asarray(a, order="C") for n, a in arrays.items()}, metadata)


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """What was made or renamed in a folder reaches the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_arrays(path: str | Path, kind: str) -> dict[str, np.ndarray]:
    """The arrays of a file that `save_arrays` wrote; anything else is refused by name."""
    from safetensors import SafetensorError, safe_open

    source = Path(path)
    if not source.is_file():
        raise LoadError("load", f"there is no file {source}")
    try:
        with safe_open(str(source), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("treadle", "null"))
            _check_header(source, header, kind)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(
            "load", f"{source} is damaged or not a safetensors file: {error}", "Use another copy."
        ) from error


def _check_header(source: Path, header: object, kind: str) -> None:
    if not isinstance(header, dict):
        raise LoadError(
            "load",
            f"{source} was not written by Treadle's save",
            "For weights of other programs use load_params.",
        )
    if header.get("schema") != SCHEMA:
        raise LoadError(
            "load", f"{source} has schema {header.get('schema')}, this version reads {SCHEMA}"
        )
    if header.get("kind") != kind:
        raise LoadError("load", f"{source} holds a {header.get('kind')}, not a {kind}")
