"""The stage: a graph becomes a program. Importing this fills the tables of kernels."""

from __future__ import annotations

from treadle.ir.graph import Graph
from treadle.kernel.coverage import check_filled
from treadle.kernel.held import check_held
from treadle.kernel.program import Program, check_phases
from treadle.kernel.target import CPU as CPU
from treadle.kernel.target import GPU as GPU
from treadle.kernel.target import Target as Target
from treadle.schedule import attention as attention
from treadle.schedule import convolutions as convolutions
from treadle.schedule import cross_entropy_blocks as cross_entropy_blocks
from treadle.schedule import matmuls as matmuls
from treadle.schedule import roots as roots
from treadle.schedule import scans as scans
from treadle.schedule import sorting as sorting
from treadle.schedule import sums as sums
from treadle.schedule.batched import batch_matmuls
from treadle.schedule.epilogues import fuse_epilogues
from treadle.schedule.lower import lower
from treadle.schedule.mapping.program import map_to


def schedule(
    graph: Graph,
    fuse: bool = True,
    panel: int = CPU.panel,
    in_place: bool = False,
    target: Target = CPU,
) -> Program:
    """The program of a graph, its products in panels of that many columns of four bytes.

    `fuse=False` keeps every tensor in memory, for debugging; `in_place` writes updates over the
    leaves they replace.
    """
    return mapped(lower(graph, fuse, panel, in_place, target), fuse, target)


def mapped(program: Program, fuse: bool, target: Target, most: int | None = None) -> Program:
    """What was lowered, as its target runs it. Equal matmuls wait for each other within `most`."""
    if fuse and target.matmuls.busy_tiles:
        program = batch_matmuls(program, target.matmuls, most)
        program = fuse_epilogues(program, target.matmuls)
    program = check_held(check_phases(program))
    program.bindings.check(b.name for b in program.buffers)
    return check_filled(program if target.mapping is None else map_to(program, target))
