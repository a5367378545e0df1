"""Loops cut where a guard changes, so that what is put together or padded has no choices inside.

And loops nested where an index divides what they count, so that inside it is affine: rows of a
reshaped tensor, with a factor for each of its channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from treadle.kernel.access import names_in
from treadle.kernel.index import (
    Atom,
    Bounded,
    Index,
    Quotient,
    Remainder,
    Var,
    variable,
)
from treadle.kernel.nodes import (
    For,
    Guarded,
    Let,
    LibraryCall,
    Matmul,
    Role,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.kernel.target import Fusion
from treadle.kernel.traverse import (
    indices_of,
    map_statements,
    map_value,
    substituted,
    subvalues,
    values_of,
    with_locals,
)
from treadle.schedule.nests import fresh


def split(body: Sequence[Statement], taken: set[str], sizes: Fusion) -> list[Statement]:
    """Statements whose inner loops are cut. Outermost loops stay: tasks are their iterations."""

    def cut(s: Statement) -> list[Statement]:
        if not isinstance(s, For):
            return [s]
        return [n for piece in _pieces(s, taken, sizes) for n in _nested(piece, taken, sizes)]

    return [replace(s, body=map_statements(s.body, cut)) if isinstance(s, For) else s for s in body]


def _pieces(loop: For, taken: set[str], sizes: Fusion) -> list[Statement]:
    """A loop as loops over parts of its range, in order."""
    is_plain = all(isinstance(s, (Let, Store, Update)) for s in loop.body)
    if loop.role is not Role.PARALLEL or loop.stop is not None or not is_plain:
        return [loop]
    ends = [0, *sorted(_changes(loop)), loop.var.extent]
    parts = list(pairwise(ends))
    is_long = all(b - a >= sizes.least_piece for a, b in parts)
    is_worth_it = is_long and 1 < len(parts) <= sizes.most_pieces
    return [_piece(loop, a, b, taken) for a, b in parts] if is_worth_it else [loop]


def _changes(loop: For) -> set[int]:
    """Where inside the range a guard begins or ceases to hold."""
    found: set[int] = set()
    for guard in (g for s in loop.body for g in _guards(s)):
        if isinstance(guard, Within) and guard.index.terms == ((loop.var, 1),):
            found.update((guard.low - guard.index.offset, guard.high - guard.index.offset))
    return {c for c in found if 0 < c < loop.var.extent}


def _guards(statement: Statement) -> list[Value]:
    parts = [part for value in values_of(statement) for part in subvalues(value)]
    found = [part.guard for part in parts if isinstance(part, Guarded)]
    if isinstance(statement, Store) and statement.guard is not None:
        found.append(statement.guard)
    return found


def _piece(loop: For, begin: int, end: int, taken: set[str]) -> For:
    var = Var(fresh(loop.var.name, taken), end - begin)
    names = {n: fresh(n, taken) for n in sorted(names_in(loop.body))}
    values = {loop.var: variable(var) + begin}

    body: list[Statement] = []
    for moved in with_locals(substituted(loop.body, values), names):
        assert isinstance(moved, (Let, Store, Update))
        moved = replace(moved, value=_settled(moved.value))
        if isinstance(moved, Store) and moved.guard is not None:
            holds = _holds(moved.guard)
            if holds is False:
                continue
            moved = replace(moved, guard=None) if holds else moved
        body.append(moved)
    return For(var, loop.role, tuple(body))


def _nested(loop: Statement, taken: set[str], sizes: Fusion) -> list[Statement]:
    """A loop as one over equal parts and one inside, if lanes would each divide otherwise."""
    if not isinstance(loop, For) or loop.role not in (Role.PARALLEL, Role.SEQUENTIAL):
        return [loop]
    if loop.stop is not None or any(isinstance(s, (For, Matmul, LibraryCall)) for s in loop.body):
        return [loop]
    extent = loop.var.extent
    atoms = [atom for index in indices_of(loop.body) for atom, _ in index.terms]
    periods = {p for p in (_period(atom, loop.var) for atom in atoms) if p is not None}
    usable = [p for p in periods if sizes.least_piece <= p < extent and extent % p == 0]
    if not usable:
        return [loop]
    inner = Var(fresh(loop.var.name, taken), min(usable))
    outer = Var(fresh(f"{loop.var.name}q", taken), extent // inner.extent)
    values = {loop.var: variable(outer) * inner.extent + variable(inner)}
    nested = For(inner, loop.role, substituted(loop.body, values))
    return [For(outer, loop.role, (nested,))]


def _period(atom: Atom, var: Var) -> int | None:
    """How many values of a variable a quotient or remainder takes before it moves on."""
    if isinstance(atom, Bounded):
        return _period_of(atom.index, var)
    if not isinstance(atom, (Quotient, Remainder)):
        return None
    if atom.index.factor_of(var) == 1:
        others = [f for a, f in atom.index.terms if a != var]
        is_aligned = not any(f % atom.divisor for f in (*others, atom.index.offset))
        return atom.divisor if is_aligned else None
    inner = _period_of(atom.index, var)
    return inner * atom.divisor if inner and isinstance(atom, Quotient) else inner


def _period_of(index: Index, var: Var) -> int | None:
    found = [p for p in (_period(atom, var) for atom, _ in index.terms) if p is not None]
    return found[0] if len(found) == 1 else None


def _holds(guard: Value) -> bool | None:
    """Whether a guard holds everywhere or nowhere; None if neither."""
    if not isinstance(guard, Within):
        return None
    low, high = guard.index.range
    if guard.low <= low and high < guard.high:
        return True
    return False if high < guard.low or low >= guard.high else None


def _settled(value: Value) -> Value:
    """The value without choices that are no choice."""

    def chosen(part: Value) -> Value:
        holds = _holds(part.guard) if isinstance(part, Guarded) else None
        if holds is None or not isinstance(part, Guarded):
            return part
        return part.value if holds else part.other

    return map_value(value, chosen)
