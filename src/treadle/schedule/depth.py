"""The depth of a matmul as loops: those around the template, and those that the template sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import StridedAxis, strided_axis
from treadle.schedule.nests import best_divisor


@dataclass(frozen=True, slots=True)
class Digit:
    """A loop of the depth: its iterations, and how far each moves the left and right operand."""

    count: int
    left: int
    right: int


def merged(digits: Sequence[Digit]) -> list[Digit]:
    """Neighbours that are one strided loop in both operands become one."""
    found: list[Digit] = []
    for d in digits:
        last = found[-1] if found else None
        if last and last.left == d.left * d.count and last.right == d.right * d.count:
            found[-1] = Digit(last.count * d.count, d.left, d.right)
        elif d.count > 1:
            found.append(d)
    return found


def cut_depth(digits: Sequence[Digit], most: int) -> tuple[list[Digit], list[Digit]]:
    """Loops around the template, and those inside it: about `most` elements at a time."""
    outer, inner, size = list(digits), list[Digit](), 1
    while outer:
        d = outer.pop()
        if size * d.count <= most:
            inner.insert(0, d)
            size *= d.count
            continue
        part = best_divisor(d.count, most // size, max(1, most // (4 * size)))
        if part > 1:
            inner.insert(0, Digit(part, d.left, d.right))
        if part < d.count:
            outer.append(Digit(d.count // part, d.left * part, d.right * part))
        break
    return outer, inner


@dataclass(frozen=True, slots=True)
class Depth:
    """Loops around the template, how they move both operands, and what the template sums."""

    part: Var  # of sums that are added at the end
    loops: list[Var]
    moves: tuple[Index, Index]
    summed: tuple[StridedAxis, StridedAxis]


def depth_of(digits: Sequence[Digit], parts: int, most: int) -> Depth:
    """The depth in equal parts, each in loops around about `most` elements."""
    part, first = Var("part", parts), digits[0]
    share = replace(first, count=first.count // parts)
    outer, inner = cut_depth(merged([share, *digits[1:]]), most)
    loops = [Var(f"d{i}", d.count) for i, d in enumerate(outer)]
    left, right = (variable(part) * (share.count * step) for step in (first.left, first.right))
    for var, d in zip(loops, outer, strict=True):
        left, right = left + variable(var) * d.left, right + variable(var) * d.right
    by_left = strided_by(tuple((d.left, d.count) for d in inner))
    by_right = strided_by(tuple((d.right, d.count) for d in inner))
    return Depth(part, loops, (left, right), (by_left, by_right))


@functools.lru_cache(maxsize=256)
def strided_by(digits: tuple[tuple[int, int], ...]) -> StridedAxis:
    """Where loops take an operand, by their strides and counts."""
    places = [0]
    for stride, count in digits:
        places = [p + i * stride for p in places for i in range(count)]
    return strided_axis(places)
