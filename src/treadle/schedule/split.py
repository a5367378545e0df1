"""Loops cut: where a guard changes, where an index divides, and where a sum is long.

What is put together or padded has no choices inside a loop that is cut where its guards change.
Loops are nested where an index divides what they count, so that inside it is affine: rows of a
reshaped tensor, with a factor for each of its channels.
Terms that are added one after another to one number are each rounded at its size: an error that
grows with their number. So a loop that adds many becomes blocks of about as many iterations as
there are blocks, each with an accumulator of its own. The blocks are fixed by the shape: any number
of threads gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from treadle.base.dtypes import DType
from treadle.kernel.access import locals_in, names_in
from treadle.kernel.index import (
    Atom,
    Bounded,
    Index,
    Quotient,
    Remainder,
    Var,
    data_locals,
    variable,
)
from treadle.kernel.nodes import (
    Accumulate,
    For,
    Guarded,
    Let,
    LibraryCall,
    Literal,
    Local,
    Matmul,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.kernel.target import Fusion, Reductions
from treadle.kernel.traverse import (
    indices_of,
    map_statements,
    map_value,
    map_values,
    substituted,
    subvalues,
    tally,
    values_of,
    walk,
    with_locals,
)
from treadle.schedule.nests import Body, best_divisor, fresh, is_sum


def split(body: Sequence[Statement], taken: set[str], sizes: Fusion) -> list[Statement]:
    """Statements whose inner loops are cut.

    Outermost loops stay, as tasks are their iterations, unless they are many sums.
    """

    def cut(s: Statement) -> list[Statement]:
        if not isinstance(s, For):
            return [s]
        return [n for piece in _pieces(s, taken, sizes) for n in _nested(piece, taken, sizes)]

    found = [
        replace(s, body=map_statements(s.body, cut)) if isinstance(s, For) else s for s in body
    ]
    return [n for s in found for n in (_nested(s, taken, sizes) if _is_many_sums(s) else [s])]


def _is_many_sums(statement: Statement) -> bool:
    """Whether iterations are sums of their own: lanes of them would each divide for every term."""
    if not isinstance(statement, For):
        return False
    return any(isinstance(s, For) and s.role is Role.SEQUENTIAL for s in statement.body)


def _pieces(loop: For, taken: set[str], sizes: Fusion) -> list[Statement]:
    """A loop as loops over parts of its range, in order."""
    is_plain = all(isinstance(s, (Let, Store, Update)) for s in loop.body)
    if loop.role is not Role.PARALLEL or loop.stop is not None or not is_plain:
        return [loop]
    ends = [0, *sorted(_changes(loop)), loop.var.extent]
    parts = list(pairwise(ends))
    is_long = any(b - a >= sizes.least_lanes for a, b in parts)  # borders may be short
    is_worth_it = is_long and 1 < len(parts) <= sizes.most_pieces
    return [_piece(loop, a, b, taken) for a, b in parts] if is_worth_it else [loop]


def _changes(loop: For) -> set[int]:
    """Where inside the range a guard begins or ceases to hold."""
    found: set[int] = set()
    for part in (p for s in loop.body for value in values_of(s) for p in subvalues(value)):
        if isinstance(part, Within) and part.index.terms == ((loop.var, 1),):
            found.update((part.low - part.index.offset, part.high - part.index.offset))
    return {c for c in found if 0 < c < loop.var.extent}


def _piece(loop: For, begin: int, end: int, taken: set[str]) -> For:
    var = Var(fresh(loop.var.name, taken), end - begin)
    names = {n: fresh(n, taken) for n in sorted(names_in(loop.body))}
    moved = with_locals(substituted(loop.body, {loop.var: variable(var) + begin}), names)
    return For(var, loop.role, tuple(map_values(s, settled) for s in moved))


def _nested(loop: Statement, taken: set[str], sizes: Fusion) -> list[Statement]:
    """A loop as one over equal parts and one inside, if lanes would each divide otherwise."""
    if not isinstance(loop, For) or loop.role not in (Role.PARALLEL, Role.SEQUENTIAL):
        return [loop]
    inner_loops = [s for s in walk(loop.body) if isinstance(s, For)]
    has_calls = any(isinstance(s, (Matmul, LibraryCall)) for s in walk(loop.body))
    if (
        loop.stop is not None
        or has_calls
        or any(s.role is not Role.SEQUENTIAL for s in inner_loops)
    ):
        return [loop]
    extent = loop.var.extent
    atoms = [atom for index in indices_of(loop.body) for atom, _ in index.terms]
    periods = {p for p in (period(atom, loop.var) for atom in atoms) if p is not None}
    least = sizes.least_lanes if inner_loops else sizes.least_piece
    usable = [p for p in periods if least <= p < extent and extent % p == 0]
    if not usable:
        return [loop]
    inner = Var(fresh(loop.var.name, taken), min(usable))
    outer = Var(fresh(f"{loop.var.name}q", taken), extent // inner.extent)
    values = {loop.var: variable(outer) * inner.extent + variable(inner)}
    body = substituted(loop.body, values)
    if is_sum(loop):  # lanes add up all parts, and are added once
        outer, inner = inner, outer
    return [For(outer, loop.role, (For(inner, loop.role, body),))]


def period(atom: Atom, var: Var) -> int | None:
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
    found = [p for p in (period(atom, var) for atom, _ in index.terms) if p is not None]
    return found[0] if len(found) == 1 else None


def _holds(guard: Value) -> bool | None:
    """Whether a guard holds everywhere or nowhere; None if neither."""
    if not isinstance(guard, Within):
        return None
    low, high = guard.index.range
    if guard.low <= low and high < guard.high:
        return True
    return False if high < guard.low or low >= guard.high else None


def settled(value: Value) -> Value:
    """The value without choices that are no choice."""

    def chosen(part: Value) -> Value:
        holds = _holds(part.guard) if isinstance(part, Guarded) else None
        if holds is None or not isinstance(part, Guarded):
            return part
        return part.value if holds else part.other

    return map_value(value, chosen)


Sums = dict[str, DType]


def with_blocks(body: Sequence[Statement], taken: set[str], sizes: Reductions) -> Body:
    """Statements whose long sums are made in blocks; new names are taken."""

    def cut(s: Statement) -> list[Statement]:
        return _Blocks(taken, _sums_of(s), sizes).of(s) if isinstance(s, For) else [s]

    return map_statements(body, cut)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Cuts one loop, which accumulates some locals of outside."""

    taken: set[str]
    sums: Sums
    sizes: Reductions

    def of(self, loop: For) -> list[Statement]:
        if not self.sums or loop.role is Role.PARALLEL:
            return [loop]
        if any(isinstance(s, (Matmul, LibraryCall)) for s in walk(loop.body)):
            return [loop]
        extent = loop.var.extent
        if loop.role is Role.VECTOR:
            is_long = extent > self.sizes.longest_lane_sum and loop.stop is None
            return self.cut(loop, self.sizes.lane_block) if is_long else [loop]
        if _additions(loop) <= self.sizes.longest_sum:
            return [loop]
        loop = replace(loop, body=tuple(self.apart(loop.body)))
        if extent <= self.sizes.longest_sum or loop.stop is not None:
            return [loop]
        return self.cut(loop, _block(extent))

    def apart(self, body: Sequence[Statement]) -> list[Statement]:
        """Loops inside with accumulators of their own."""
        found: list[Statement] = []
        for s in body:
            is_sum = isinstance(s, For) and s.role is Role.SEQUENTIAL and _additions(s) > 1
            found += self.own(s) if is_sum and isinstance(s, For) else [s]
        return found

    def own(self, loop: For) -> list[Statement]:
        """A loop that sums from zero, and then its sums added to what was there."""
        used = {n: t for n, t in _sums_of(loop).items() if n in self.sums}
        names = {n: fresh(n, self.taken) for n in used}
        return [
            *(Let(names[n], Literal(0, t)) for n, t in used.items()),
            *with_locals([loop], names),
            *(Accumulate(n, "add", Local(names[n], t)) for n, t in used.items()),
        ]

    def cut(self, loop: For, size: int) -> list[Statement]:
        """Whole blocks, then what is left as one."""
        count, rest = divmod(loop.var.extent, size)
        outer = Var(fresh(f"{loop.var.name}b", self.taken), count)
        block = self.own(self.part(loop, size, variable(outer) * size))
        blocks = For(outer, Role.SEQUENTIAL, tuple(block))
        if not rest:
            return [blocks]
        names = {n: fresh(n, self.taken) for n in sorted(names_in(loop.body))}
        (last,) = with_locals([self.part(loop, rest, Index((), count * size))], names)
        assert isinstance(last, For)
        return [blocks, *self.own(last)]

    def part(self, loop: For, size: int, start: Index) -> For:
        """Some of the loop's iterations, counted from where they start."""
        var = Var(fresh(f"{loop.var.name}r", self.taken), size)
        values = {loop.var: start + variable(var)}
        body = substituted(loop.body, values)
        return For(var, loop.role, body)


def _block(extent: int) -> int:
    """About as many iterations as blocks; without a rest where some such number divides."""
    root = math.isqrt(extent - 1) + 1
    divisor = best_divisor(extent, root)
    return divisor if root <= 2 * divisor and divisor <= 2 * root else root


def _additions(loop: For) -> int:
    """How many are made one after another; lanes come with one sum each time."""

    def of_loop(inner: For, count: int) -> int:
        return min(1, count) if inner.role is Role.VECTOR else inner.var.extent * count

    return tally([loop], lambda s: isinstance(s, Accumulate), of_loop)


def _sums_of(loop: For) -> Sums:
    """Floats of outside that a loop adds to and does not use in any other way."""
    added: Sums = {}
    other = names_in(loop.body)
    for s in walk(loop.body):
        if isinstance(s, Accumulate) and s.op == "add":
            added[s.local] = s.value.dtype
        elif isinstance(s, (Accumulate, Set)):
            other.add(s.local)
        other = other.union(*map(locals_in, values_of(s)))
    other = other.union(*map(data_locals, indices_of(loop.body)))
    return {n: t for n, t in added.items() if n not in other and t.is_float}
