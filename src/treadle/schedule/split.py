"""Loops cut where a guard changes, so that what is put together or padded has no choices inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from treadle.kernel.index import Index, Var, substitute, variable
from treadle.kernel.nodes import (
    Apply,
    Convert,
    For,
    Guarded,
    Let,
    Role,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.schedule.nests import fresh, map_locals, map_places, names_in

MOST_PIECES = 8
LEAST_TURNS = 16  # of a piece: shorter ones gain nothing


def split(body: Sequence[Statement], taken: set[str]) -> list[Statement]:
    """Statements whose innermost loops are cut. Outermost loops stay: tasks are their turns."""
    found: list[Statement] = []
    for statement in body:
        if isinstance(statement, For):
            inner: list[Statement] = []
            for s in split(statement.body, taken):
                inner += _pieces(s, taken) if isinstance(s, For) else [s]
            statement = replace(statement, body=tuple(inner))
        found.append(statement)
    return found


def _pieces(loop: For, taken: set[str]) -> list[Statement]:
    """A loop as loops over parts of its range, in order."""
    is_plain = all(isinstance(s, (Let, Store, Update)) for s in loop.body)
    if loop.role is not Role.PARALLEL or loop.stop is not None or not is_plain:
        return [loop]
    ends = [0, *sorted(_changes(loop)), loop.var.extent]
    parts = list(pairwise(ends))
    is_worth_it = 1 < len(parts) <= MOST_PIECES and all(b - a >= LEAST_TURNS for a, b in parts)
    return [_piece(loop, a, b, taken) for a, b in parts] if is_worth_it else [loop]


def _changes(loop: For) -> set[int]:
    """Where inside the range a guard begins or ceases to hold."""
    found: set[int] = set()

    def note(guard: Within) -> None:
        if guard.index.terms == ((loop.var, 1),):
            found.update((guard.low - guard.index.offset, guard.high - guard.index.offset))

    for s in loop.body:
        assert isinstance(s, (Let, Store, Update))
        for guard in _guards(s.value):
            note(guard)
        if isinstance(s, Store) and s.guard is not None:
            note(s.guard)
    return {c for c in found if 0 < c < loop.var.extent}


def _guards(value: Value) -> list[Within]:
    match value:
        case Guarded(guard, inner, other):
            own = [guard] if isinstance(guard, Within) else []
            return own + [g for v in (guard, inner, other) for g in _guards(v)]
        case Apply(_, operands):
            return [g for v in operands for g in _guards(v)]
        case Convert(inner):
            return _guards(inner)
        case _:
            return []


def _piece(loop: For, begin: int, end: int, taken: set[str]) -> For:
    var = Var(fresh(loop.var.name, taken), end - begin)
    names = {n: fresh(n, taken) for n in sorted(names_in(loop.body))}
    values = {loop.var: variable(var) + begin}

    def move(index: Index) -> Index:
        return substitute(index, values)

    body: list[Statement] = []
    for s in loop.body:
        moved = map_locals(map_places(s, move), lambda n: names.get(n, n))
        assert isinstance(moved, (Let, Store, Update))
        moved = replace(moved, value=_settled(moved.value))
        if isinstance(moved, Store) and moved.guard is not None:
            holds = _holds(moved.guard)
            if holds is False:
                continue
            moved = replace(moved, guard=None) if holds else moved
        body.append(moved)
    return For(var, loop.role, tuple(body))


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
    match value:
        case Guarded(guard, inner, other, dtype):
            holds = _holds(guard)
            if holds is not None:
                return _settled(inner if holds else other)
            return Guarded(_settled(guard), _settled(inner), _settled(other), dtype)
        case Apply(op, operands, dtype):
            return Apply(op, tuple(map(_settled, operands)), dtype)
        case Convert(inner, dtype):
            return Convert(_settled(inner), dtype)
        case _:
            return value
