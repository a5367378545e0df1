"""NumPy's archives: arrays by name, in and out, and into a module."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from treadle.base.errors import ArgumentError, LoadError
from treadle.interop.archives import Archive, open_archive
from treadle.interop.opened import damaged
from treadle.runtime.files import write_file

LONGEST_HEADER = 10_000  # bytes, NumPy's own limit
KINDS = "biuf"  # of dtypes: no objects, strings or records
ENDING = ".npy"


def load(path: str | Path, *, largest: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name. Pickled objects are refused, and archives that unpack to
    much more than they are, or to more than `largest` bytes.
    """
    with open_archive(path, "an .npz file", largest=largest) as archive:
        return {_name(archive, entry): _array(archive, entry) for entry in archive.entries}


def _name(archive: Archive, entry: str) -> str:
    if not entry.endswith(ENDING):
        raise damaged(archive.source, f"the entry {entry[:80]!r} is no array")
    return entry.removesuffix(ENDING)


def _array(archive: Archive, entry: str) -> np.ndarray:
    """An array whose header fits the bytes that are there."""
    content = archive.read(entry)
    stream = io.BytesIO(content)
    try:
        version = npy.read_magic(stream)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"version {version}")
        shape, is_fortran, dtype = read(stream, LONGEST_HEADER)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        cause = f"{entry[:80]!r} is no .npy file: {str(error)[:200]}"
        raise damaged(archive.source, cause) from error
    if dtype.kind not in KINDS or dtype.hasobject:
        cause = f"{archive.source}: {entry[:80]!r} is an array of {str(dtype)[:80]}"
        raise LoadError("load", cause, "Numbers and bools are read; pickled objects never are.")
    left = len(content) - stream.tell()
    if len(shape) > 64 or any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != left:
        cause = f"{entry[:80]!r} is {dtype} {str(shape)[:80]} in {left:,} bytes"
        raise damaged(archive.source, cause)
    flat = np.frombuffer(content, dtype, offset=stream.tell())
    found = flat.reshape(shape, order="F" if is_fortran else "C")
    return found.astype(dtype.newbyteorder("="))


def save(path: str | Path, values: Mapping[str, object], *, is_compressed: bool = False) -> None:
    """Write arrays by name, as `step.params` gives them, so that `numpy.load` reads them."""
    arrays = {str(name): np.asarray(value) for name, value in values.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in KINDS:
            cause = f"{name} is an array of {array.dtype}, which .npz files have no name for"
            raise ArgumentError("save", cause, "Pass array.astype(np.float32).")
    write_file(path, lambda: _encoded(arrays, is_compressed))


def _encoded(arrays: Mapping[str, np.ndarray], is_compressed: bool) -> bytes:
    method = zipfile.ZIP_DEFLATED if is_compressed else zipfile.ZIP_STORED
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(name + ENDING), "w", force_zip64=True) as entry:
                npy.write_array(entry, array, allow_pickle=False)
    return stream.getvalue()
