"""The files of arrays in a checkpoint: safetensors, as they are or as gzip."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from treadle.base.errors import LoadError
from treadle.runtime.files import encode_arrays, load_arrays

ARRAYS = "beside.arrays"  # what is saved beside the steps; names of steps have no dot
LEVEL = 1  # the mantissas of floats do not compress, and exponents do at any level


def file_name(name: str, compress: bool) -> str:
    return f"{name}.safetensors.gz" if compress else f"{name}.safetensors"


def _kind(name: str) -> str:
    return "arrays" if name == ARRAYS else "step"


def pack(name: str, arrays: Mapping[str, np.ndarray], compress: bool) -> bytes:
    """The content of a file; equal arrays give equal bytes."""
    data = encode_arrays(arrays, _kind(name))
    return gzip.compress(data, LEVEL, mtime=0) if compress else data


def unpack(folder: Path, name: str, files: Mapping[str, object]) -> dict[str, np.ndarray]:
    """The arrays of a file in either form."""
    packed = folder / file_name(name, True)
    if packed.name not in files:
        return load_arrays(folder / file_name(name, False), (_kind(name),))
    try:
        data = gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise LoadError("load", f"{packed} is damaged: {error}", "Use another copy.") from error
    with tempfile.TemporaryDirectory() as aside:
        plain = Path(aside) / file_name(name, False)
        plain.write_bytes(data)
        return load_arrays(plain, (_kind(name),))
