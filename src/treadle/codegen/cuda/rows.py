"""Rows by parts with sums of their columns: a block has a part, its warps share the rows.

A warp has a row at a time, and its own sums in registers; at the end they are added in order.
"""

from __future__ import annotations

from treadle.codegen.cuda.shape import WARP, Shape
from treadle.codegen.cuda.stages import Stages, lanes_of, stages_of
from treadle.kernel.access import accesses
from treadle.kernel.index import Var, variable
from treadle.kernel.nodes import Buffer, For, Kernel, Statement
from treadle.kernel.rowsums import RowSums, row_sums_of

WARPS = 6  # of a block: two blocks of them have the registers they need
MOST_TURNS = 4  # of a warp along a row


def rows_of(kernel: Kernel) -> tuple[RowSums, Shape, Stages] | None:
    """A kernel's parts, its shape, and what its warps keep of a row; None for any other."""
    rows = row_sums_of(kernel)
    sums = sums_of(kernel)
    if rows is None or len({b.size for b in sums}) != 1:
        return None
    width = sums[0].size
    inner = Shape((), (rows.part, rows.row), rows.body, WARP, WARP)
    names = {b.name for b in sums}
    around = (*rows.before, *rows.body, *rows.after)
    touching = [s for s in around if _touches(s, names)]
    walks = [s for s in touching if isinstance(s, For) and s.var.extent == width]
    if len(walks) != len(touching) or not all(_is_own(s, names) for s in walks):
        return None
    wanted = {lanes_of(kernel, s, WARP)[2] for s in walks if s in rows.body}
    if len(wanted) != 1:
        return None
    (lanes,) = wanted
    stages = stages_of(kernel, inner, True)
    if stages.every and (stages.lanes != lanes or not stages.in_registers):
        return None
    stages.turns, stages.lanes, stages.in_registers = -(-width // (WARP * lanes)), lanes, True
    if stages.turns > MOST_TURNS or lanes == 1:
        return None
    shape = Shape((), (rows.part,), rows.body, WARP, WARP * WARPS, 1, WARPS)
    return rows, shape, stages


def sums_of(kernel: Kernel) -> list[Buffer]:
    """The memory of a part that is a row of sums."""
    return [b for b in kernel.scratch if b.size > 1]


def _touches(statement: Statement, names: set[str]) -> bool:
    return any(a.buffer in names for a in accesses([statement]))


def _is_own(loop: For, names: set[str]) -> bool:
    """Whether every thread touches its own columns of the sums alone."""
    at = variable(Var(loop.var.name, loop.var.extent))
    return all(a.index == at for a in accesses([loop]) if a.buffer in names)
