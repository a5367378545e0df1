"""What a kernel that is mapped to a GPU says of itself: its grid, its groups, their memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.base.dtypes import DType
from treadle.kernel.access import accesses, loads_of, names_in
from treadle.kernel.cost import padded
from treadle.kernel.geometry import Combine, Geometry, Scattered, Tiled, Warpgroups
from treadle.kernel.index import Var
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Kernel,
    Let,
    Matmul,
    Role,
    Space,
    Statement,
)
from treadle.kernel.packs import copy_of
from treadle.kernel.scatter import scatter_bytes
from treadle.kernel.traverse import peel, walk

PACK = 16  # bytes: what the widest access must be aligned to
SHARED_OUT = (Role.GROUP, Role.SUBGROUP)


@dataclass(frozen=True, slots=True)
class Nest:
    """Loops that count as one: values named before them, and what they contain."""

    loops: tuple[For, ...]
    body: tuple[Statement, ...]
    lets: tuple[Statement, ...] = ()

    @property
    def variables(self) -> tuple[Var, ...]:
        return tuple(loop.var for loop in self.loops)

    @property
    def count(self) -> int:
        return math.prod(loop.var.extent for loop in self.loops)

    @property
    def lanes(self) -> int:
        """Iterations that a thread takes at once, along the last variable."""
        return self.loops[-1].lanes if self.loops else 1


def grid_of(kernel: Kernel) -> Nest:
    """The grid of a mapped kernel, and what a group does; one iteration where it has no loops."""
    at = next((i for i, s in enumerate(kernel.body) if not isinstance(s, Let)), len(kernel.body))
    loops, body = peel(kernel.body[at:], Role.GRID)
    return Nest(tuple(loops), body, kernel.body[:at]) if loops else Nest((), kernel.body)


def nest_of(loop: For) -> Nest:
    """Loops that are shared out as one."""
    loops, body = peel((loop,), loop.role)
    return Nest(tuple(loops), body)


def geometry_of(kernel: Kernel) -> Geometry:
    assert kernel.geometry is not None, f"{kernel.name} is not mapped to a GPU"
    return kernel.geometry


def blocks_of(kernel: Kernel) -> int:
    """Blocks of a launch of a kernel."""
    geometry = geometry_of(kernel)
    if geometry.template is not None:
        return geometry.template.blocks
    grid = grid_of(kernel)
    return -(-(grid.count // grid.lanes) // geometry.groups)


def shared_of(kernel: Kernel) -> list[tuple[Buffer, int]]:
    """Buffers in shared memory, and where each starts in its group's."""
    found, at = list[tuple[Buffer, int]](), 0
    for buffer in (b for b in kernel.scratch if b.space is Space.SHARED):
        found.append((buffer, at))
        at += _room(buffer)
    return found


def group_bytes(kernel: Kernel) -> int:
    """Shared memory of the threads that share an iteration of the grid."""
    return sum(_room(b) for b, _ in shared_of(kernel))


def _room(buffer: Buffer) -> int:
    return buffer.nbytes + -buffer.nbytes % PACK if buffer.pack > 1 else padded(buffer.nbytes)


def shared_bytes(kernel: Kernel) -> int:
    """Dynamic shared memory of a block."""
    geometry = geometry_of(kernel)
    match geometry.template:
        case Tiled() as tiled:
            if tiled.matrices:  # panels of float16, and what each warp stages in float32
                warps = geometry.threads // geometry.warp
                return 2 * tiled.elements + 4 * warps * tiled.stage_step * tiled.matrices
            return tiled.elements * tiled_dtype(kernel).itemsize
        case Scattered() as scattered:
            return scatter_bytes(kernel, scattered, geometry.threads // geometry.warp)
        case Warpgroups() as warpgroups:
            return warpgroups.shared
        case _:
            return geometry.groups * group_bytes(kernel)


def column_bytes(kernel: Kernel) -> int:
    """Memory that a block's function has for sums of columns: a part of each for every thread."""
    geometry = geometry_of(kernel)
    if geometry.combine is Combine.EXCHANGE:
        return 0
    sums = [s.value.dtype.itemsize for s in walk(kernel.body) if isinstance(s, Accumulate)]
    return geometry.threads * grid_of(kernel).lanes * sum(max(4, size) for size in sums)


def group_rows(kernel: Kernel) -> frozenset[str]:
    """Private rows whose elements are spread over the threads of a group."""
    rows = (b for b in kernel.scratch if b.space is Space.PRIVATE and b.pack > 1)
    return frozenset(b.name for b in rows)


def matrix_sums(kernel: Kernel) -> frozenset[str]:
    """Scratch to which products are added: its matrices are held by warps, and take no memory."""
    own = {b.name for b in kernel.scratch}
    added = {s.target.buffer for s in walk(kernel.body) if isinstance(s, Matmul) and s.adds}
    return frozenset(own & added)


def held_matrices(kernel: Kernel) -> frozenset[str]:
    """Scratch that warps hold as matrices: sums, and what is only multiplied, from the left.

    The latter is copied from other scratch.
    """
    own = {b.name for b in kernel.scratch}
    lefts, read, copied = set[str](), set[str](), set[str]()
    for s in walk(kernel.body):
        read |= {load.buffer for load in loads_of(s)}
        copy = copy_of(s.body) if isinstance(s, For) else None
        if copy is not None and copy[1].buffer in own:
            copied.add(copy[0].buffer)
        if isinstance(s, Matmul):
            lefts.add(s.left.buffer)
            read |= {s.target.buffer, s.right.buffer}
    return matrix_sums(kernel) | frozenset(own & lefts & copied - read)


def tiled_dtype(kernel: Kernel) -> DType:
    """What a contraction is summed in."""
    return next(s.value.dtype for s in walk(kernel.body) if isinstance(s, Accumulate))


def width_of(role: Role, geometry: Geometry) -> int:
    """Threads that share the iterations of a loop."""
    return min(geometry.warp, geometry.share) if role is Role.SUBGROUP else geometry.share


def sums_of(loop: For) -> dict[str, Accumulate]:
    """Accumulations of a loop into locals of outside: the group's sums."""
    own = names_in(loop.body)
    every = (s for s in walk(loop.body) if isinstance(s, Accumulate))
    return {s.local: s for s in every if s.local not in own}


def is_of_warps(loop: For) -> bool:
    """Whether each iteration of a loop is a warp's."""
    inner = (s for s in walk(loop.body) if isinstance(s, For))
    return loop.role is Role.GROUP and any(s.role is Role.SUBGROUP for s in inner)


def row_loops(body: Sequence[Statement], buffer: str) -> Iterator[For]:
    """The shared-out loops, none inside another of its kind, that touch a buffer."""

    def is_row(loop: For) -> bool:
        return loop.role in SHARED_OUT and not is_of_warps(loop)

    for s in walk(body, lambda loop: not is_row(loop)):
        if isinstance(s, For) and is_row(s) and any(a.buffer == buffer for a in accesses(s.body)):
            yield s
