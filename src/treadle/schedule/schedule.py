"""The stage: a graph becomes a program. Importing this fills the tables of kernels."""

from __future__ import annotations

from treadle.ir.graph import Graph
from treadle.kernel.program import Program
from treadle.schedule import products as products
from treadle.schedule import roots as roots
from treadle.schedule.lower import lower


def schedule(graph: Graph, fuse: bool = True) -> Program:
    """The program of a graph. `fuse=False` keeps every tensor in memory, for debugging."""
    return lower(graph, fuse)
