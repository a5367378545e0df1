"""Sums of columns inside the kernel that makes the rows: what it has at hand is not read again.

A turn is a part of the rows, one after the other; the sums are a turn's own memory until its end.
"""

from __future__ import annotations

import math
from dataclasses import replace

from treadle.base import dtypes
from treadle.kernel.access import accesses, is_local
from treadle.kernel.index import Index, Var, flatten, substitute, unflatten, variable
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
from treadle.schedule.nests import fresh, with_own_names
from treadle.schedule.twins import Sum, sum_of

F32 = dtypes.float32


def started(parts: int, rows: int, body: tuple[Statement, ...], turn: Var) -> RowSums:
    """A kernel's rows as parts that nothing is summed of yet."""
    part, row = Var("part", parts), Var("row", rows)
    values = {turn: variable(part) * rows + variable(row)}
    moved = substituted(body, values)
    return RowSums(part, row, (), moved, ())


def with_sum(rows: RowSums, first: Kernel, second: Kernel, sizes: Reductions) -> Kernel | None:
    """Both kernels as one, if the second sums columns of the same parts."""
    found = sum_of(second)
    if found is None or not _fits(found, rows, sizes):
        return None
    if not _is_a_warps(found.turns[-1], rows, first, sizes.most_row_vectors):
        return None
    every = (*rows.before, *rows.body, *rows.after)
    second, moved = with_own_names(second, second.body, first, every)
    found = sum_of(Kernel(second.name, second.inputs, second.outputs, moved))
    assert found is not None
    column = Var(fresh("column", loop_names(every)), found.turns[-1].extent)
    values = _places(found, rows, column)
    names = {b.name for b in first.scratch}
    sums: dict[str, Buffer] = {}
    for s in found.inner:
        if isinstance(s, Accumulate):
            sums[s.local] = Buffer(fresh("sum", names), F32, column.extent)
            names.add(sums[s.local].name)
    if len(sums) + _sum_count(first) > sizes.most_fused_sums:
        return None
    inner: list[Statement] = []
    for s in substituted(found.inner, values):
        if isinstance(s, Accumulate):
            s = Update(sums[s.local].name, variable(column), s.value)
        inner.append(s)
    counts = {b.name: b.size for b in (*first.buffers, *second.buffers)}
    least = rows.part.extent * rows.row.extent * sizes.least_columns
    if not _stays(rows, tuple(inner), counts) or not _shares(rows, tuple(inner), counts, least):
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
        (*rows.body, For(column, Role.PARALLEL, tuple(inner))),
        (*rows.after, For(column, Role.PARALLEL, tuple(last))),
    )
    return _kernel(new, first, second, tuple(sums.values()))


def with_rows(
    rows: RowSums, first: Kernel, second: Kernel, body: tuple[Statement, ...], turn: Var
) -> Kernel | None:
    """Both kernels as one, if the second walks the same rows, given as its statements of a turn."""
    every = (*rows.before, *rows.body, *rows.after)
    second, moved = with_own_names(second, body, first, every)
    values = {turn: rows.index}
    moved = substituted(moved, values)
    sizes = {b.name: b.size for b in (*first.buffers, *second.buffers)}
    if not _stays(rows, moved, sizes):
        return None
    return _kernel(replace(rows, body=(*rows.body, *moved)), first, second, second.scratch)


def _kernel(rows: RowSums, first: Kernel, second: Kernel, scratch: tuple[Buffer, ...]) -> Kernel:
    outputs = {b.name: b for b in (*first.outputs, *second.outputs)}
    inputs = {b.name: b for b in (*first.inputs, *second.inputs) if b.name not in outputs}
    origins = tuple(dict.fromkeys((*first.origins, *second.origins)))
    return Kernel(
        first.name,
        tuple(inputs.values()),
        tuple(outputs.values()),
        rows.statements,
        origins,
        first.scratch + scratch,
    )


def _fits(found: Sum, rows: RowSums, sizes: Reductions) -> bool:
    """Whether sums are plain ones of a row's columns, by the same parts of the rows."""
    parts, inner = found.turns[:-1], found.loops
    counts = math.prod(v.extent for v in parts), math.prod(v.extent for v in inner)
    if counts != (rows.part.extent, rows.row.extent):
        return False
    column = found.turns[-1]
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
    place = flatten([variable(v) for v in found.turns], [v.extent for v in found.turns])
    return all(
        isinstance(s, Store) and s.index == place and isinstance(s.value, Local)
        for s in found.after
    )


def _is_a_warps(column: Var, rows: RowSums, kernel: Kernel, vectors: int) -> bool:
    """Whether a warp's registers have room for a row: 16 bytes of each thread, some times."""
    size = rows.part.extent * rows.row.extent * column.extent
    widths = [b.dtype.itemsize for b in kernel.buffers if b.size == size]
    return bool(widths) and column.extent <= vectors * 32 * 16 // min(widths)


def _places(found: Sum, rows: RowSums, column: Var) -> dict[Var, Index]:
    parts, inner = found.turns[:-1], found.loops
    values: dict[Var, Index] = {found.turns[-1]: variable(column)}
    for variables, whole in ((parts, rows.part), (inner, rows.row)):
        places = unflatten(variable(whole), [v.extent for v in variables])
        values |= dict(zip(variables, places, strict=True))
    return values


def _stays(rows: RowSums, body: tuple[Statement, ...], sizes: dict[str, int]) -> bool:
    """Whether what one writes and the other touches belongs to the row."""
    count = rows.part.extent * rows.row.extent
    sides = list(accesses(rows.body)), list(accesses(body))
    written = [{a.buffer for a in side if a.writes} for side in sides]
    touched = [{a.buffer for a in side} for side in sides]
    shared = (written[0] & touched[1]) | (written[1] & touched[0])
    return all(
        is_local(a, rows.index, sizes[a.buffer], count)
        for side in sides
        for a in side
        if a.buffer in shared and a.buffer in sizes
    )


def _shares(rows: RowSums, body: tuple[Statement, ...], sizes: dict[str, int], least: int) -> bool:
    """Whether both touch the same row of something large."""
    count = rows.part.extent * rows.row.extent
    near = [
        {a.buffer for a in accesses(s) if is_local(a, rows.index, sizes.get(a.buffer, 1), count)}
        for s in (rows.body, body)
    ]
    return any(sizes[b] >= least for b in near[0] & near[1])


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
