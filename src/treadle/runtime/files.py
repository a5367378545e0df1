"""Named arrays on disk: safetensors with a checksum, written aside and renamed, read without trust.

The metadata of a file has one entry, "treadle": JSON with the schema, the kind of what is in it
and the SHA-256 of names, dtypes, shapes and bytes. Files of before checksums have none, and load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from treadle.base.errors import ArgumentError, LoadError, SaveError, TreadleError

SCHEMA = 1
WRITING = ".treadle-"  # what a file is called until it is complete
KEYS = ({"schema", "kind"}, {"schema", "kind", "sha256"})  # a key that is no longer one is damage
Arrays = Mapping[str, np.ndarray]


def save_arrays(path: str | Path, arrays: Arrays, kind: str) -> None:
    """Write a file of named arrays that `load_arrays` reads, with a checksum."""
    write_file(path, lambda: encode_arrays(arrays, kind))


def write_file(path: str | Path, encode: Callable[[], bytes]) -> None:
    """Write the file aside, flush it to the disk, then rename: a reader sees all of it or none.

    A link stays one: what it leads to is written. Whatever fails, what was there is there.
    """
    write_parts(path, lambda: [encode()])


def write_parts(path: str | Path, encode: Callable[[], Iterable[bytes]]) -> None:
    """The same for a file that is made part by part, so that memory need not hold all of it."""
    given = as_path("save", path)
    try:
        target = _destination(given)
        mode = _mode(given, target)
        with _folders(target.parent):
            _write_aside(target, encode(), mode)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        if isinstance(error, TreadleError):
            raise
        raise SaveError(
            "save",
            f"{given} cannot be written: {_reason(error)}",
            "Use another place. What was there before is as it was.",
        ) from error
    with contextlib.suppress(OSError):  # some file systems cannot: then it is a matter of time
        sync_folder(target.parent)


def as_path(operation: str, path: object) -> Path:
    if isinstance(path, (str, os.PathLike)) and not isinstance(os.fspath(path), bytes):
        return Path(path)
    cause = f"the path is {path!r}, a {type(path).__name__}"
    raise ArgumentError(operation, cause, "Pass a string or a pathlib.Path.")


def _destination(path: Path) -> Path:
    """Where the bytes go: through links, to a file or to nothing yet."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise SaveError("save", f"{path} is a link that leads back to itself", "Name a file.")
    return target


def _mode(given: Path, target: Path) -> int:
    """The permissions of the file: those it has, or those of a new one."""
    if not target.exists():
        return 0o666 & ~_umask()
    if target.is_dir():
        raise SaveError("save", f"{given} is a folder", 'Name a file in it: "step.safetensors".')
    if not target.is_file():
        raise SaveError("save", f"{given} is a device or a pipe, not a file", "Name a file.")
    if not os.access(target, os.W_OK):
        raise SaveError("save", f"{given} is read-only", "Use another place, or change its mode.")
    return stat.S_IMODE(target.stat().st_mode)


@contextlib.contextmanager
def _folders(folder: Path) -> Iterator[None]:
    """The folder and those it is in; those that were made for it go again if what follows fails."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for made in missing:
            with contextlib.suppress(OSError):  # not made, or no longer empty
                made.rmdir()
        raise


def _write_aside(target: Path, parts: Iterable[bytes], mode: int) -> None:
    handle, aside = tempfile.mkstemp(prefix=WRITING, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, mode)
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def encode_arrays(arrays: Arrays, kind: str) -> bytes:
    """The bytes of a safetensors file that `load_arrays` reads."""
    from safetensors.numpy import save

    plain = {n: _plain(a) for n, a in arrays.items()}
    header = {"schema": SCHEMA, "kind": kind, "sha256": checksum(plain)}
    return save(plain, {"treadle": json.dumps(header)})


def _plain(array: np.ndarray) -> np.ndarray:
    """In rows, and in the order of bytes that files have."""
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def checksum(arrays: Arrays) -> str:
    """The SHA-256 of arrays by name, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = _plain(arrays[name])
        digest.update(json.dumps([name, array.dtype.name, array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


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


def load_arrays(
    path: str | Path, kinds: tuple[str, ...], foreign: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of a file that `save_arrays` wrote as one of some kinds, every byte checked.

    `foreign` takes safetensors files of other programs too, which have no checksum.
    """
    from safetensors import SafetensorError, safe_open

    source = as_path("load", path)
    _check_source(source)
    try:
        with safe_open(str(source), framework="numpy") as file:
            header = _header(source, file.metadata() or {}, kinds, foreign)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(
            "load", f"{source} is damaged or not a safetensors file: {error}", "Use another copy."
        ) from error
    except (AttributeError, KeyError, TypeError) as error:  # what safetensors makes of such dtypes
        cause = f"{source} has an array of a dtype that NumPy does not have: {error}"
        raise LoadError("load", cause, "Convert it to float32.") from error
    if "sha256" in header and header["sha256"] != checksum(arrays):
        raise LoadError(
            "load", f"{source} is damaged: it does not match its checksum", "Use another copy."
        )
    return arrays


def _check_source(source: Path) -> None:
    try:
        mode = os.stat(source).st_mode
    except (OSError, ValueError) as error:
        cause = f"there is no file {source}: {_reason(error)}"
        raise LoadError("load", cause, "Check the path.") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise LoadError("load", f"{source} is {what}, not a file", "Name a file.")


def _header(
    source: Path, metadata: Mapping[str, str], kinds: tuple[str, ...], foreign: bool
) -> Mapping[str, object]:
    """What a file says of itself; nothing, where it is another program's and that is allowed."""
    is_ours = any(value.startswith('{"schema"') for value in metadata.values())
    if foreign and "treadle" not in metadata and not is_ours:  # else the key is damaged
        return {}
    try:
        header = json.loads(metadata.get("treadle", "null"))
    except RecursionError as error:
        raise LoadError(
            "load", f"{source} is damaged: its metadata is nested too deep", "Use another copy."
        ) from error
    if not isinstance(header, dict):
        raise LoadError(
            "load",
            f"{source} was not written by Treadle's save",
            "For weights of other programs use load_params.",
        )
    if header.get("schema") != SCHEMA:
        raise LoadError(
            "load",
            f"{source} has schema {header.get('schema')}, this version reads {SCHEMA}",
            "Use the version of Treadle that wrote it, or a newer one.",
        )
    if set(header) not in KEYS:
        cause = f"{source} is damaged: its metadata has the keys {', '.join(header)}"
        raise LoadError("load", cause, "Use another copy.")
    if header.get("kind") not in kinds:
        expected = " or a ".join(kinds)
        raise LoadError(
            "load",
            f"{source} holds a {header.get('kind')}, not a {expected}",
            "A step loads what TrainStep.save wrote, a forward what either save wrote.",
        )
    return header


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
