"""Rows by parts with sums of their columns: a block has a part, its warps share the rows.

A warp has a row at a time, and its own sums in registers; at the end they are added in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.access import accesses
from treadle.kernel.geometry import Geometry
from treadle.kernel.index import Var, substitute, variable
from treadle.kernel.nodes import (
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Space,
    Statement,
    Store,
)
from treadle.kernel.rowsums import RowSums, row_sums_of
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import walk
from treadle.schedule.mapping.groups import Group, nest
from treadle.schedule.mapping.staging import (
    COMMON,
    Stage,
    lanes_of,
    stages_of,
    with_locals,
    with_stages,
)


def map_row_sums(kernel: Kernel, mapping: Mapping) -> Kernel | None:
    """A kernel of rows by parts as blocks whose warps share the rows; None for any other."""
    rows = row_sums_of(kernel)
    sums = [b for b in kernel.scratch if b.size > 1]
    if rows is None or len({b.size for b in sums}) != 1:
        return None
    if not all(_is_zero(s) for s in walk(rows.before) if not isinstance(s, For)):
        return None  # every warp starts from it
    lanes = _lanes(kernel, rows, {b.name for b in sums}, sums[0].size, mapping)
    if lanes is None or -(-sums[0].size // (mapping.warp * lanes)) > mapping.unrolled:
        return None
    body, own = with_locals(rows.body, kernel.scratch)
    stages = stages_of(kernel, body, mapping.warp, mapping)
    if any(s.memory.pack != lanes or s.memory.space is not Space.PRIVATE for s in stages):
        return None
    memory = tuple(replace(b, space=Space.PRIVATE, pack=lanes) for b in sums)
    held = dict.fromkeys((b.name for b in sums), lanes)
    group = Group(kernel, mapping, mapping.warp, True, ignored=frozenset(own), held=held)
    first = group.statements(rows.before)
    ahead = [s for s in stages if any(b.name == s.key[0] for b in kernel.inputs)]
    row = [*_copies(ahead), *group.statements(body, with_stages(body, stages, ahead))]
    row += group.barrier()
    inside = (*first, For(rows.row, Role.GROUP, tuple(row)), *group.statements(rows.after))
    threads = mapping.warp * mapping.part_warps
    return replace(
        kernel,
        body=(For(rows.part, Role.GRID, inside),),
        scratch=(*memory, *(s.memory for s in stages)),
        geometry=Geometry(threads, threads, mapping.warp, room=2),
    )


def _is_zero(statement: Statement) -> bool:
    """Whether a statement names or stores 0, or stores what was named so."""
    if isinstance(statement, Store) and isinstance(statement.value, Local):
        return True
    value = statement.value if isinstance(statement, (Let, Store)) else None
    return isinstance(value, Literal) and value.value == 0


def _lanes(
    kernel: Kernel, rows: RowSums, names: set[str], width: int, mapping: Mapping
) -> int | None:
    """The lanes of all loops that touch the sums, each its own columns; None if they differ."""
    around = (*rows.before, *rows.body, *rows.after)
    touching = [s for s in around if any(a.buffer in names for a in accesses([s]))]
    walks = [s for s in touching if isinstance(s, For) and s.var.extent == width]
    if len(walks) != len(touching) or not all(_is_own(s, names) for s in walks):
        return None
    wanted = {lanes_of(kernel, s, mapping.warp, mapping)[2] for s in walks if s in rows.body}
    return wanted.pop() if len(wanted) == 1 and wanted != {1} else None


def _is_own(loop: For, names: set[str]) -> bool:
    """Whether every thread touches its own columns of the sums alone."""
    at = variable(Var(loop.var.name, loop.var.extent))
    return all(a.index == at for a in accesses([loop]) if a.buffer in names)


def _copies(stages: Sequence[Stage]) -> list[Statement]:
    """All of a row that is staged, before anything waits for it."""
    found: list[Statement] = []
    for i, stage in enumerate(stages):
        (buffer, index), memory = stage.key, stage.memory
        var = Var(f"ahead{i}", memory.size)
        at = variable(var)
        there = substitute(index, {Var(COMMON, memory.size): at})
        copy = Store(memory.name, at, Load(buffer, there, memory.dtype))
        found += nest([var], Role.SUBGROUP, [copy], memory.pack)
    return found
