"""Two sums over the same loops become one: what both read is read once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.kernel.access import Access, accesses
from treadle.kernel.index import Atom, Index, Var, flatten, unflatten, variable
from treadle.kernel.nodes import Accumulate, For, Kernel, Let, Role, Statement, Store
from treadle.kernel.traverse import peel, substituted
from treadle.schedule.nests import with_own_names


@dataclass(frozen=True, slots=True)
class Sum:
    """Parallel loops around everything, loops that sum, and what comes before and after those."""

    turns: tuple[Var, ...]
    before: tuple[Statement, ...]
    loops: tuple[Var, ...]
    inner: tuple[Statement, ...]
    after: tuple[Statement, ...]


def sum_of(kernel: Kernel, stores: bool = False) -> Sum | None:
    """A kernel as one sum; with `stores`, also one that keeps what it adds up."""
    around, body = peel(kernel.body, Role.PARALLEL)
    places = [i for i, s in enumerate(body) if isinstance(s, For)]
    if len(places) != 1 or not around or kernel.scratch:
        return None
    at = places[0]
    summing, inner = peel((body[at],), Role.SEQUENTIAL)
    kinds = (Let, Accumulate, Store) if stores else (Let, Accumulate)
    is_plain = all(isinstance(s, kinds) for s in inner)
    is_plain = is_plain and all(isinstance(s, (Let, Store)) for s in (*body[:at], *body[at + 1 :]))
    if not summing or not is_plain:
        return None
    turns, loops = (tuple(loop.var for loop in nest) for nest in (around, summing))
    return Sum(turns, body[:at], loops, inner, body[at + 1 :])


def fed(first: Kernel, second: Kernel, large: int) -> Kernel | None:
    """An elementwise kernel inside the sum of columns that reads each of its elements once."""
    sum_ = sum_of(second)
    around, body = peel(first.body, Role.PARALLEL)
    variables = [loop.var for loop in around]
    stores = [s for s in body if isinstance(s, Store)]
    is_map = all(isinstance(s, Let) or (isinstance(s, Store) and not s.guard) for s in body)
    if sum_ is None or first.scratch or not variables or not stores or not is_map:
        return None
    shape = [v.extent for v in variables]
    place = flatten([variable(v) for v in variables], shape)
    size = math.prod(shape)
    if size < large or any(s.index != place for s in stores):
        return None
    made = {b.name for b in first.outputs}
    if any(a.index != place for a in accesses(body) if a.buffer in made):
        return None
    second, moved = with_own_names(second, second.body, first, first.body)
    sum_ = sum_of(Kernel(second.name, second.inputs, second.outputs, moved))
    assert sum_ is not None
    read = {a.index for a in accesses(moved) if a.buffer in made}
    if len(read) != 1 or any(a.writes and a.buffer in made for a in accesses(moved)):
        return None
    (at,) = read
    if at.factor_of(sum_.turns[-1]) != 1:
        return None  # a sum along rows is a team's: threads would have to wait for each other
    if not _is_walk(at, (*sum_.turns, *sum_.loops), size):
        return None
    places = unflatten(at, shape)
    if any(not isinstance(atom, Var) for p in places for atom, _ in p.terms):
        return None
    values = dict(zip(variables, places, strict=True))
    inner = (*substituted(body, values), *sum_.inner)
    loops: tuple[Statement, ...] = inner
    for var in reversed(sum_.loops):
        loops = (For(var, Role.SEQUENTIAL, loops),)
    whole: tuple[Statement, ...] = (*sum_.before, *loops, *sum_.after)
    for var in reversed(sum_.turns):
        whole = (For(var, Role.PARALLEL, whole),)
    outputs = (*first.outputs, *second.outputs)
    inputs = {b.name: b for b in (*first.inputs, *second.inputs) if b.name not in made}
    origins = tuple(dict.fromkeys((*first.origins, *second.origins)))
    return Kernel(first.name, tuple(inputs.values()), outputs, whole, origins)


def _is_walk(index: Index, variables: Sequence[Var], size: int) -> bool:
    """Whether variables count all places of a size, each once: every factor is the reach below."""
    factors = {a: f for a, f in index.terms if isinstance(a, Var)}
    wanted = [v for v in variables if v.extent > 1]
    if len(factors) != len(index.terms) or set(factors) != set(wanted) or index.offset:
        return False
    reach = 1
    for var in sorted(wanted, key=lambda v: factors[v]):
        if factors[var] != reach:
            return False
        reach *= var.extent
    return reach == size


def twins(first: Kernel, second: Kernel, large: int) -> Kernel | None:
    """Both sums in one kernel, if they walk the same loops and read something large alike.

    The second may read what the first writes, where each turn reads what it wrote itself.
    """
    a, b = sum_of(first, stores=True), sum_of(second)
    if a is None or b is None:
        return None
    extents = [tuple(v.extent for v in (*s.turns, *s.loops)) for s in (a, b)]
    if extents[0] != extents[1] or len(a.turns) != len(b.turns):
        return None
    second, moved = with_own_names(second, second.body, first, first.body)
    b = sum_of(Kernel(second.name, second.inputs, second.outputs, moved))
    assert b is not None
    pairs = zip((*b.turns, *b.loops), (*a.turns, *a.loops), strict=True)
    values: dict[Var, Index] = {old: variable(new) for old, new in pairs}

    inner = substituted(b.inner, values)
    sizes = {x.name: x.size for x in first.buffers}
    ours = {_spot(x) for x in accesses(a.inner) if sizes.get(x.buffer, 0) >= large}
    if not ours & set(map(_spot, accesses(inner))):
        return None
    made = {x.name for x in first.outputs}
    stored = {_spot(x) for x in accesses(a.inner) if x.writes}
    reads = {_spot(x) for x in accesses(inner) if x.buffer in made}
    rest = accesses((*b.before, *b.after))
    if not reads <= stored or any(x.buffer in made for x in rest):
        return None
    body: tuple[Statement, ...] = (*a.inner, *inner)
    for var in reversed(a.loops):
        body = (For(var, Role.SEQUENTIAL, body),)
    body = (
        *a.before,
        *substituted(b.before, values),
        *body,
        *a.after,
        *substituted(b.after, values),
    )
    for var in reversed(a.turns):
        body = (For(var, Role.PARALLEL, body),)
    inputs = {x.name: x for x in (*first.inputs, *second.inputs) if x.name not in made}
    origins = tuple(dict.fromkeys((*first.origins, *second.origins)))
    outputs = (*first.outputs, *second.outputs)
    return Kernel(first.name, tuple(inputs.values()), outputs, body, origins)


def _spot(access: Access) -> tuple[str, frozenset[tuple[Atom, int]], int]:
    """A place, whatever order its terms are in."""
    return access.buffer, frozenset(access.index.terms), access.index.offset
