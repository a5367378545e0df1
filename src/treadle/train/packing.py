"""The files of arrays in a checkpoint: safetensors, as they are or as gzip."""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import numpy as np

from treadle.base.errors import LoadError
from treadle.base.memory import memory_there
from treadle.runtime.files import encode_arrays, load_arrays

ARRAYS = "beside.arrays"  # what is saved beside the steps; names of steps have no dot
LARGEST_HEADER = 100_000_000  # bytes, which is safetensors' own limit
BLOCK = 1 << 20  # bytes that are unpacked at a time
LEVEL = 1  # the mantissas of floats do not compress, and exponents do at any level


def file_name(name: str, compress: bool) -> str:
    return f"{name}.safetensors.gz" if compress else f"{name}.safetensors"


def _kind(name: str) -> str:
    return "arrays" if name == ARRAYS else "step"


def pack(name: str, arrays: Mapping[str, np.ndarray], compress: bool) -> bytes:
    """The content of a file; equal arrays give equal bytes."""
    data = encode_arrays(arrays, _kind(name))
    return gzip.compress(data, LEVEL, mtime=0) if compress else data


def unpack(
    folder: Path, name: str, files: Mapping[str, object], most: int | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays of a file in either form.

    `most` bounds the bytes of an unpacked file, where the reader knows what it can take.
    """
    packed = folder / file_name(name, True)
    if packed.name not in files:
        return load_arrays(folder / file_name(name, False), (_kind(name),))
    with tempfile.TemporaryDirectory() as aside:
        plain = Path(aside) / file_name(name, False)
        try:
            with gzip.open(packed) as source, plain.open("wb") as target:
                _inflate(packed, cast(IO[bytes], source), target, most)
        except (OSError, EOFError, zlib.error) as error:
            raise LoadError("load", f"{packed} is damaged: {error}", "Use another copy.") from error
        return load_arrays(plain, (_kind(name),))


def _inflate(packed: Path, source: IO[bytes], target: IO[bytes], most: int | None) -> None:
    """Unpack what the header of a file says, and not a byte more.

    Some MB of gzip may hold GiB: nothing is unpacked that no reader could take.
    """
    start = source.read(8)
    length = int.from_bytes(start, "little")
    if length > LARGEST_HEADER:
        raise _refused(packed, f"its header should have {length:,} bytes")
    header = source.read(length)
    declared = 8 + length + _data_bytes(packed, header)
    allowed = memory_there() if most is None else min(most, memory_there())
    if declared > allowed:
        raise _refused(packed, f"it says that it holds {declared:,} bytes, of {allowed:,} at most")
    target.write(start + header)
    left = declared - len(start) - len(header)
    while left and (block := source.read(min(left, BLOCK))):
        target.write(block)
        left -= len(block)
    if source.read(1):  # also compares gzip's own checksum, where this was the end
        raise _refused(packed, f"it holds more than the {declared:,} bytes of its header")


def _data_bytes(packed: Path, header: bytes) -> int:
    """The bytes behind a safetensors header."""
    try:
        entries = json.loads(header)
        ends = [int(e["data_offsets"][1]) for n, e in entries.items() if n != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise _refused(packed, "it is no safetensors file") from error
    return max(0, *ends, 0)


def _refused(packed: Path, cause: str) -> LoadError:
    return LoadError("load", f"{packed} is damaged: {cause}", "Use another copy.")
