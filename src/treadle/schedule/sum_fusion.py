"""Sums fused with what makes their terms, or with other sums of the same terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.kernel.access import Access, accesses
from treadle.kernel.index import Atom, Index, Var, unflatten, variable
from treadle.kernel.nodes import Accumulate, For, Kernel, Let, Role, Statement, Store
from treadle.kernel.traverse import peel, substituted
from treadle.schedule.nests import flat_index, fused_kernel, nest, with_own_names


@dataclass(frozen=True, slots=True)
class Sum:
    """Parallel loops around everything, loops that sum, and what comes before and after those."""

    around: tuple[Var, ...]
    before: tuple[Statement, ...]
    loops: tuple[Var, ...]
    inner: tuple[Statement, ...]
    after: tuple[Statement, ...]

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(v.extent for v in vs) for vs in (self.around, self.loops))

    @property
    def statements(self) -> tuple[Statement, ...]:
        summed = nest(self.loops, Role.SEQUENTIAL, self.inner)
        return nest(self.around, Role.PARALLEL, (*self.before, *summed, *self.after))


def sum_of(kernel: Kernel, stores: bool = False) -> Sum | None:
    """A kernel as one sum; with `stores`, also one that stores its terms."""
    around, body = peel(kernel.body, Role.PARALLEL)
    loops = [i for i, s in enumerate(body) if isinstance(s, For)]
    if len(loops) != 1 or not around or kernel.scratch:
        return None
    (at,) = loops
    summing, inner = peel((body[at],), Role.SEQUENTIAL)
    kinds = (Let, Accumulate, Store) if stores else (Let, Accumulate)
    is_plain = all(isinstance(s, kinds) for s in inner)
    is_plain = is_plain and all(isinstance(s, (Let, Store)) for s in (*body[:at], *body[at + 1 :]))
    if not summing or not is_plain:
        return None
    outer, summed = (tuple(loop.var for loop in nest_) for nest_ in (around, summing))
    return Sum(outer, body[:at], summed, inner, body[at + 1 :])


def renamed_sum(kernel: Kernel, other: Kernel, others: tuple[Statement, ...]) -> tuple[Kernel, Sum]:
    """A kernel that is a sum, and the sum, with names that another kernel does not use."""
    kernel, body = with_own_names(kernel, kernel.body, other, others)
    kernel = replace(kernel, body=body)
    found = sum_of(kernel)
    assert found is not None
    return kernel, found


def with_producer(first: Kernel, second: Kernel, large: int) -> Kernel | None:
    """An elementwise kernel inside the sum of columns that reads each of its elements once."""
    variables = _elementwise(first)
    if variables is None or sum_of(second) is None:
        return None
    size, made = math.prod(v.extent for v in variables), {b.name for b in first.outputs}
    if size < large:
        return None
    second, sum_ = renamed_sum(second, first, first.body)
    touched = [a for a in accesses(second.body) if a.buffer in made]
    read = {a.index for a in touched}
    if len(read) != 1 or any(a.writes for a in touched):
        return None
    (at,) = read
    if at.factor_of(sum_.around[-1]) != 1:
        return None  # a sum along rows is a warp's: threads would have to wait for each other
    if not _counts(at, (*sum_.around, *sum_.loops), size):
        return None
    indices = unflatten(at, [v.extent for v in variables])
    if any(not isinstance(atom, Var) for i in indices for atom, _ in i.terms):
        return None
    _, body = peel(first.body, Role.PARALLEL)
    producer = substituted(body, dict(zip(variables, indices, strict=True)))
    whole = replace(sum_, inner=(*producer, *sum_.inner))
    return fused_kernel(first, second, whole.statements)


def _elementwise(kernel: Kernel) -> list[Var] | None:
    """The loops of a kernel that computes each element from others at its own index alone."""
    loops, body = peel(kernel.body, Role.PARALLEL)
    variables = [loop.var for loop in loops]
    is_map = all(isinstance(s, Let) or (isinstance(s, Store) and not s.guard) for s in body)
    if kernel.scratch or not variables or not is_map:
        return None
    stored = {s.buffer for s in body if isinstance(s, Store)}
    at = flat_index(variables)
    is_own = all(a.index == at for a in accesses(body) if a.buffer in stored)
    return variables if stored and is_own else None


def _counts(index: Index, variables: Sequence[Var], size: int) -> bool:
    """Whether an index takes each value below a size once: every factor is the reach below it."""
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


def fused_sums(first: Kernel, second: Kernel, large: int) -> Kernel | None:
    """Two sums over the same loops as one, if both read the same elements of something large.

    The second may read what the first writes, where each iteration reads what it wrote itself.
    """
    a, b = sum_of(first, stores=True), sum_of(second)
    if a is None or b is None or a.extents != b.extents:
        return None
    second, b = renamed_sum(second, first, first.body)
    pairs = zip((*b.around, *b.loops), (*a.around, *a.loops), strict=True)
    values: dict[Var, Index] = {old: variable(new) for old, new in pairs}
    before, inner, after = (substituted(part, values) for part in (b.before, b.inner, b.after))
    sizes = {x.name: x.size for x in first.buffers}
    ours = {_element(x) for x in accesses(a.inner) if sizes.get(x.buffer, 0) >= large}
    if not ours & set(map(_element, accesses(inner))):
        return None
    made = {x.name for x in first.outputs}
    stored = {_element(x) for x in accesses(a.inner) if x.writes}
    reads = {_element(x) for x in accesses(inner) if x.buffer in made}
    if not reads <= stored or any(x.buffer in made for x in accesses((*before, *after))):
        return None
    whole = Sum(a.around, (*a.before, *before), a.loops, (*a.inner, *inner), (*a.after, *after))
    return fused_kernel(first, second, whole.statements)


def _element(access: Access) -> tuple[str, frozenset[tuple[Atom, int]], int]:
    """What an access touches, whatever order the terms of its index are in."""
    return access.buffer, frozenset(access.index.terms), access.index.offset
