"""Inputs as keyed functions of an element, and memory that is filled with them when it is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.domains.float64 import Array
from treadle.verify.extended import Extended, ExtendedField, is_residue

Source = Callable[[Array], Extended]  # elements by where they are
EDGES = (0, -100, 1)  # of integers: the first index, a loss's ignored one, and the largest
PAGE = 256


def keyed(field: ExtendedField, name: str, dtype: DType, most: int = 2**15) -> Source:
    """Generic elements by name: any number of the field; integers below a bound, and edges."""

    def source(at: Array) -> Extended:
        if dtype.is_float:
            return Extended(*(lane.uninterpreted(name, at) for lane in field.field.lanes))
        bits = field.field.lane_p.uninterpreted(name, at)
        if dtype is dtypes.bool_:
            return Extended(bits & 1, bits & 1)
        return field.integers(_integers(bits, dtype, most), dtype)

    return source


def _integers(bits: Array, dtype: DType, most: int) -> Array:
    """One in four is an edge, and one in four is small."""
    high = max(1, min(most, dtype.range()[1]))
    edges = np.array([*(x for x in EDGES if x >= dtype.range()[0]), high - 1])
    rest = np.where(bits % 4 == 1, bits // 16 % 4, bits // 16 % high)
    return np.where(bits % 4 == 0, edges[bits // 4 % len(edges)], rest)


class Memory:
    """A buffer: pages of elements, made by its source when they are first touched."""

    def __init__(self, dtype: DType, size: int, source: Source):
        self.dtype, self.size, self.source = dtype, size, source
        self.pages = np.full(-(-size // PAGE) + 1, -1, np.int64)
        self.count = 0
        self.p = self.q = self.sign = self.infinite = np.zeros(0, np.int64)
        self.written = np.zeros(0, bool)
        self.is_piecewise = False

    def forget(self, source: Source) -> None:
        """Everything that was written; elements are another source's from now on."""
        self.source, self.count, self.is_piecewise = source, 0, False
        self.pages[:] = -1

    def _slots(self, at: Array) -> Array:
        numbers = at // PAGE
        found = self.pages[numbers]
        if (found < 0).any():
            self._add(np.unique(numbers[found < 0]))
            found = self.pages[numbers]
        return found * PAGE + at % PAGE

    def _add(self, numbers: Array) -> None:
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
        self.p[rows], self.q[rows] = made.p, made.q
        self.sign[rows] = 0 if made.sign is None else made.sign
        self.infinite[rows] = 0 if made.infinite is None else made.infinite
        self.written[rows] = False

    def load(self, at: Array) -> Extended:
        slots = self._slots(at)
        p = self.p[slots]
        if not is_residue(self.dtype):
            plain = p.astype(self.dtype.numpy)
            return Extended(plain, plain)
        sign, infinite = self.sign[slots], self.infinite[slots]
        return Extended(
            self.q[slots],
            p,
            sign if sign.any() else None,
            infinite if infinite.any() else None,
            self.is_piecewise,
        )

    def store(self, at: Array, value: Extended) -> None:
        """Of several at one element the last stays."""
        slots = self._slots(at)
        self.p[slots], self.q[slots] = value.p, value.q
        self.sign[slots] = 0 if value.sign is None else value.sign
        self.infinite[slots] = 0 if value.infinite is None else value.infinite
        self.written[slots] = True
        self.is_piecewise |= value.is_piecewise

    def written_at(self) -> Array:
        """Where something was stored, in order."""
        numbers = np.flatnonzero(self.pages >= 0)
        at = (numbers[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        held = self.written[(self.pages[numbers][:, None] * PAGE + np.arange(PAGE)).reshape(-1)]
        return np.asarray(at[held])
