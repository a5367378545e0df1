"""Sums of columns inside the kernel that computes the rows, which are then not read once more.

An iteration is a part of the rows, one after the other. The sums are in the iteration's own memory
until its end.
"""

from __future__ import annotations

import math
from dataclasses import replace

from treadle.base import dtypes
from treadle.kernel.access import accesses
from treadle.kernel.index import Index, Var, substitute, unflatten, variable
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
from treadle.kernel.rowsums import RowSums, row_sums_of
from treadle.kernel.target import Reductions
from treadle.kernel.traverse import loop_names, rewrite, substituted
from treadle.schedule.nests import Parts, flat_index, fresh, fused_kernel, with_own_names
from treadle.schedule.sum_fusion import Sum, renamed_sum, sum_of

F32 = dtypes.float32


def started(parts: int, rows: int, body: tuple[Statement, ...], var: Var) -> RowSums:
    """A kernel's rows as parts that nothing is summed of yet."""
    part, row = Var("part", parts), Var("row", rows)
    values = {var: variable(part) * rows + variable(row)}
    return RowSums(part, row, (), substituted(body, values), ())


def _parts(rows: RowSums, *kernels: Kernel) -> Parts:
    """The rows as parts of the buffers of some kernels."""
    sizes = {b.name: b.size for k in kernels for b in k.buffers}
    return Parts(rows.index, rows.part.extent * rows.row.extent, sizes)


def with_sum(rows: RowSums, first: Kernel, second: Kernel, sizes: Reductions) -> Kernel | None:
    """Both kernels as one, if the second sums columns of the same parts."""
    found = sum_of(second)
    if found is None or not _fits(found, rows, sizes):
        return None
    if not _is_a_warps(found.around[-1], rows, first, sizes.most_row_vectors):
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
    if len(sums) + _sum_count(first) > sizes.most_fused_sums:
        return None
    inner = tuple(
        Update(sums[s.local].name, variable(column), s.value) if isinstance(s, Accumulate) else s
        for s in substituted(found.inner, values)
    )
    parts = _parts(rows, first, second)
    least = parts.count * sizes.least_columns
    if not parts.separate(rows.body, inner) or not _shares(parts, rows.body, inner, least):
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
    rows: RowSums, first: Kernel, second: Kernel, body: tuple[Statement, ...], var: Var
) -> Kernel | None:
    """Both kernels as one, if the second, given as statements of one row, has the same rows."""
    every = (*rows.before, *rows.body, *rows.after)
    second, moved = with_own_names(second, body, first, every)
    moved = substituted(moved, {var: rows.index})
    if not _parts(rows, first, second).separate(rows.body, moved):
        return None
    whole = replace(rows, body=(*rows.body, *moved))
    return fused_kernel(first, second, whole.statements, second.scratch)


def _fits(found: Sum, rows: RowSums, sizes: Reductions) -> bool:
    """Whether sums are plain ones of a row's columns, by the same parts of the rows."""
    counts = math.prod(found.extents[0][:-1]), math.prod(found.extents[1])
    if counts != (rows.part.extent, rows.row.extent):
        return False
    column = found.around[-1]
    if not sizes.least_columns <= column.extent <= sizes.most_columns or column.extent % 8:
        return False
    starts = {s.local: s.value for s in found.before if isinstance(s, Let)}
    sums = [s for s in found.inner if isinstance(s, Accumulate)]
    if any(s.op != "add" or s.value.dtype is not F32 for s in sums):
        return False
    if starts.keys() != {s.local for s in sums} or len(sums) != len(starts):
        return False
    if any(not isinstance(v, Literal) or v.value != 0 for v in starts.values()):
        return False
    at = flat_index(found.around)
    return all(
        isinstance(s, Store) and s.index == at and isinstance(s.value, Local) for s in found.after
    )


def _is_a_warps(column: Var, rows: RowSums, kernel: Kernel, vectors: int) -> bool:
    """Whether a warp's registers have room for a row: 16 bytes of each thread, some times."""
    size = rows.part.extent * rows.row.extent * column.extent
    widths = [b.dtype.itemsize for b in kernel.buffers if b.size == size]
    return bool(widths) and column.extent <= vectors * 32 * 16 // min(widths)


def _indices(found: Sum, rows: RowSums, column: Var) -> dict[Var, Index]:
    """The sum's variables by the part, the row and the column."""
    *parts, last = found.around
    values: dict[Var, Index] = {last: variable(column)}
    for variables, var in ((parts, rows.part), (found.loops, rows.row)):
        indices = unflatten(variable(var), [v.extent for v in variables])
        values |= dict(zip(variables, indices, strict=True))
    return values


def _shares(
    parts: Parts, first: tuple[Statement, ...], second: tuple[Statement, ...], least: int
) -> bool:
    """Whether both touch the same row of something large."""
    own = [{a.buffer for a in accesses(s) if parts.has(a)} for s in (first, second)]
    return any(parts.sizes[b] >= least for b in own[0] & own[1])


def _sum_count(kernel: Kernel) -> int:
    return sum(b.size > 1 for b in kernel.scratch)


def with_own_numbers(kernel: Kernel, names: set[str]) -> Kernel:
    """The kernel with some outputs of one number a row, which no other touches, in its memory."""
    rows = row_sums_of(kernel)
    assert rows is not None
    count = rows.part.extent * rows.row.extent
    own = {b.name for b in kernel.outputs if b.name in names and b.size == count}
    own -= {a.buffer for a in accesses(kernel.body) if a.index - rows.index != Index()}
    moved = tuple(
        rewrite(s, lambda buffer, index: Index() if buffer in own else index) for s in kernel.body
    )
    scratch = tuple(Buffer(b.name, b.dtype, 1) for b in kernel.outputs if b.name in own)
    outputs = tuple(b for b in kernel.outputs if b.name not in own)
    return replace(kernel, body=moved, outputs=outputs, scratch=kernel.scratch + scratch)
