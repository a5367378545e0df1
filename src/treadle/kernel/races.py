"""Where iterations of a loop that run side by side may meet in memory.

Two iterations meet in a buffer if one of them may write an element that the other reads or writes.
The analysis is shared: the scheduler asks before it gives a loop to lanes, the verifier asks too.
It says that iterations stay apart only where it can show that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from treadle.kernel.access import BLOCK, accesses, changed_in, locals_in, names_in, written_in
from treadle.kernel.index import (
    Atom,
    Bounded,
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    atom_range,
    data_locals,
    opened,
    uses,
    variables_in,
)
from treadle.kernel.nodes import For, Let, Load, Position, Statement, Update, Within
from treadle.kernel.traverse import loop_variables, subvalues, walk


def conflicts_in(loop: For, exempt: Iterable[str] = (), with_sums: bool = False) -> set[str]:
    """Buffers in which two iterations of a loop may meet; those of shared sums `with_sums` alone.

    Iterations that do nothing but add to a buffer, each addition in one step, may meet in it.
    """
    if loop.var.extent < 2:
        return set()
    written = written_in(loop.body) - set(exempt)
    if not with_sums:
        written -= shared_sums(loop.body)
    if not written:
        return written
    touched: dict[str, list[Index]] = {}
    for access in accesses(loop.body, written):
        touched.setdefault(access.buffer, []).append(access.every)
    has_data = any(data_locals(index) for name in written for index in touched[name])
    inside = _Inside.of(loop, has_data)
    return {n for n in written if not inside.keeps_apart(touched[n])}


def shared_sums(body: Sequence[Statement]) -> set[str]:
    """Buffers that some statements only add to, where additions may meet."""
    updates = Counter(s.buffer for s in walk(body) if isinstance(s, Update) and s.shared)
    if not updates:
        return set()
    touched = Counter(access.buffer for access in accesses(body, updates))
    return {name for name, count in updates.items() if touched[name] == count}


@dataclass(frozen=True, slots=True)
class _Split:
    """An index in three parts: what all iterations share, what moves with them, what is free."""

    shared: dict[Atom, int]
    moving: dict[Atom, int]
    free: dict[Atom, int]
    offset: int


@dataclass(frozen=True, slots=True)
class _Inside:
    """What differs between two iterations, beside the loop's variable itself."""

    var: Var
    variables: frozenset[Var]  # of the loops inside
    locals: frozenset[str]  # that are named or changed inside

    @staticmethod
    def of(loop: For, has_data: bool) -> _Inside:
        """Of a loop in which some index is data, or none: then no local matters."""
        variables = frozenset(loop_variables(loop.body))
        if not has_data:
            return _Inside(loop.var, variables, frozenset())
        named = names_in(loop.body) | changed_in(loop.body)
        return _Inside(loop.var, variables, frozenset(named - _uniform(loop, named, variables)))

    def keeps_apart(self, indices: Sequence[Index]) -> bool:
        """Whether iterations do not meet, with bounded sums as one number or written out."""
        if _stay_apart([self.split(i) for i in indices], self):
            return True
        spelled = [opened(i) for i in indices]
        return spelled != indices and _stay_apart([self.split(i) for i in spelled], self)

    def split(self, index: Index) -> _Split:
        shared: dict[Atom, int] = {}
        moving: dict[Atom, int] = {}
        free: dict[Atom, int] = {}
        offset = index.offset
        for atom, factor in index.terms:
            low, high = atom_range(atom)
            if low == high:  # it is a number: two of its values cannot be confused
                offset += low * factor
            elif self._is_free(atom):
                free[atom] = factor
            else:
                (moving if uses(atom, self.var) else shared)[atom] = factor
        return _Split(shared, moving, free, offset)

    def differs(self, atom: Atom) -> bool:
        """Whether an atom may have two values in two iterations."""
        return uses(atom, self.var) or self._is_free(atom)

    def _is_free(self, atom: Atom) -> bool:
        if isinstance(atom, Var):
            return atom in self.variables or atom.name in BLOCK
        if isinstance(atom, Data):
            return atom.local in self.locals
        has_data = not self.locals.isdisjoint(data_locals(atom.index))
        return has_data or not self.variables.isdisjoint(variables_in(atom.index))


def _uniform(loop: For, named: set[str], variables: frozenset[Var]) -> set[str]:
    """Locals that are named inside and are the same in all iterations: where a window starts."""
    written = written_in(loop.body)
    lets = [s for s in walk(loop.body) if isinstance(s, Let)]
    counts = Counter(s.local for s in lets)
    changed = changed_in(loop.body) | {name for name, count in counts.items() if count > 1}
    found: set[str] = set()
    for s in lets:
        if s.local in changed:
            continue
        is_same = not (locals_in(s.value) & named - found)
        for part in subvalues(s.value):
            if isinstance(part, (Load, Position, Within)):
                moves = any(uses(a, v) for a, _ in part.index.terms for v in (loop.var, *variables))
                is_changed = isinstance(part, Load) and part.buffer in written
                is_same = is_same and not moves and not is_changed
        if is_same:
            found.add(s.local)
    return found


def _stay_apart(indices: Sequence[_Split], inside: _Inside) -> bool:
    """Whether the element says which iteration it belongs to, in all of the indices alike."""
    first = indices[0]
    if any(p.moving != first.moving for p in indices):
        return False
    # What iterations share and only some indices have may be any number to the others.
    common = frozenset.intersection(*(frozenset(p.shared.items()) for p in indices))
    indices = [replace(p, free=p.free | dict(p.shared.items() - common)) for p in indices]
    # A number that moves inside an iteration too may still tell which one it is.
    both = frozenset.intersection(*(frozenset(p.free.items()) for p in indices))
    told = [*first.moving.items(), *((a, f) for a, f in both if uses(a, inside.var))]
    digits = {a for a, f in told if _is_digit(a, f, indices)}
    return inside.var in _known(digits, inside)


def _is_digit(atom: Atom, factor: int, indices: Sequence[_Split]) -> bool:
    """Whether elements that differ in the atom differ, whatever everything else is.

    For some modulus, terms are multiples of it or small: the atom is what is left of an element's
    index after division by the modulus and by the factor.
    """
    low, high = atom_range(atom)
    size = abs(factor)
    moduli = {abs(f) for p in indices for _, f in _others(p, atom)}
    moduli |= {abs(p.offset - indices[0].offset) for p in indices}
    for modulus in (0, *sorted(m for m in moduli if m > size)):
        span = _small_span(indices, atom, modulus)
        if span < size and (not modulus or size * (high - low) + span < modulus):
            return True
    return False


def _others(split: _Split, atom: Atom) -> Iterator[tuple[Atom, int]]:
    yield from ((a, f) for part in (split.free, split.moving) for a, f in part.items() if a != atom)


def _small_span(indices: Sequence[_Split], atom: Atom, modulus: int) -> int:
    """How far apart the sums of the small terms can be; 0 as a modulus divides nothing."""
    least, most = math.inf, -math.inf
    for split in indices:
        low = split.offset - indices[0].offset
        low -= round(low / modulus) * modulus if modulus else 0
        high = low
        for other, factor in _others(split, atom):
            if modulus and factor % modulus == 0:
                continue
            ends = [x * factor for x in atom_range(other)]
            low, high = low + min(ends), high + max(ends)
        least, most = min(least, low), max(most, high)
    return int(most - least)


def _known(digits: set[Atom], inside: _Inside) -> set[Atom]:
    """What some digits make known: a quotient and its remainder give what was divided."""
    known = set(digits)
    pending = list(digits)
    while pending:
        atom = pending.pop()
        match atom:
            case Quotient(index, divisor) | Remainder(index, divisor):
                is_given = known >= {Quotient(index, divisor), Remainder(index, divisor)}
            case Bounded(index):
                is_given = True
            case _:
                continue
        if not is_given:
            continue
        unknown = [a for a, _ in index.terms if a not in known and inside.differs(a)]
        if len(unknown) > 1:  # blocks and what is inside them: its digits are known too
            split = inside.split(index)
            unknown = [a for a, f in split.moving.items() if _is_digit(a, f, [split])]
        new = [a for a in unknown if a not in known]
        known.update(new)
        pending += new
    return known
