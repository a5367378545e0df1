"""Functions of one integer that are linear in pieces: what graphs do to an index before it is used.

Exact, with the wrap-around of machine integers. So which numbers a function takes into an interval
is known as a union of intervals: for `where(y == -100, 0, y)` and 0 … 9 it is {−100} ∪ 0 … 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from treadle.base.dtypes import DType, bool_

MOST_PIECES = 32
MOST_WRAPS = 4  # pieces that one of them may be cut into by wrapping around
WIDE = 32  # bits: what does not fit so many was not meant to wrap around

Intervals = tuple[tuple[int, int], ...]  # closed, ascending, neither touching nor overlapping


class Piece(NamedTuple):
    """slope · v + offset for low ≤ v ≤ high."""

    low: int
    high: int
    slope: int
    offset: int

    def cut(self, low: int, high: int) -> Piece:
        return Piece(low, high, self.slope, self.offset)

    def values(self) -> tuple[int, int]:
        """The least and the largest."""
        ends = self.slope * self.low + self.offset, self.slope * self.high + self.offset
        return min(ends), max(ends)


Function = tuple[Piece, ...]  # ascending; a number that no piece has is never right
Rule = Callable[[Piece, Piece], list[Piece] | None]


def identity(dtype: DType) -> Function:
    return (Piece(*dtype.range(), 1, 0),)


def constant(value: int, like: Function) -> Function:
    """A number, wherever another function is defined."""
    return tuple(Piece(p.low, p.high, 0, value) for p in like)


def preimage(function: Function, low: int, high: int) -> Intervals:
    """The numbers that a function takes into low … high."""
    found: list[tuple[int, int]] = []
    for piece in function:
        inside = _inside(piece, low, high)
        if inside is not None:
            found.append(inside)
    return union(found)


def union(intervals: list[tuple[int, int]]) -> Intervals:
    found: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def _inside(piece: Piece, low: int, high: int) -> tuple[int, int] | None:
    """The part of a piece that lies in low … high: an interval, as it is linear."""
    slope, offset = piece.slope, piece.offset
    if slope == 0:
        return piece[:2] if low <= offset <= high else None
    ends = (low - offset, high - offset) if slope > 0 else (offset - high, offset - low)
    size = abs(slope)
    start, stop = max(piece.low, -(-ends[0] // size)), min(piece.high, ends[1] // size)
    return (start, stop) if start <= stop else None


# Functions of functions; None where the result is not known to be linear in few pieces


def add(f: Function, g: Function) -> Function | None:
    return _joined(f, g, lambda a, b: [a._replace(slope=a[2] + b[2], offset=a[3] + b[3])])


def sub(f: Function, g: Function) -> Function | None:
    return _joined(f, g, lambda a, b: [a._replace(slope=a[2] - b[2], offset=a[3] - b[3])])


def mul(f: Function, g: Function) -> Function | None:
    def product(a: Piece, b: Piece) -> list[Piece] | None:
        if a.slope and b.slope:
            return None
        slope = a.slope * b.offset + a.offset * b.slope
        return [a._replace(slope=slope, offset=a.offset * b.offset)]

    return _joined(f, g, product)


def less(f: Function, g: Function) -> Function | None:
    """1 where f < g, 0 elsewhere."""

    def split(a: Piece, b: Piece) -> list[Piece] | None:
        gap = a._replace(slope=a.slope - b.slope, offset=a.offset - b.offset)
        return _flags(gap, _inside(gap, gap.values()[0], -1))

    return _joined(f, g, split)


def at_most(f: Function, g: Function) -> Function | None:
    """1 where f ≤ g, 0 elsewhere."""
    flag = less(g, f)
    return None if flag is None else sub(constant(1, flag), flag)


def equal(f: Function, g: Function) -> Function | None:
    def split(a: Piece, b: Piece) -> list[Piece] | None:
        gap = a._replace(slope=a.slope - b.slope, offset=a.offset - b.offset)
        return _flags(gap, _inside(gap, 0, 0))

    return _joined(f, g, split)


def _flags(piece: Piece, inside: tuple[int, int] | None) -> list[Piece]:
    """1 inside, 0 before and after."""
    if inside is None:
        return [Piece(piece.low, piece.high, 0, 0)]
    low, high = inside
    parts = [
        Piece(piece.low, low - 1, 0, 0),
        Piece(low, high, 0, 1),
        Piece(high + 1, piece.high, 0, 0),
    ]
    return [p for p in parts if p.low <= p.high]


def choose(flag: Function, f: Function, g: Function) -> Function | None:
    """f where the flag is 1, g where it is 0."""
    taken = _joined(flag, f, lambda a, b: [b] if a.offset else [])
    other = _joined(flag, g, lambda a, b: [] if a.offset else [b])
    return None if taken is None or other is None else _bounded(sorted((*taken, *other)))


def larger(f: Function, g: Function) -> Function | None:
    flag = less(f, g)
    return None if flag is None else choose(flag, g, f)


def smaller(f: Function, g: Function) -> Function | None:
    flag = less(f, g)
    return None if flag is None else choose(flag, f, g)


def both(f: Function, g: Function) -> Function | None:
    """Of flags."""
    return _joined(f, g, lambda a, b: [a._replace(offset=a.offset & b.offset)])


def either(f: Function, g: Function) -> Function | None:
    """Of flags."""
    return _joined(f, g, lambda a, b: [a._replace(offset=a.offset | b.offset)])


def held(function: Function, dtype: DType, is_cast: bool = False) -> Function | None:
    """The function as a dtype holds it: a flag, or an integer that wraps around.

    An index that overflows a wide type is not right, but for the two meanings that a cast gives a
    sign; what happens to it in a narrow one may be meant.
    """
    if dtype is bool_:
        is_zero = equal(function, constant(0, function))
        return None if is_zero is None else sub(constant(1, is_zero), is_zero)
    low, high = dtype.range()
    size = high - low + 1
    found: list[Piece] = []
    for piece in function:
        least, most = piece.values()
        first, last = (least - low) // size, (most - low) // size
        is_far = last - first >= MOST_WRAPS
        if is_far and dtype.bits < WIDE:
            return None
        if is_far or (dtype.bits >= WIDE and not is_cast):
            first = last = 0
        for turn in range(first, last + 1):
            inside = _inside(piece, low + turn * size, high + turn * size)
            if inside is not None:
                part = piece.cut(*inside)
                found.append(part._replace(offset=part.offset - turn * size))
    return _bounded(sorted(found))


def _overlaps(f: Function, g: Function) -> Iterator[tuple[Piece, Piece]]:
    """Pieces of both, cut to where both are defined."""
    i = j = 0
    while i < len(f) and j < len(g):
        low, high = max(f[i].low, g[j].low), min(f[i].high, g[j].high)
        if low <= high:
            yield f[i].cut(low, high), g[j].cut(low, high)
        if f[i].high < g[j].high:
            i += 1
        else:
            j += 1


def _joined(f: Function, g: Function, rule: Rule) -> Function | None:
    found: list[Piece] = []
    for a, b in _overlaps(f, g):
        pieces = rule(a, b)
        if pieces is None:
            return None
        found += pieces
    return _bounded(found)


def _bounded(pieces: list[Piece]) -> Function | None:
    """Neighbours that are one line are one piece; None if there are too many."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.high + 1 == piece.low and last[2:] == piece[2:]:
            found[-1] = last._replace(high=piece.high)
        else:
            found.append(piece)
    return tuple(found) if len(found) <= MOST_PIECES else None
