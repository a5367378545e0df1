"""NumPy's archives: arrays by name, in and out."""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib import format as npy

from treadle.base.errors import ArgumentError, LoadError
from treadle.interop.archives import Archive, open_archive
from treadle.interop.opened import damaged, is_possible
from treadle.runtime.files import write_file

MAGIC = b"\x93NUMPY"
LONGEST_HEADER = 10_000  # bytes, NumPy's own limit
MOST_AXES = 32
HEADER = re.compile(
    r"\{'descr': ?(?P<descr>.{1,200}?), ?'fortran_order': ?(?P<fortran>True|False), ?"
    r"'shape': ?\((?P<shape>[0-9, ]{0,600})\),? ?\}\s*"
)
NUMBERS = re.compile(r"'(?:\|b1|\|[iu]1|[<>=](?:[iu][248]|f[248]))'")
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
    header, start = _header(content)
    found = HEADER.fullmatch(header)
    if found is None:
        raise damaged(archive.source, f"{entry[:80]!r} is no .npy file: {header[:80]!r}")
    if not NUMBERS.fullmatch(found["descr"]):
        cause = f"{archive.source}: {entry[:80]!r} is an array of {found['descr'][:80]}"
        raise LoadError("load", cause, "Numbers and bools are read; pickled objects never are.")
    dtype = np.dtype(found["descr"].strip("'"))
    sizes = found["shape"].replace(" ", "").removesuffix(",").split(",")
    shape = tuple(int(n or -1) for n in sizes) if sizes != [""] else ()
    left = len(content) - start
    fits = is_possible(shape) and math.prod(shape) * dtype.itemsize == left
    if len(shape) > MOST_AXES or -1 in shape or not fits:
        cause = f"{entry[:80]!r} is {dtype} {str(shape)[:80]} in {left:,} bytes"
        raise damaged(archive.source, cause)
    flat = np.frombuffer(content, dtype, offset=start)
    order: Literal["F", "C"] = "F" if found["fortran"] == "True" else "C"
    return flat.reshape(shape, order=order).astype(dtype.newbyteorder("="))


def _header(content: bytes) -> tuple[str, int]:
    """The text before an array, and where the array begins: nothing is evaluated."""
    size = {b"\x01": 2, b"\x02": 4, b"\x03": 4}.get(content[6:7], 0)
    start = 8 + size + int.from_bytes(content[8 : 8 + size], "little")
    if not content.startswith(MAGIC) or not size or start > min(len(content), LONGEST_HEADER):
        return "", len(content)
    return content[8 + size : start].decode("latin-1"), start


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
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(name + ENDING)  # without a date: the same bytes each time
            entry.compress_type = method
            with archive.open(entry, "w", force_zip64=True) as stream:
                npy.write_array(stream, array, allow_pickle=False)
    return whole.getvalue()
