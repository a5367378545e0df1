"""Inputs as keyed functions of an element, and memory that is filled with them when it is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.domains.field import _mix, _text_key
from treadle.domains.float64 import Array
from treadle.verify.extended import Extended, ExtendedField, is_residue

Source = Callable[[Array], Extended]  # elements by where they are
# Of integers, beside the largest: the first index, and one that losses ignore.
EDGES = (0, -100, 1, -100)
PAGE = 256
_BLOCK = 2**20  # elements that are made at once
_SHIFT = 8  # of an address to its page
_ODD = np.uint64(0x9E3779B97F4A7C15)
_BITS, _SHIFTS = np.uint64(2**30 - 1), (np.uint64(0), np.uint64(32))


def keyed(field: ExtendedField, name: str, dtype: DType, most: int = 2**15) -> Source:
    """Generic elements by name: any number of the field; integers below a bound, and edges."""

    key = np.uint64(_text_key(name) ^ field.field.lane_p.key)

    def source(at: Array) -> Extended:
        if at.size > _BLOCK:
            flat = np.array_split(at.reshape(-1), -(-at.size // _BLOCK))
            q, p = (
                np.concatenate(x) for x in zip(*((s.q, s.p) for s in map(some, flat)), strict=True)
            )
            return Extended(q.reshape(at.shape), p.reshape(at.shape))
        return some(at)

    def some(at: Array) -> Extended:
        """Both lanes from one word of 64 bits: each is uniform below 2³⁰."""
        words = _mix(np.atleast_1d(at).astype(np.uint64) * _ODD ^ key).reshape(at.shape)
        if dtype.is_float:
            return Extended(*((words >> s & _BITS).astype(np.int64) for s in _SHIFTS))
        bits = (words & _BITS).astype(np.int64)
        if dtype is dtypes.bool_:
            return Extended(bits & 1, bits & 1)
        return field.integers(_integers(bits, dtype, most), dtype)

    return source


def _integers(bits: Array, dtype: DType, most: int) -> Array:
    """Half are edges, and a quarter is small."""
    high = max(1, min(most, dtype.range()[1]))
    edges = np.array([*(x for x in EDGES if x >= dtype.range()[0]), high - 1])
    rest = np.where(bits % 4 == 1, bits // 16 % 4, bits // 16 % high)
    return np.where(bits % 4 >= 2, edges[bits // 4 % len(edges)], rest)


class Memory:
    """A buffer: pages of elements, made by its source when they are first touched."""

    def __init__(self, dtype: DType, size: int, source: Source):
        self.dtype, self.size, self.source = dtype, size, source
        self.pages = np.full(-(-size // PAGE) + 1, -1, np.int64)
        self.count = 0
        # Residues are below 2³¹; the bits beside them are rare.
        kind = np.int32 if is_residue(dtype) else np.int64
        self.p, self.q = np.zeros(0, kind), np.zeros(0, kind)
        self.sign, self.infinite = np.zeros(0, np.int8), np.zeros(0, np.int8)
        self.has_bits = False
        self.written = np.zeros(0, bool)
        self.is_piecewise = False

    def forget(self, source: Source) -> None:
        """Everything that was written; elements are another source's from now on."""
        self.source, self.count, self.is_piecewise, self.has_bits = source, 0, False, False
        self.pages[:] = -1

    def _slots(self, at: Array) -> Array:
        numbers = at >> _SHIFT
        found = self.pages[numbers]
        if (found < 0).any():
            self._add(np.unique(numbers[found < 0]))
            found = self.pages[numbers]
        return (found << _SHIFT) | (at & (PAGE - 1))

    def _add(self, numbers: Array) -> None:
        """Pages by their numbers; not too many at once, as arrays on the way are larger."""
        for part in np.array_split(numbers, -(-len(numbers) * PAGE // _BLOCK)):
            self._add_some(part)

    def _add_some(self, numbers: Array) -> None:
        first = self.count
        self.count += len(numbers)
        self.pages[numbers] = np.arange(first, self.count)
        if self.count * PAGE > len(self.p):
            room = max(self.count * PAGE, 2 * len(self.p))
            for name in ("p", "q", "sign", "infinite", "written"):
                old = getattr(self, name)
                new = np.zeros(room, old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)
        at = np.minimum((numbers[:, None] * PAGE + np.arange(PAGE)).reshape(-1), self.size - 1)
        made, rows = self.source(at), slice(first * PAGE, self.count * PAGE)
        self._put(rows, made)
        self.written[rows] = False

    def _put(self, slots: Array | slice, value: Extended) -> None:
        self.p[slots] = value.p
        if is_residue(self.dtype):
            self.q[slots] = value.q
            self.sign[slots] = 0 if value.sign is None else value.sign
            self.infinite[slots] = 0 if value.infinite is None else value.infinite
            self.has_bits |= value.sign is not None or value.infinite is not None

    def load(self, at: Array) -> Extended:
        slots = self._slots(at)
        if not is_residue(self.dtype):
            plain = self.p[slots].astype(self.dtype.numpy)
            return Extended(plain, plain)
        q, p = self.q[slots].astype(np.int64), self.p[slots].astype(np.int64)
        if not self.has_bits:
            return Extended(q, p, is_piecewise=self.is_piecewise)
        bits = (a[slots].astype(np.int64) for a in (self.sign, self.infinite))
        sign, infinite = (a if a.any() else None for a in bits)
        return Extended(q, p, sign, infinite, is_piecewise=self.is_piecewise)

    def store(self, at: Array, value: Extended) -> None:
        """Of several at one element the last stays."""
        slots = self._slots(at)
        self._put(slots, value)
        self.written[slots] = True
        self.is_piecewise |= value.is_piecewise

    def written_at(self) -> Array:
        """Where something was stored, in order."""
        numbers, slots = np.flatnonzero(self.pages >= 0), self.written[: self.count * PAGE]
        slots, page_of = np.flatnonzero(slots), np.zeros(self.count, np.int64)
        page_of[self.pages[numbers]] = numbers
        return np.sort(page_of[slots >> _SHIFT] * PAGE + (slots & (PAGE - 1)))
