"""Arrays from files of other programs: NPY, IDX, raw numbers. Nothing is unpickled."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.base.numbers import check_whole

GZIP = b"\x1f\x8b"
CHUNK = 1 << 20

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def missing(operation: str, source: Path) -> LoadError:
    """Why a path cannot be read, and where it was looked for."""
    if source.is_dir():
        return LoadError(operation, f"{source} is a folder", "Name a file in it.")
    place = "" if source.is_absolute() else f"It was looked for from {Path.cwd()}."
    return LoadError(operation, f"there is no file {source}", place)


def as_path(operation: str, path: object) -> Path:
    """A path from text or another path."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(operation, f"path = {path!r}", "It is text or a pathlib.Path.")
    return Path(path)


def open_bytes(operation: str, path: str | Path) -> IO[bytes]:
    """A file for reading; unpacked on the way if it is gzip, whatever its name."""
    source = as_path(operation, path)
    if not source.is_file():
        raise missing(operation, source)
    with source.open("rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
    return cast(IO[bytes], gzip.open(source, "rb") if is_packed else source.open("rb"))


def read_npy(path: str | Path, *, memory_map: bool = False) -> np.ndarray:
    """The array of an NPY file. With `memory_map` it stays on disk and is read where it is used."""
    source = as_path("read_npy", path)
    with _plain(source) as file:
        shape, order, dtype = _npy_header(source, file)
        start = file.tell()
        count = int(np.prod(shape, dtype=object)) if shape else 1
        needed, there = count * dtype.itemsize, os.fstat(file.fileno()).st_size - start
        if needed != there:
            raise LoadError(
                "read_npy",
                f"{source.name}: from byte {start} on there are {there} bytes, and {dtype} of "
                f"shape {shape} has {needed}",
                "The file is cut off or has more than one array. Use another copy.",
            )
        if memory_map and count:
            return np.memmap(source, dtype, "r", start, shape, order)
        return np.fromfile(file, dtype, count).reshape(shape, order=order)


def _plain(source: Path) -> IO[bytes]:
    if not source.is_file():
        raise missing("read_npy", source)
    return source.open("rb")


def _npy_header(
    source: Path, file: IO[bytes]
) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype]:
    try:
        version = np.lib.format.read_magic(file)
    except ValueError as error:
        raise LoadError(
            "read_npy", f"{source.name}, byte 0: this is not an NPY file: {error}"
        ) from error
    try:
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            header = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} is for field names, which have no use here")
    except Exception as error:  # NumPy's parser, and Python's tokenizer below it, on any bytes
        reason = str(error).partition("\n")[0]
        raise LoadError(
            "read_npy", f"{source.name}, header from byte 8 on: {reason}", "Use another copy."
        ) from error
    shape, is_fortran, dtype = header
    if dtype.kind not in "biufcSU" or not dtype.itemsize:
        raise LoadError(
            "read_npy",
            f"{source.name} holds {dtype}, which is not plain numbers",
            "Python objects are never unpickled. Save an array of numbers.",
        )
    return shape, "F" if is_fortran else "C", dtype


def read_idx(path: str | Path) -> np.ndarray:
    """The array of an IDX file (MNIST's format), gzip or not, in the machine's byte order."""
    name = as_path("read_idx", path).name
    with open_bytes("read_idx", path) as file:
        head = _exactly(file, 4, 0, name, "the four bytes of the magic number")
        if head[:2] != b"\0\0" or head[2] not in IDX_TYPES:
            raise LoadError(
                "read_idx",
                f"{name}, byte 0: the magic number is {head.hex(' ')}",
                "An IDX file begins with 00 00, a type from 08 to 0e, and the number of axes.",
            )
        axes, dtype = head[3], np.dtype(IDX_TYPES[head[2]])
        sizes = _exactly(file, 4 * axes, 4, name, f"the sizes of {axes} axes")
        shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
        needed = dtype.itemsize
        for size in shape:
            needed *= size
        what = f"{dtype} of shape {shape}"
        content = _exactly(file, needed, 4 + 4 * axes, name, what)
        if _read(file, 1, 4 + 4 * axes + needed, name):
            raise LoadError(
                "read_idx",
                f"{name}, byte {4 + 4 * axes + needed}: the file goes on after {what}",
                "Use another copy.",
            )
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _exactly(file: IO[bytes], count: int, offset: int, name: str, what: str) -> bytes:
    """So many bytes. Read piece by piece: a false size must not ask for memory."""
    parts, left = [], count
    while left:
        part = _read(file, min(left, CHUNK), offset + count - left, name)
        if not part:
            raise LoadError(
                "read_idx",
                f"{name}, byte {offset + count - left}: the file ends; {what} needs {count} bytes "
                f"from byte {offset} on",
                "Use another copy.",
            )
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _read(file: IO[bytes], count: int, offset: int, name: str) -> bytes:
    try:
        return file.read(count)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LoadError(
            "read_idx",
            f"{name}: damaged gzip after byte {offset} of its content: {error}",
            "Use another copy.",
        ) from error


def read_raw(path: str | Path, dtype: object, columns: int | None = None) -> np.ndarray:
    """A file of bare numbers as a memory map: one row, or rows of so many columns."""
    source = as_path("read_raw", path)
    try:
        number = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError as error:
        raise ArgumentError("read_raw", f"dtype = {dtype!r}", "Use a dtype of numbers.") from error
    if number.kind not in "biufc" or dtype is None:
        raise ArgumentError("read_raw", f"dtype = {dtype!r}", "Use a dtype of numbers.")
    if columns is not None:
        check_whole("read_raw", "columns", columns)
    if not source.is_file():
        raise missing("read_raw", source)
    size, row = source.stat().st_size, number.itemsize * (columns or 1)
    if size == 0 or size % row:
        what = str(number) if columns is None else f"{columns} × {number}"
        raise LoadError(
            "read_raw",
            f"{source.name} has {size} bytes; {what} has {row}, so that byte {size - size % row} "
            "begins a row that is not whole",
            "Check dtype and columns.",
        )
    shape = (size // row,) if columns is None else (size // row, columns)
    return np.memmap(source, number, "r", 0, shape)
