"""Loops whose iterations take turns at several things: a loop for each of them.

Elements of a transposed convolution, of a resized image or of what was stacked along its last axis
come from one place in even iterations and from another in odd ones. Lanes would each choose and
load for themselves. In a loop over the even ones, and in one over the odd ones, nothing is left to
choose, and neighbours are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.access import names_in
from treadle.kernel.index import Bounded, Index, Quotient, Remainder, Var, constant, variable
from treadle.kernel.nodes import For, Let, Role, Statement, Store, Within
from treadle.kernel.target import Fusion
from treadle.kernel.traverse import (
    map_statements,
    map_values,
    substituted,
    subvalues,
    values_of,
    with_locals,
)
from treadle.schedule.nests import fresh
from treadle.schedule.split import settled


def in_phases(body: Sequence[Statement], taken: set[str], sizes: Fusion) -> list[Statement]:
    """Statements whose inner loops are cut. Outermost loops stay: tasks are their iterations."""

    def cut(s: Statement) -> list[Statement]:
        return _phases(s, taken, sizes) if isinstance(s, For) else [s]

    return [replace(s, body=map_statements(s.body, cut)) if isinstance(s, For) else s for s in body]


def _phases(loop: For, taken: set[str], sizes: Fusion) -> list[Statement]:
    if loop.role is not Role.PARALLEL or loop.stop is not None:
        return [loop]
    if _is_plain(loop.body):
        return _by_remainder(loop, taken, sizes)
    return _by_inner_loop(loop, taken, sizes)


def _is_plain(body: Sequence[Statement]) -> bool:
    return all(isinstance(s, (Let, Store)) for s in body)


def _by_remainder(loop: For, taken: set[str], sizes: Fusion) -> list[Statement]:
    """A loop over the iterations of each remainder on which a guard depends."""
    extent = loop.var.extent
    divisors = {d for index in _guards(loop.body) for d in _divisors(index, loop.var)}
    usable = [d for d in divisors if d <= sizes.most_phases and extent % d == 0]
    if not usable or extent < max(usable) * sizes.least_lanes:
        return [loop]
    count = max(usable)
    parts = []
    for phase in range(count):
        var = Var(fresh(loop.var.name, taken), extent // count)
        at = {loop.var: variable(var) * count + phase}
        parts.append(_phase(var, loop.role, loop.body, at, taken))
    return parts


def _by_inner_loop(loop: For, taken: set[str], sizes: Fusion) -> list[Statement]:
    """The loop again for each iteration of a short one inside, on which a guard depends."""
    match loop.body:
        case (For(short, Role.PARALLEL, inner, None),) if _is_plain(inner):
            pass
        case _:
            return [loop]
    is_chosen = any(index.terms == ((short, 1),) for index in _guards(inner))
    if not is_chosen or short.extent > sizes.most_phases or loop.var.extent < sizes.least_lanes:
        return [loop]
    parts = []
    for phase in range(short.extent):
        var = Var(fresh(loop.var.name, taken), loop.var.extent)
        at = {short: constant(phase), loop.var: variable(var)}
        parts.append(_phase(var, loop.role, inner, at, taken))
    return parts


def _phase(
    var: Var, role: Role, body: Sequence[Statement], at: dict[Var, Index], taken: set[str]
) -> Statement:
    names = {n: fresh(n, taken) for n in sorted(names_in(body))}
    moved = with_locals(substituted(body, at), names)
    return For(var, role, tuple(map_values(s, settled) for s in moved))


def _guards(body: Sequence[Statement]) -> list[Index]:
    """What guards of values look at."""
    parts = (p for s in body for value in values_of(s) for p in subvalues(value))
    return [p.index for p in parts if isinstance(p, Within)]


def _divisors(index: Index, var: Var) -> set[int]:
    """By what an index divides a sum with the variable to get a remainder."""
    found: set[int] = set()
    for atom, _ in index.terms:
        if isinstance(atom, Remainder) and atom.index.factor_of(var) == 1:
            found.add(atom.divisor)
        if isinstance(atom, (Remainder, Quotient, Bounded)):
            found |= _divisors(atom.index, var)
    return found
