"""Two sums over the same loops become one: what both read is read once."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.kernel.access import accesses
from treadle.kernel.index import Index, Var, substitute, variable
from treadle.kernel.nodes import Accumulate, For, Kernel, Let, Role, Statement, Store
from treadle.schedule.nests import map_places, with_own_names

LARGE = 1 << 16  # elements that are worth reading once


@dataclass(frozen=True, slots=True)
class _Sum:
    """Parallel loops around everything, loops that sum, and what comes before and after those."""

    turns: tuple[Var, ...]
    before: tuple[Statement, ...]
    loops: tuple[Var, ...]
    inner: tuple[Statement, ...]
    after: tuple[Statement, ...]


def _sum(kernel: Kernel) -> _Sum | None:
    turns, body = list[Var](), kernel.body
    while len(body) == 1 and isinstance(body[0], For) and body[0].role is Role.PARALLEL:
        turns.append(body[0].var)
        body = body[0].body
    places = [i for i, s in enumerate(body) if isinstance(s, For)]
    if len(places) != 1 or not turns or kernel.scratch:
        return None
    at = places[0]
    loops, inner = list[Var](), (body[at],)
    while len(inner) == 1 and isinstance(inner[0], For) and inner[0].role is Role.SEQUENTIAL:
        loops.append(inner[0].var)
        inner = inner[0].body
    is_plain = all(isinstance(s, (Let, Accumulate)) for s in inner)
    is_plain = is_plain and all(isinstance(s, (Let, Store)) for s in (*body[:at], *body[at + 1 :]))
    if not loops or not is_plain:
        return None
    return _Sum(tuple(turns), tuple(body[:at]), tuple(loops), tuple(inner), tuple(body[at + 1 :]))


def twins(first: Kernel, second: Kernel) -> Kernel | None:
    """Both sums in one kernel, if they walk the same loops and read something large alike."""
    a, b = _sum(first), _sum(second)
    if a is None or b is None:
        return None
    extents = [tuple(v.extent for v in (*s.turns, *s.loops)) for s in (a, b)]
    if extents[0] != extents[1] or len(a.turns) != len(b.turns):
        return None
    second, moved = with_own_names(second, second.body, first, first.body)
    b = _sum(Kernel(second.name, second.inputs, second.outputs, moved))
    assert b is not None
    pairs = zip((*b.turns, *b.loops), (*a.turns, *a.loops), strict=True)
    values: dict[Var, Index] = {old: variable(new) for old, new in pairs}

    def renamed(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(map_places(s, lambda i: substitute(i, values)) for s in body)

    inner = renamed(b.inner)
    sizes = {x.name: x.size for x in first.inputs}
    ours = {(x.buffer, x.index) for x in accesses(a.inner) if sizes.get(x.buffer, 0) >= LARGE}
    if not ours & {(x.buffer, x.index) for x in accesses(inner)}:
        return None
    body: tuple[Statement, ...] = (*a.inner, *inner)
    for var in reversed(a.loops):
        body = (For(var, Role.SEQUENTIAL, body),)
    body = (*a.before, *renamed(b.before), *body, *a.after, *renamed(b.after))
    for var in reversed(a.turns):
        body = (For(var, Role.PARALLEL, body),)
    inputs = {x.name: x for x in (*first.inputs, *second.inputs)}
    origins = tuple(dict.fromkeys((*first.origins, *second.origins)))
    outputs = (*first.outputs, *second.outputs)
    return Kernel(first.name, tuple(inputs.values()), outputs, body, origins)
