"""Sums fused with what makes their terms, with other sums of the same terms, or with rows.

Sums of columns are fused into the kernel that computes the rows, which are then not read once more.
An iteration is a part of the rows, one after the other; the sums are in its own memory until its
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.kernel.access import Access, accesses
from treadle.kernel.contraction import size
from treadle.kernel.index import Atom, Index, Var, substitute, unflatten, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Statement,
    Store,
    Update,
)
from treadle.kernel.rowsums import RowSums
from treadle.kernel.target import Reductions
from treadle.kernel.traverse import loop_names, peel, substituted
from treadle.schedule.nests import (
    Body,
    Parts,
    flat_index,
    fresh,
    fused_kernel,
    in_order,
    is_cleared,
    parallel,
    with_own_names,
)


@dataclass(frozen=True, slots=True)
class Sum:
    """Parallel loops around everything, loops that sum, and what comes before and after those."""

    around: tuple[Var, ...]
    before: Body
    loops: tuple[Var, ...]
    inner: Body
    after: Body

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(v.extent for v in vs) for vs in (self.around, self.loops))

    @property
    def statements(self) -> Body:
        summed = in_order(self.loops, self.inner)
        return parallel(self.around, (*self.before, *summed, *self.after))


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


def renamed_sum(kernel: Kernel, other: Kernel, others: Body) -> tuple[Kernel, Sum]:
    """A kernel that is a sum, and the sum, with names that another kernel does not use."""
    kernel, body = with_own_names(kernel, kernel.body, other, others)
    kernel = replace(kernel, body=body)
    found = sum_of(kernel)
    assert found is not None
    return kernel, found


def with_terms(first: Kernel, second: Kernel, large: int) -> Kernel | None:
    """An elementwise kernel inside the sum of columns that reads each of its elements once."""
    variables = _elementwise(first)
    if variables is None or sum_of(second) is None:
        return None
    if size(variables) < large:
        return None
    made = {b.name for b in first.outputs}
    second, sum_ = renamed_sum(second, first, first.body)
    touched = list(accesses(second.body, made))
    read = {a.index for a in touched}
    if len(read) != 1 or any(a.writes for a in touched):
        return None
    (at,) = read
    if at.factor_of(sum_.around[-1]) != 1:
        return None  # a sum along rows is a warp's: threads would have to wait for each other
    if not _counts(at, (*sum_.around, *sum_.loops), size(variables)):
        return None
    indices = unflatten(at, [v.extent for v in variables])
    if any(not isinstance(atom, Var) for atom, _ in indices[-1].terms):
        return None  # neighbours would divide their indices
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
    here = frozenset(at.terms), at.offset  # fused kernels have the terms in another order
    own = ((frozenset(a.index.terms), a.index.offset) for a in accesses(body) if a.buffer in stored)
    is_own = all(index == here for index in own)
    return variables if stored and is_own else None


def _counts(index: Index, variables: Sequence[Var], most: int) -> bool:
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
    return reach == most


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


F32 = dtypes.float32


def started(parts: int, rows: int, body: Body) -> RowSums:
    """A kernel's rows as parts that nothing is summed of yet."""
    found = RowSums(Var("part", parts), Var("row", rows), (), (), ())
    return replace(found, body=substituted(body, {Var("row", parts * rows): found.index}))


def _parts(rows: RowSums, *kernels: Kernel) -> Parts:
    """The rows as parts of the buffers of some kernels."""
    sizes = {b.name: b.size for k in kernels for b in k.buffers}
    return Parts(rows.index, rows.part.extent * rows.row.extent, sizes)


def with_sum(rows: RowSums, first: Kernel, second: Kernel, sizes: Reductions) -> Kernel | None:
    """Both kernels as one, if the second sums columns of the same parts."""
    found = sum_of(second)
    if found is None or not _fits(found, rows, sizes):
        return None
    every = (*rows.before, *rows.body, *rows.after)
    second, found = renamed_sum(second, first, every)
    column = Var(fresh("column", loop_names(every)), found.around[-1].extent)
    values = _indices(found, rows, column)
    names = {b.name for b in first.scratch}
    sums: dict[str, Buffer] = {}
    for s in found.inner:
        if isinstance(s, Accumulate):
            sums[s.local] = Buffer(fresh("sum", names), F32, column.extent)
            names.add(sums[s.local].name)
    if len(sums) + sum(b.size > 1 for b in first.scratch) > sizes.most_fused_sums:
        return None
    inner = tuple(
        Update(sums[s.local].name, variable(column), s.value) if isinstance(s, Accumulate) else s
        for s in substituted(found.inner, values)
    )
    parts = _parts(rows, first, second)
    least = parts.count * sizes.least_columns
    if not parts.separate(rows.body, inner) or not _shares(parts, rows.body, inner, least):
        return None
    if not _writes_own_rows(parts, rows.body):
        return None
    summing = (*_summing(rows.body, first), *inner)
    if column.extent > sizes.most_row_vectors * _lanes(parts, column, summing, first, second):
        return None
    zeros = tuple(Store(b.name, variable(column), Literal(0, F32)) for b in sums.values())
    last: list[Statement] = []
    for s in found.after:
        assert isinstance(s, Store)
        assert isinstance(s.value, Local)
        at = substitute(s.index, values)
        last.append(Store(s.buffer, at, Load(sums[s.value.name].name, variable(column), F32)))
    new = RowSums(
        rows.part,
        rows.row,
        (*rows.before, For(column, Role.PARALLEL, zeros)),
        (*rows.body, For(column, Role.PARALLEL, inner)),
        (*rows.after, For(column, Role.PARALLEL, tuple(last))),
    )
    return fused_kernel(first, second, new.statements, tuple(sums.values()))


def with_rows(
    rows: RowSums, first: Kernel, second: Kernel, body: Body, is_needed: bool
) -> Kernel | None:
    """Both kernels as one, if the second, given as statements of one row, has the same rows.

    One that does not need the first must read what it reads.
    """
    every = (*rows.before, *rows.body, *rows.after)
    second, moved = with_own_names(second, body, first, every)
    parts = _parts(rows, first, second)
    moved = substituted(moved, {Var("row", parts.count): rows.index})
    if not parts.separate(rows.body, moved) or not _writes_own_rows(parts, moved):
        return None
    if not is_needed and not parts.shared(rows.body, moved):
        return None
    whole = replace(rows, body=(*rows.body, *moved))
    return fused_kernel(first, second, whole.statements, second.scratch)


def _fits(found: Sum, rows: RowSums, sizes: Reductions) -> bool:
    """Whether sums are plain ones of a row's columns, by the same parts of the rows."""
    if (size(found.around[:-1]), size(found.loops)) != (rows.part.extent, rows.row.extent):
        return False
    column = found.around[-1]
    if not sizes.least_columns <= column.extent <= sizes.most_columns or column.extent % 8:
        return False
    starts = {s.local for s in found.before if isinstance(s, Let)}
    sums = [s for s in found.inner if isinstance(s, Accumulate)]
    if any(s.op != "add" or s.value.dtype is not F32 for s in sums):
        return False
    if starts != {s.local for s in sums} or len(sums) != len(starts):
        return False
    if not all(is_cleared(found.before, s) for s in sums):
        return False
    at = flat_index(found.around)
    return all(
        isinstance(s, Store) and s.index == at and isinstance(s.value, Local) for s in found.after
    )


def _summing(body: Body, kernel: Kernel) -> Body:
    """Loops of a row that add to sums which the kernel has already."""
    own = {b.name for b in kernel.scratch if b.size > 1}
    return tuple(s for s in body if any(a.buffer in own and a.writes for a in accesses([s])))


def _lanes(parts: Parts, column: Var, summing: Body, *kernels: Kernel) -> int:
    """Columns of a vector of 16 bytes from each thread of a warp: of what is widest in the sums."""
    widths = {b.name: b.dtype.itemsize for k in kernels for b in k.buffers}
    elements = parts.count * column.extent
    read = {a.buffer for a in accesses(summing) if parts.sizes.get(a.buffer) == elements}
    return 32 * 16 // max((widths[name] for name in read), default=16)


def _indices(found: Sum, rows: RowSums, column: Var) -> dict[Var, Index]:
    """The sum's variables by the part, the row and the column."""
    *parts, last = found.around
    values: dict[Var, Index] = {last: variable(column)}
    for variables, var in ((parts, rows.part), (found.loops, rows.row)):
        indices = unflatten(variable(var), [v.extent for v in variables])
        values |= dict(zip(variables, indices, strict=True))
    return values


def _writes_own_rows(parts: Parts, body: Body) -> bool:
    """Whether a row is written where it is counted: rows in another order meet other parts'."""
    return all(parts.has(a) for a in accesses(body) if a.writes and a.buffer in parts.sizes)


def _shares(parts: Parts, first: Body, second: Body, least: int) -> bool:
    """Whether both touch the same row of something large."""
    own = [{a.buffer for a in accesses(s) if parts.has(a)} for s in (first, second)]
    return any(parts.sizes[b] >= least for b in own[0] & own[1])
