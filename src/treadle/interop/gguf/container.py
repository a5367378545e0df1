"""A GGUF file: metadata by key and tensors by name, over a memory map.

The file is 24 bytes of header, the metadata, an entry for each tensor, and after padding their
bytes. Each length is compared with what is left of the file before anything is made of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np

from treadle.base.blocks import BLOCKS
from treadle.base.blocks import decoded as decoded_blocks
from treadle.base.errors import LoadError
from treadle.base.memory import refuse_beyond
from treadle.interop.opened import damaged, is_possible, mapped

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 has lengths of 32 bits, and no file of it is left
MOST_AXES = 4
MOST_DEPTH = 4  # arrays in arrays
ALIGNMENT, MOST_ALIGNMENT = 32, 1 << 20
LONGEST_NAME = 1 << 12

Value = bool | int | float | str | np.ndarray | list["Value"]

# Kinds of metadata, by number. Strings and arrays are apart.
KINDS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
KINDS |= {10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9

# Kinds of tensors whose numbers are in no blocks.
PLAIN: dict[str, tuple[int, np.dtype]] = {
    "f32": (0, np.dtype("<f4")),
    "f16": (1, np.dtype("<f2")),
    "i8": (24, np.dtype("i1")),
    "i16": (25, np.dtype("<i2")),
    "i32": (26, np.dtype("<i4")),
    "i64": (27, np.dtype("<i8")),
    "f64": (28, np.dtype("<f8")),
    "bf16": (30, np.dtype(ml_dtypes.bfloat16)),
}


SIZES = {n: (1, dtype.itemsize) for n, (_, dtype) in PLAIN.items()}  # numbers and bytes of a block
SIZES |= {name: (f.size, f.nbytes) for name, f in BLOCKS.items()}
NUMBERS: dict[int, str] = {number: name for name, (number, _) in PLAIN.items()}
NUMBERS |= {f.number: name for name, f in BLOCKS.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor by what the file says of it; the shape is in NumPy's order."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int  # among the bytes of all tensors

    @property
    def nbytes(self) -> int:
        size, nbytes = SIZES[self.format]
        return math.prod(self.shape) // size * nbytes


@dataclass(frozen=True)
class File:
    """An opened GGUF file: `metadata` by key, `tensors` by name, values when they are asked for."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Entry]
    data: np.ndarray  # uint8, of all tensors

    def __repr__(self) -> str:
        return f"gguf.File({str(self.path)!r}: {len(self.tensors)} tensors)"

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor as they are, uint8 (…, bytes of a row)."""
        entry = self._entry(name)
        size, nbytes = SIZES[entry.format]
        shape = entry.shape or (1,)
        width = shape[-1] // size * nbytes
        return self.data[entry.start : entry.start + entry.nbytes].reshape(*shape[:-1], width)

    def array(self, name: str, part: int | None = None) -> np.ndarray:
        """The values of a tensor, or of one part of its first axis.

        Blocks become float32; other formats keep their dtype, bf16 that of `ml_dtypes`.
        """
        entry = self._entry(name)
        bytes_ = self.raw(name) if part is None else self.raw(name)[part]
        if entry.format in BLOCKS:
            count = math.prod(entry.shape) // (1 if part is None else entry.shape[0])
            refuse_beyond("load", f"{name} of {self.path}", 4 * count)
            return decoded_blocks(entry.format, bytes_)
        shape = entry.shape if part is None else entry.shape[1:]
        found = np.array(bytes_).reshape(-1).view(PLAIN[entry.format][1]).reshape(shape)
        return found.astype(found.dtype.newbyteorder("="), copy=False)

    def arrays(self) -> dict[str, np.ndarray]:
        """The values of all tensors by name."""
        numbers = sum(math.prod(e.shape) for e in self.tensors.values())
        refuse_beyond("load", f"what is in {self.path}", 4 * numbers)
        return {name: self.array(name) for name in self.tensors}

    def _entry(self, name: str) -> Entry:
        if name in self.tensors:
            return self.tensors[name]
        raise LoadError("load", f"{self.path} has no tensor {name}", "See its `tensors`.")


class _Reader:
    """A place in a file. Nothing is read past its end."""

    def __init__(self, source: Path, data: np.ndarray):
        self.source, self.data, self.at = source, data.data, 0

    def wrong(self, cause: str) -> LoadError:
        return damaged(self.source, cause)

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise self.wrong(f"at byte {self.at} there are {self.left:,} more, not {count:,}")
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def text(self) -> str:
        try:
            return str(self.take(self.u64()), "utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"the string before byte {self.at} is not UTF-8") from error

    def count(self, least: int, what: str) -> int:
        """How many of something follow, each of at least so many bytes."""
        found = self.u64()
        if found > self.left // least:
            raise self.wrong(f"{found:,} {what} are promised in {self.left:,} bytes")
        return found

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.values(depth)
        dtype = self.dtype(kind)
        found: Value = np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        return found

    def values(self, depth: int) -> Value:
        """An array: of numbers in NumPy's, of strings and arrays in a list."""
        if depth == MOST_DEPTH:
            raise self.wrong(f"arrays are in arrays, more than {MOST_DEPTH} deep")
        kind = self.u32()
        if kind in (STRING, ARRAY):
            count = self.count(8 if kind == STRING else 12, "elements")
            return [self.value(kind, depth + 1) for _ in range(count)]
        dtype = self.dtype(kind)
        count = self.count(dtype.itemsize, "elements")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).copy()

    def dtype(self, kind: int) -> np.dtype:
        if kind not in KINDS:
            raise self.wrong(f"a value before byte {self.at} is of kind {kind}")
        return np.dtype(KINDS[kind])


def load(path: str | Path) -> File:
    """Open a GGUF file. Its header is read and checked; values are read when they are asked for."""
    source, data = mapped(path, "a GGUF file")
    reader = _Reader(source, data)
    if bytes(reader.data[:4]) != MAGIC:
        raise LoadError("load", f"{source} is no GGUF file", "It begins with the letters GGUF.")
    reader.take(4)
    version = reader.u32()
    if version not in VERSIONS:
        what = "in big-endian order" if version & 0xFFFF == 0 else f"of version {version}"
        remedy = "Convert it with llama.cpp: versions 2 and 3, little-endian, are read."
        raise LoadError("load", f"{source} is a GGUF file {what}", remedy)
    tensors = reader.count(24, "tensors")
    keys = reader.count(13, "keys of metadata")
    metadata = _metadata(reader, keys)
    entries = [_entry(reader) for _ in range(tensors)]
    found = {e.name: e for e in entries}
    if len(found) < len(entries):
        raise reader.wrong("two tensors have one name")
    start = -(-reader.at // (alignment := _alignment(reader, metadata))) * alignment
    _check_places(reader, entries, max(0, len(data) - start), alignment)
    return File(source, version, metadata, found, data[start:])


def _metadata(reader: _Reader, count: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for _ in range(count):
        key = reader.text()
        if key in found:
            raise reader.wrong(f"the key {key[:80]!r} is there twice")
        found[key] = reader.value(reader.u32())
    return found


def _alignment(reader: _Reader, metadata: Mapping[str, Value]) -> int:
    found = metadata.get("general.alignment", ALIGNMENT)
    if type(found) is int and 8 <= found <= MOST_ALIGNMENT and found % 8 == 0:
        return found
    raise reader.wrong(f"general.alignment is {str(found)[:40]}")


def _entry(reader: _Reader) -> Entry:
    name = reader.text()
    if not 0 < len(name) <= LONGEST_NAME:
        raise reader.wrong(f"a tensor's name has {len(name):,} letters")
    axes = reader.u32()
    if axes > MOST_AXES:
        raise reader.wrong(f"{name[:80]!r} has {axes} axes, more than {MOST_AXES}")
    shape = tuple(reader.u64() for _ in range(axes))[::-1]
    number = reader.u32()
    if number not in NUMBERS:
        cause = f"{reader.source}: {name[:80]!r} is in the format with the number {number}"
        raise LoadError("load", cause, f"Read are: {', '.join(SIZES)}.")
    entry = Entry(name, NUMBERS[number], shape, reader.u64())
    if (shape[-1] if shape else 1) % SIZES[entry.format][0]:
        cause = f"{name[:80]!r} {shape} has rows that are no whole blocks of {entry.format}"
        raise reader.wrong(cause)
    return entry


def _check_places(reader: _Reader, entries: list[Entry], there: int, alignment: int) -> None:
    """Each tensor is inside the file, at an aligned place, and none overlaps another."""
    for entry in entries:
        fits = is_possible(entry.shape) and entry.start + entry.nbytes <= there
        if entry.start % alignment or not fits:
            place = f"{entry.start:,}, of {there:,}"
            cause = f"{entry.name[:80]!r} {entry.shape} has {entry.nbytes:,} bytes at {place}"
            raise reader.wrong(cause)
    in_order = sorted((e for e in entries if e.nbytes), key=lambda e: e.start)
    for a, b in pairwise(in_order):
        if a.start + a.nbytes > b.start:
            raise reader.wrong(f"{a.name[:80]!r} and {b.name[:80]!r} overlap")
