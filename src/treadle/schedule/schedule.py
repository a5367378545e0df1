"""The stage: a graph becomes a program. Importing this fills the tables of kernels."""

from __future__ import annotations

from treadle.ir.graph import Graph
from treadle.kernel.phases import check_phases
from treadle.kernel.program import Program
from treadle.kernel.target import CPU as CPU
from treadle.kernel.target import GPU as GPU
from treadle.kernel.target import Target as Target
from treadle.schedule import attention as attention
from treadle.schedule import convolutions as convolutions
from treadle.schedule import products as products
from treadle.schedule import roots as roots
from treadle.schedule import streams as streams
from treadle.schedule import sums as sums
from treadle.schedule.lower import PANEL, lower
from treadle.schedule.mapping.program import map_to
from treadle.schedule.together import put_together


def schedule(
    graph: Graph,
    fuse: bool = True,
    panel: int = PANEL,
    in_place: bool = False,
    target: Target = CPU,
) -> Program:
    """The program of a graph, its products in panels of that many columns of four bytes.

    `fuse=False` keeps every tensor in memory, for debugging; `in_place` writes updates over the
    leaves they replace.
    """
    program = lower(graph, fuse, panel, in_place, target)
    if fuse and target.fills:
        program = put_together(program, target)
    program = check_phases(program)
    return program if target.mapping is None else map_to(program, target)
