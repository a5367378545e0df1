"""Arrays in files, whose lengths are compared with what is there before anything is allocated."""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from treadle.base.errors import LoadError
from treadle.base.memory import refuse_beyond
from treadle.interop.onnx.library import DTYPES, element_type

MOST_AXES = 32
EXTERNAL = 1  # TensorProto.DataLocation
COPY = "Use another copy."
# The field that has values of a type which is not in raw_data, and how they are held there.
FIELDS: dict[int, tuple[str, Any]] = {
    1: ("float_data", np.float32),
    11: ("double_data", np.float64),
    7: ("int64_data", np.int64),
    12: ("uint64_data", np.uint64),
    **dict.fromkeys((2, 3, 6, 9, 10, 16), ("int32_data", np.int32)),
}


@dataclass(frozen=True)
class Folder:
    """Where a model's file is, and so where its external data may be; None for bytes."""

    path: Path | None
    title: str

    def refuse(self, cause: str, remedy: str = COPY) -> LoadError:
        return LoadError("load", f"{self.title}: {cause}", remedy)


@dataclass
class Taken:
    """Bytes of other files that tensors are in, of each file by device and inode, and of all."""

    of_file: Counter[tuple[int, int]] = field(default_factory=Counter)
    total: int = 0

    def add(self, status: os.stat_result, nbytes: int) -> int:
        """How much of this file is taken, with these bytes."""
        key = (status.st_dev, status.st_ino)
        self.of_file[key] += nbytes
        self.total += nbytes
        return self.of_file[key]


def text_of(data: str | bytes) -> str:
    """A text of a file. Protobuf gives bytes for one that is none."""
    return data if isinstance(data, str) else data.decode("utf-8", "replace")


def array_of(proto: Any, folder: Folder, taken: Taken, what: str = "") -> np.ndarray:
    """The array of a TensorProto, in a dtype that Treadle has."""
    name = what or f"the tensor {proto.name[:80]!r}"
    stored = numpy_type(proto.data_type, folder, name)
    shape = tuple(proto.dims)
    if any(n < 0 for n in shape) or len(shape) > MOST_AXES:
        raise folder.refuse(f"{name} has the shape {str(shape)[:200]}")
    if proto.HasField("segment"):
        raise folder.refuse(f"{name} is a segment of another", "Write it whole.")
    count = math.prod(shape)
    nbytes = count * stored.itemsize
    refuse_beyond("load", f"{name} of {folder.title}, {stored}{list(shape)},", nbytes)
    is_outside = proto.data_location == EXTERNAL
    if is_outside or proto.HasField("raw_data"):
        data = _external(proto, folder, taken, name, nbytes) if is_outside else proto.raw_data
        _check_length(folder, name, shape, len(data), nbytes)
        flat = np.frombuffer(data, stored.newbyteorder("<")).astype(stored)
    else:
        flat = _listed(proto, folder, name, count, stored)
    return flat.reshape(shape)


def numpy_type(code: int, folder: Folder, name: str) -> np.dtype[Any]:
    """The type of arrays of a file's element type, if Treadle has a dtype for it."""
    dtype = DTYPES.get(code)
    if dtype is None:
        cause = f"{name} has the element type {element_type(code)}, which is not read"
        read = ", ".join(sorted(str(d) for d in DTYPES.values()))
        raise folder.refuse(cause, f"Those of {read} are.")
    return dtype.numpy


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


def _external(proto: Any, folder: Folder, taken: Taken, name: str, nbytes: int) -> bytes:
    """Bytes that are in another file, beside the model or below it."""
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
            place = f"{name} is at {offset:,} … {offset + length:,} of {path.name}, which "
            if not stat.S_ISREG(status.st_mode):
                raise folder.refuse(place + "is no file")
            if offset + length > status.st_size:
                raise folder.refuse(f"{place}has {status.st_size:,} bytes")
            _take(folder, taken, status, length, place)
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise folder.refuse(f"{name} is in {path.name}: {error.strerror}") from error


def _take(folder: Folder, taken: Taken, status: os.stat_result, nbytes: int, place: str) -> None:
    """Adds up what is read, since many tensors could name the same bytes."""
    if taken.add(status, nbytes) > status.st_size:
        cause = f"{place}has {status.st_size:,} bytes: with the tensors before, more are read"
        raise folder.refuse(cause, "Write each tensor's bytes once, and use a shared one by name.")
    refuse_beyond("load", f"what {folder.title} has in other files", taken.total)


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
