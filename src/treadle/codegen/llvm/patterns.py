"""Where the lanes of a vector lie: how far each is from the first, where that is known."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from treadle.kernel.index import Atom, Bounded, Data, Index, Quotient, Remainder, Var

Pattern = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """What is known of the first lane's count: `offset` and a multiple; of 0, the count itself."""

    multiple: int = 1
    offset: int = 0


ANYWHERE = Start()


@functools.lru_cache(1 << 14)
def pattern(index: Index, lanes: Var, width: int, start: Start) -> Pattern | None:
    """How far each lane's index is from the first's, if that is the same in every vector.

    Data are the same in all lanes.
    """
    total = [0] * width
    for atom, factor in index.terms:
        found = _atom_pattern(atom, lanes, width, start)
        if found is None:
            return None
        total = [t + factor * step for t, step in zip(total, found, strict=True)]
    return tuple(total)


def _atom_pattern(atom: Atom, lanes: Var, width: int, start: Start) -> Pattern | None:
    match atom:
        case Bounded(inner, _):
            return pattern(inner, lanes, width, start)
        case Quotient(inner, _) | Remainder(inner, _):
            steps = pattern(inner, lanes, width, start)
            if steps is None or not any(steps):
                return steps
            return _divided(atom, steps, _started(inner, lanes, start))
        case Data():
            return (0,) * width
        case _:
            return tuple(range(width)) if atom == lanes else (0,) * width


def _divided(atom: Quotient | Remainder, steps: Pattern, start: Start) -> Pattern | None:
    """Lanes of what is divided that are `steps` from a first one."""
    divisor, is_quotient = atom.divisor, isinstance(atom, Quotient)
    if start.multiple % divisor == 0:  # where in a cycle the first one is, is known
        first = start.offset % divisor
        moved = [divmod(first + step, divisor) for step in steps]
        return tuple(q if is_quotient else r - first for q, r in moved)
    within = gcd(start.multiple, divisor)
    first = start.offset % within
    if min(steps) >= -first and first + max(steps) < within:  # no lane is in the next cycle
        return (0,) * len(steps) if is_quotient else steps
    return None


def _started(index: Index, lanes: Var, start: Start) -> Start:
    """What is known of an index in the first lane."""
    multiple, offset = 0, index.offset
    for atom, factor in index.terms:
        if atom == lanes:
            multiple, offset = (
                gcd(multiple, factor * start.multiple),
                offset + factor * start.offset,
            )
        else:
            multiple = gcd(multiple, factor)
    return Start(multiple, offset)


def step_of(steps: Pattern) -> int | None:
    """How far lanes are from their neighbours, if that is one number."""
    apart = {b - a for a, b in pairwise(steps)}
    return apart.pop() if len(apart) == 1 else None


def neighbours(steps: Pattern) -> int:
    """How many lanes in a row are neighbours in memory, in every row of so many."""
    width, run = len(steps), 1
    while run < width:
        wider = 2 * run
        starts = range(0, width, wider)
        if any(steps[s + i] != steps[s] + i for s in starts for i in range(wider)):
            break
        run = wider
    return run
