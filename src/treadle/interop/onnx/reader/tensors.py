"""Arrays in files, whose lengths are compared with what is there before anything is allocated."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from treadle.base.errors import LoadError
from treadle.base.memory import refuse_beyond
from treadle.interop.onnx.library import STORED, held_dtype

MOST_AXES = 32
EXTERNAL = 1  # TensorProto.DataLocation
COPY = "Use another copy."
# The field that has values of a type which is not in raw_data, and how they are held there.
FIELDS: dict[int, tuple[str, Any]] = {
    1: ("float_data", np.float32),
    11: ("double_data", np.float64),
    7: ("int64_data", np.int64),
    12: ("uint64_data", np.uint64),
    13: ("uint64_data", np.uint64),
    **dict.fromkeys((2, 3, 4, 5, 6, 9, 10, 16), ("int32_data", np.int32)),
}


@dataclass(frozen=True)
class Folder:
    """Where a model's file is, and so where its external data may be; None for bytes."""

    path: Path | None
    title: str

    def refuse(self, cause: str, remedy: str = COPY) -> LoadError:
        return LoadError("load", f"{self.title}: {cause}", remedy)


def text_of(data: str | bytes) -> str:
    """A text of a file. Protobuf gives bytes for one that is none."""
    return data if isinstance(data, str) else data.decode("utf-8", "replace")


def array_of(proto: Any, folder: Folder, what: str = "") -> np.ndarray:
    """The array of a TensorProto, in a dtype that Treadle has."""
    name = what or f"the tensor {proto.name[:80]!r}"
    stored, dtype = STORED.get(proto.data_type), held_dtype(proto.data_type)
    if stored is None or dtype is None:
        cause = f"{name} has the element type {proto.data_type}, which is not read"
        raise folder.refuse(cause, "Floats of 16 bits and more, integers and bool are.")
    shape = tuple(proto.dims)
    if any(n < 0 for n in shape) or len(shape) > MOST_AXES:
        raise folder.refuse(f"{name} has the shape {str(shape)[:200]}")
    if proto.HasField("segment"):
        raise folder.refuse(f"{name} is a segment of another", "Write it whole.")
    count = math.prod(shape)
    nbytes = count * stored.itemsize
    refuse_beyond("load", f"{name} of {folder.title}, {dtype}{list(shape)},", nbytes)
    if proto.data_location == EXTERNAL:
        flat = _external(proto, folder, name, nbytes, stored)
    elif proto.HasField("raw_data"):
        _check_length(folder, name, shape, len(proto.raw_data), nbytes)
        flat = np.frombuffer(proto.raw_data, stored.newbyteorder("<")).astype(stored)
    else:
        flat = _listed(proto, folder, name, count, stored)
    array = flat.reshape(shape)
    if stored == np.uint64 and count and array.max() > np.iinfo(np.int64).max:
        raise folder.refuse(f"{name} has numbers beyond int64", "Write it as int64.")
    return array.astype(dtype.numpy) if dtype.numpy != stored else array


def _check_length(
    folder: Folder, name: str, shape: tuple[int, ...], found: int, wanted: int
) -> None:
    if found != wanted:
        cause = f"{name} of shape {shape} has {found:,} bytes, and needs {wanted:,}"
        raise folder.refuse(cause)


def _listed(proto: Any, folder: Folder, name: str, count: int, stored: np.dtype[Any]) -> np.ndarray:
    """Values that are in a field of numbers."""
    field, held = FIELDS[proto.data_type]
    values = getattr(proto, field)
    if len(values) != count:
        cause = f"{name} of shape {tuple(proto.dims)} has {len(values):,} elements, not {count:,}"
        raise folder.refuse(cause)
    array = np.array(values, held)
    if proto.data_type in (10, 16):  # the bits of a narrow float
        return array.astype(np.uint16).view(stored)
    return array.astype(stored)


def _external(
    proto: Any, folder: Folder, name: str, nbytes: int, stored: np.dtype[Any]
) -> np.ndarray:
    """Values that are in another file, beside the model or below it."""
    entries = {text_of(e.key): text_of(e.value) for e in proto.external_data}
    path = _beside(entries.get("location", ""), folder, name)
    offset = _whole(entries.get("offset", "0"), folder, name)
    length = _whole(entries.get("length", str(nbytes)), folder, name)
    _check_length(folder, name, tuple(proto.dims), length, nbytes)
    try:
        # Not through a link, so that nothing outside of the folder is read.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or offset + length > status.st_size:
                cause = f"{name} is at {offset:,} … {offset + length:,} of {path.name}, which "
                kind = f"has {status.st_size:,} bytes"
                raise folder.refuse(
                    cause + (kind if stat.S_ISREG(status.st_mode) else "is no file")
                )
            file.seek(offset)
            data = file.read(length)
    except OSError as error:
        if isinstance(error, LoadError):
            raise
        raise folder.refuse(f"{name} is in {path.name}: {error.strerror}") from error
    _check_length(folder, name, tuple(proto.dims), len(data), nbytes)
    return np.frombuffer(data, stored.newbyteorder("<")).astype(stored)


def _beside(location: str, folder: Folder, name: str) -> Path:
    """A file in the model's folder. Neither the way there nor itself leads through a link."""
    remedy = "Only plain files beside the model are read."
    if folder.path is None:
        cause = f"{name} is in another file, and the model was given as bytes"
        raise folder.refuse(cause, "Pass the path of the model.")
    parts = PurePosixPath(location).parts
    is_plain = bool(parts) and not location.startswith("/") and ".." not in parts
    if not is_plain or any(c in location for c in "\0\\:") or len(location) > 1000:
        raise folder.refuse(f"{name} is in {location[:80]!r}", remedy)
    path = folder.path
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise folder.refuse(f"{name} is in {location[:80]!r}, which is a link", remedy)
    return path


def _whole(text: str, folder: Folder, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise folder.refuse(f"{name} has the place {text[:40]!r} in another file")
    return int(text)
