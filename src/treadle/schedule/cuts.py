"""How the loops of a reduction are ordered and cut into parts.

A processor's cores take blocks of rows. A GPU's threads walk a tensor as it lies in memory: what a
reshape made of several axes is several loops again, what is permuted is walked as it was before,
and neighbouring loops that sum are one. Where the sums do not fill a device by themselves, the
outermost of these loops is cut into as many parts as do. The shape alone decides, so that any
number of threads gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.kernel.contraction import size
from treadle.kernel.index import Index, Var, bounded, divide, substitute, variable
from treadle.kernel.nodes import Within
from treadle.kernel.target import Matmuls, Reductions
from treadle.schedule.nests import best_divisor, divisors, flat_index
from treadle.schedule.split import period


@dataclass(frozen=True, slots=True)
class Walk:
    """Loops over a tensor in some order, and the indices along its axes that they count."""

    source: tuple[Index, ...]
    order: tuple[Var, ...]
    summed: frozenset[Var]

    @property
    def is_by_columns(self) -> bool:
        """Whether neighbours belong to other sums."""
        return bool(self.order) and self.order[-1] not in self.summed

    def is_in_order(self, index: Index) -> bool:
        """Whether elements at an index lie in the order of the loops."""
        return _by_steps(self, index).order == self.order

    def by(self, values: Mapping[Var, Index], order: Sequence[Var], summed: bool) -> Walk:
        """Some variables by others, all of them summed or none."""
        source = tuple(substitute(index, values) for index in self.source)
        new = frozenset(order) - frozenset(self.order) if summed else frozenset[Var]()
        return Walk(source, tuple(order), (self.summed - values.keys()) | new)

    def whole(self, axes: frozenset[int]) -> Loops:
        """The loops, nothing of what is summed in parts."""
        summed = [v for v in self.order if v in self.summed]
        others = [v for v in self.order if v not in self.summed]
        return Loops(self.source, axes, [], summed, others)


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops of a reduction: over parts of what is summed, inside a part, and over the rest."""

    source: tuple[Index, ...]
    axes: frozenset[int]  # of the source, that are summed
    parts: list[Var]
    inner: list[Var]
    others: list[Var]
    guards: tuple[Within, ...] = ()  # that hold inside the source, where the last part is shorter

    @property
    def result(self) -> tuple[Index, ...]:
        return tuple(index for i, index in enumerate(self.source) if i not in self.axes)

    @property
    def stored(self) -> list[Var]:
        """Loops over what the parts give."""
        return [*self.parts, *self.others]

    @property
    def at(self) -> Index:
        """Where a part's result is."""
        return flat_index(self.stored)

    def cut(self, parts: list[Var], var: Var, length: int, inner: list[Var]) -> Loops:
        """Some loops over parts, one cut into parts of a length, and others inside a part."""
        count = -(-var.extent // length)
        outer, rest = Var(f"{var.name}b", count), Var(f"{var.name}r", length)
        at = variable(outer) * length + variable(rest)
        values = {var: bounded(at, var.extent)}
        source = tuple(substitute(index, values) for index in self.source)
        guards = () if count * length == var.extent else (Within(at, 0, var.extent),)
        return Loops(source, self.axes, [*parts, outer], [rest, *inner], self.others, guards)


def for_cores(loops: Loops, is_last: bool, sizes: Reductions, matmuls: Matmuls) -> Loops:
    """Along whole rows where nothing stays, by blocks of rows where the last axes do."""
    summed, others = loops.inner, loops.others
    if others:
        if not is_last or size(others) < sizes.fewest_parts:
            return loops
    elif len(summed) > 1:
        count = 1
        while count < len(summed) - 1 and size(summed[:count]) < sizes.fewest_parts:
            count += 1
        return replace(loops, parts=summed[:count], inner=summed[count:])
    var = summed[-1]
    length = matmuls.block_rows(size(summed)) if others else max(1, var.extent // sizes.least_part)
    return loops.cut(summed[:-1], var, best_divisor(var.extent, min(var.extent, length)), [])


def for_threads(loops: Loops, wanted: int, is_even: bool, pack: int) -> Loops:
    """About as many parts as wanted; all of one length, if they must be.

    What is left of a row is cut into whole packs, so that each part starts with one.
    """
    summed = loops.inner
    parts: list[Var] = []
    for i, var in enumerate(summed):
        if wanted <= 1:
            return replace(loops, parts=parts, inner=summed[i:])
        if var.extent > wanted:
            inner = summed[i + 1 :]
            length = _length(var.extent, wanted, 1 if inner else pack, is_even)
            return loops.cut(parts, var, length, inner)
        parts.append(var)
        wanted //= var.extent
    return replace(loops, parts=parts, inner=[])


def _length(extent: int, wanted: int, pack: int, is_even: bool) -> int:
    """Of parts, of which there are at most as many as wanted; of whole packs, if some divide."""
    near = [n for n in divisors(extent) if wanted <= 2 * n and n <= wanted]
    whole = [n for n in near if extent // n % pack == 0]
    if near:
        return extent // (whole or near)[-1]
    if is_even:
        return extent // best_divisor(extent, wanted)
    length = -(-extent // wanted)
    return -(-length // pack) * pack


def as_it_lies(walk: Walk, indices: Sequence[Index]) -> Walk:
    """The loops in the order in which elements at an index lie: of several the first."""
    walk, indices = _apart(walk, list(indices))
    walk = _by_steps(walk, indices[0]) if indices else walk
    return _merged(walk, indices)


def _apart(walk: Walk, indices: list[Index]) -> tuple[Walk, list[Index]]:
    """Loops of which an index is no multiple as several, of which it is one."""
    for at, var in enumerate(walk.order):
        atoms = [atom for index in indices for atom, _ in index.terms]
        lengths = {p for p in (period(atom, var) for atom in atoms) if p is not None}
        usable = [p for p in lengths if 1 < p < var.extent and var.extent % p == 0]
        if not usable:
            continue
        length = min(usable)
        outer, rest = Var(f"{var.name}q", var.extent // length), Var(f"{var.name}m", length)
        values = {var: variable(outer) * length + variable(rest)}
        order = (*walk.order[:at], outer, rest, *walk.order[at + 1 :])
        moved = [substitute(index, values) for index in indices]
        return _apart(walk.by(values, order, var in walk.summed), moved)
    return walk, indices


def _by_steps(walk: Walk, index: Index) -> Walk:
    """The longest steps first; those that do not move the index are outside of all."""
    steps = {v: index.factor_of(v) for v in walk.order}
    if any(step is None for step in steps.values()):
        return walk
    far = max(map(abs, map(int, filter(None, steps.values()))), default=0) + 1
    return replace(walk, order=tuple(sorted(walk.order, key=lambda v: -abs(steps[v] or far))))


def _merged(walk: Walk, indices: Sequence[Index]) -> Walk:
    """Neighbouring loops that sum as one, where every index stays a multiple of it."""
    for at, (a, b) in enumerate(zip(walk.order, walk.order[1:], strict=False)):
        if a not in walk.summed or b not in walk.summed:
            continue
        both = Var(f"{a.name}{b.name}", a.extent * b.extent)
        values = dict(zip((a, b), divide(variable(both), b.extent), strict=True))
        moved = [substitute(index, values) for index in indices]
        if all(index.factor_of(both) is not None for index in moved):
            order = (*walk.order[:at], both, *walk.order[at + 2 :])
            return _merged(walk.by(values, order, True), moved)
    return walk
