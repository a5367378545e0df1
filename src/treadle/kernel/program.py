"""A program: kernels in order over named buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.ir.graph import Output
from treadle.ir.types import TensorType
from treadle.kernel.nodes import Buffer, Kernel


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel on buffers: its own names to the program's."""

    kernel: Kernel
    arguments: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Leaves and constants in, outputs out; everything between is temporary."""

    leaves: tuple[tuple[str, TensorType], ...]  # by the name of the graph's leaf, also the buffer's
    constants: tuple[tuple[str, np.ndarray], ...]
    buffers: tuple[Buffer, ...]
    calls: tuple[Call, ...]
    outputs: tuple[tuple[Output, str, TensorType], ...]  # what leaves, and the buffer it is in
