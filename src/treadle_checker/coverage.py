"""Which addresses of a buffer are stored to, as sets: each element that a buffer holds must be
among them, whoever stores it. How often something is stored says nothing of where.

A set is made of runs: a first address each, and one length for all. Terms of an index that share no
variable, nor a guard, are added as sets; those that do are written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from treadle_checker import program as ir
from treadle_checker.bounds import blocks_of
from treadle_checker.field import Array
from treadle_checker.index import Atom, Guard, Index, within
from treadle_checker.program import For, Kernel, Layout, Library, Matmul, Statement, Store, Value
from treadle_checker.reading import NotEstablished

Term = tuple[int, str | Atom]
MOST = 2**22  # addresses, or runs of them, that are written out
REPEAT = "of the repeat"  # the variable of a repeat's iterations


class OfData(NotEstablished):
    """Data decides where something is stored, or whether it is."""


@dataclass(frozen=True, slots=True)
class Touched:
    """Addresses of an access: its index, for all variables' values at which guards hold."""

    index: Index
    extents: Mapping[str, int]
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Runs:
    starts: Array  # in order, all different
    length: int


def is_covered(wanted: Runs, stored: Iterable[Runs]) -> bool:
    """Whether each wanted address is in one of the runs."""
    runs = [r for r in stored if len(r.starts) and r.length]
    if not len(wanted.starts) or not wanted.length:
        return True
    if not runs:
        return False
    starts = np.concatenate([r.starts for r in runs])
    stops = np.concatenate([r.starts + r.length for r in runs])
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    is_first = np.concatenate([[True], starts[1:] > stops[:-1]])
    first = np.flatnonzero(is_first)
    stops = stops[np.concatenate([first[1:] - 1, [len(stops) - 1]])]
    at = np.searchsorted(starts[first], wanted.starts, "right") - 1
    return bool((at >= 0).all() and (wanted.starts + wanted.length <= stops[at]).all())


def held_runs(layout: Layout) -> Runs:
    """Where a layout has elements."""
    return runs_of(Touched(layout.address, dict(layout.variables)))


def stores_to(kernel: Kernel, buffer: str, row: int = 0, times: int = 1) -> list[Runs]:
    """What a kernel stores to a buffer, in all iterations of a repeat that moves on by `row`."""
    found = []
    for touched in _stores(kernel.body, buffer, {}, ()):
        index = Index(touched.index.offset, (*touched.index.terms, (row, REPEAT)))
        extents = {**touched.extents, REPEAT: times}
        found.append(runs_of(Touched(index, extents, touched.guards)))
    return found


def _stores(
    body: tuple[Statement, ...], buffer: str, extents: Mapping[str, int], guards: tuple[Guard, ...]
) -> Iterator[Touched]:
    for s in body:
        if isinstance(s, For):
            ends = guards
            if s.stop is not None:
                terms = (*s.stop.terms, (-1, s.var))
                ends = (*guards, (Index(s.stop.offset, terms), 1, 2**62))
            if s.extent:
                yield from _stores(s.body, buffer, {**extents, s.var: s.extent}, ends)
        elif isinstance(s, Store) and s.buffer == buffer:
            yield Touched(s.index, extents, (*guards, *_guards(s.guard)))
        elif isinstance(s, (Matmul, Library)):
            for block in blocks_of(s)[0]:
                if block.buffer == buffer:
                    yield from _of_block(block, extents, guards)


def _of_block(
    block: ir.Block, extents: Mapping[str, int], guards: tuple[Guard, ...]
) -> Iterator[Touched]:
    if any(axis.listed for axis in block.axes):
        raise NotEstablished("a product stores to rows of a list")
    axes = {f"axis {i} of a block": axis for i, axis in enumerate(block.axes)}
    terms = tuple((axis.stride, name) for name, axis in axes.items())
    counts = {name: axis.count for name, axis in axes.items()}
    index = Index(block.index.offset, (*block.index.terms, *terms))
    yield Touched(index, {**extents, **counts}, guards)


def _guards(guard: Value | None) -> Iterator[Guard]:
    if guard is None:
        return
    if guard.kind == "within":
        yield guard.index, guard.low, guard.high
    elif guard.kind == "apply" and guard.name == "and":
        for operand in guard.operands:
            yield from _guards(operand)
    else:
        raise OfData("data decides what is stored")


def runs_of(touched: Touched) -> Runs:
    """All addresses of an access."""
    every = (touched.index, *(index for index, _, _ in touched.guards))
    if any(index.data for index in every):
        raise OfData("data decides where something is stored")
    offset, steps, sets = touched.index.offset, list[tuple[int, int]](), list[Array]()
    for part in _parts(touched):
        if (
            len(part.extents) == 1
            and not part.guards
            and all(isinstance(a, str) for _, a in part.index.terms)
        ):
            (n,) = part.extents.values()
            factor = sum(f for f, _ in part.index.terms)
            offset += min(0, factor * (n - 1))
            if not n:
                return Runs(np.zeros(0, np.int64), 0)
            if factor and n > 1:
                steps.append((abs(factor), n))
        else:
            sets.append(_written_out(part))
    return _summed(offset, steps, sets)


def _summed(offset: int, steps: list[tuple[int, int]], sets: list[Array]) -> Runs:
    """Every sum of a multiple of each step and one number of each set."""
    length, starts = 1, np.array([offset], np.int64)
    left = sorted(steps)
    wide = list[Array]()
    for some in sets:  # those without gaps are a run
        found = np.unique(some)
        if not len(found):
            return Runs(found, 0)
        step = int(found[1] - found[0]) if len(found) > 1 else 0
        if len(found) > 1 and (np.diff(found) == step).all():
            starts, left = starts + found[0], sorted([*left, (step, len(found))])
        else:
            wide.append(found)
    for step, n in left:
        if step <= length:
            length += step * (n - 1)
        else:
            if n > MOST:
                raise NotEstablished("too many addresses to list")
            wide.append(np.arange(n, dtype=np.int64) * step)
    for some in wide:
        if len(starts) * len(some) > MOST:
            raise NotEstablished("too many addresses to list")
        starts = np.unique(starts[:, None] + some)
    return Runs(starts, length)


def _parts(touched: Touched) -> list[Touched]:
    """Terms and guards that share variables, together."""
    groups: list[tuple[set[str], list[Term], list[Guard]]] = []
    given: list[tuple[set[str], list[Term], list[Guard]]] = [
        *((_names(t), [t], []) for t in touched.index.terms),
        *((g[0].names, [], [g]) for g in touched.guards),
    ]
    for names, terms, guards in given:
        joined = [g for g in groups if g[0] & names]
        groups = [g for g in groups if not g[0] & names]
        terms = [*terms, *(t for g in joined for t in g[1])]
        guards = [*guards, *(x for g in joined for x in g[2])]
        groups.append((names.union(*(g[0] for g in joined)), terms, guards))
    return [
        Touched(Index(0, tuple(terms)), {n: touched.extents[n] for n in names}, tuple(guards))
        for names, terms, guards in groups
    ]


def _names(term: Term) -> set[str]:
    return Index(0, (term,)).names


def _written_out(part: Touched) -> Array:
    if len(part.guards) == 1:
        index, low, high = part.guards[0]
        plain = all(isinstance(atom, str) for _, atom in index.terms)
        if (
            plain
            and {*index.terms} == {*part.index.terms}
            and math.prod(part.extents.values()) > MOST
        ):
            whole = runs_of(Touched(index, part.extents))
            if len(whole.starts) == 1 and whole.length <= 4 * MOST:
                first = int(whole.starts[0])
                return np.arange(max(low, first), min(high, first + whole.length)) - index.offset
    names, extents = list(part.extents), list(part.extents.values())
    count = math.prod(extents)
    if count > MOST:
        raise NotEstablished("too many iterations to list")
    grid = dict(zip(names, np.indices(extents, np.int64, sparse=True), strict=True))
    at = np.broadcast_to(part.index.at(grid), extents)
    held = np.broadcast_to(within(part.guards, lambda index: index.at(grid)), extents)
    return np.unique(at[held])
