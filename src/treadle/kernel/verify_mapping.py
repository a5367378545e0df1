"""Checks that a GPU can run a kernel as it is mapped: roles, barriers, memory, sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.base.errors import GraphError
from treadle.kernel.access import accesses
from treadle.kernel.geometry import Combine, Geometry, Tiled, Warpgroups
from treadle.kernel.index import variable
from treadle.kernel.mapped import (
    SHARED_OUT,
    grid_of,
    group_rows,
    held_matrices,
    is_of_warps,
    row_loops,
    shared_bytes,
    sums_of,
)
from treadle.kernel.nodes import (
    Barrier,
    For,
    Kernel,
    Matmul,
    Role,
    Space,
    Statement,
    Store,
    library_call_of,
)
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import nested, walk

UNMAPPED = (Role.PARALLEL, Role.VECTOR)


def verify_mapping(kernel: Kernel, mapping: Mapping | None = None) -> None:
    """A GraphError where a mapped kernel, or one that is not, says what it cannot."""
    if library_call_of(kernel) is not None:
        return
    if kernel.geometry is None:
        _refuse_mapped(kernel)
        return
    _Mapped(kernel, kernel.geometry).check(mapping)


def _wrong(kernel: Kernel, cause: str) -> GraphError:
    return GraphError("verify", f"kernel {kernel.name}: {cause}")


def _refuse_mapped(kernel: Kernel) -> None:
    """Roles of a GPU need the geometry of a launch."""
    for s in walk(kernel.body):
        is_mapped = isinstance(s, For) and (s.role is Role.GRID or s.role in SHARED_OUT)
        if is_mapped or isinstance(s, Barrier):
            raise _wrong(kernel, "threads share loops, and there is no geometry")
    for buffer in (*kernel.buffers, *kernel.scratch):
        if buffer.space is not Space.GLOBAL:
            raise _wrong(kernel, f"{buffer.name} is {buffer.space.value}, and nothing is mapped")


class _Mapped:
    def __init__(self, kernel: Kernel, geometry: Geometry):
        self.kernel, self.geometry, self.grid = kernel, geometry, grid_of(kernel)
        self.rows = {b.name: b for b in kernel.scratch if b.pack > 1}

    def wrong(self, cause: str) -> GraphError:
        return _wrong(self.kernel, cause)

    def check(self, mapping: Mapping | None) -> None:
        self.sizes(mapping)
        self.roles()
        self.spaces()
        self.written_first()
        for name in self.rows:
            self.row(name)
        if self.geometry.template is None and self.geometry.share > 1:
            is_warp = self.geometry.share <= self.geometry.warp
            self.barriers(Role.SUBGROUP if is_warp else Role.GROUP)
            self.statements(self.grid.body, _Since())

    # Sizes

    def sizes(self, mapping: Mapping | None) -> None:
        geometry = self.geometry
        if geometry.share < 1 or geometry.threads % geometry.share:
            raise self.wrong(f"{geometry.share} threads share a block of {geometry.threads}")
        in_warp = geometry.share < geometry.warp and geometry.combine is Combine.EXCHANGE
        if in_warp and geometry.share & (geometry.share - 1):
            raise self.wrong(f"{geometry.share} threads are no part of a warp that exchanges")
        used = shared_bytes(self.kernel)
        if mapping is not None and used > mapping.shared_limit:
            limit = mapping.shared_limit
            raise self.wrong(f"a block needs {used} bytes of shared memory, and has {limit}")
        if isinstance(geometry.template, Tiled):
            self.tile(geometry.template)
        if isinstance(geometry.template, Warpgroups):
            self.warpgroups(geometry.template)

    def tile(self, tiled: Tiled) -> None:
        """Threads cover the tile, and the template's loops are the kernel's."""
        squares = tiled.left.length // tiled.down * (tiled.right.length // tiled.across)
        if squares * tiled.shares != self.geometry.threads:
            raise self.wrong(f"{squares} squares of a tile are no block's threads")
        for panel in (tiled.left, tiled.right):
            rows = panel.length if panel.is_along else tiled.tile_depth
            if panel.apart > 1 and rows % (2 * panel.apart):
                raise self.wrong(f"{rows} rows of a panel are not copied {panel.apart} apart")
        loops = {*tiled.batch, *tiled.rows, *tiled.columns}
        if loops != set(self.grid.variables) or math.prod(tiled.sizes[:3]) != self.grid.count:
            raise self.wrong("the loops of a tile are not those of the grid")

    def warpgroups(self, template: Warpgroups) -> None:
        """The template's loops are the kernel's, and parts of rows are whole tiles."""
        loops = {template.outer, template.column}
        if loops != set(self.grid.variables) or self.geometry.threads != template.THREADS:
            raise self.wrong("the loops of warpgroups are not those of the grid")
        inner = template.inner
        if inner is not None and inner.extent % template.ROWS:
            raise self.wrong(f"{inner.extent} rows of a part are no tiles")
        if template.column.extent % template.LANES:
            raise self.wrong(f"{template.column.extent} columns are no packs")

    # Roles and spaces

    def roles(self) -> None:
        """Loops of the grid around everything; nothing is left that is not mapped."""
        for s, loops in nested(self.kernel.body):
            if not isinstance(s, For):
                continue
            if s.role in UNMAPPED:
                raise self.wrong(f"the loop over {s.var.name} is not mapped")
            if s.role is Role.GRID and any(loop.role is not Role.GRID for loop in loops):
                raise self.wrong(f"the grid's loop over {s.var.name} is inside another")
            if s.role in SHARED_OUT and self.geometry.share == 1:
                raise self.wrong(f"one thread shares out the loop over {s.var.name}")
            if s.var.extent % s.lanes:
                raise self.wrong(f"{s.var.extent} iterations are no packs of {s.lanes}")

    def spaces(self) -> None:
        for buffer in self.kernel.buffers:
            if buffer.space is not Space.GLOBAL:
                raise self.wrong(f"memory that others see is {buffer.space.value}: {buffer.name}")
        held = held_matrices(self.kernel)
        for buffer in self.kernel.scratch:
            is_own = self.geometry.share == 1 or buffer.name in held
            own = Space.PRIVATE if is_own else Space.SHARED
            if buffer.space is not own and buffer.name not in group_rows(self.kernel):
                raise self.wrong(f"{buffer.name} is {buffer.space.value}, not {own.value}")

    def barriers(self, group: Role) -> None:
        """Barriers stand where all threads that wait come by."""
        for s, loops in nested(self.grid.body):
            if not isinstance(s, Barrier):
                continue
            shared = [loop for loop in loops if loop.role in SHARED_OUT]
            by_warps = [loop for loop in shared if is_of_warps(loop)]
            if shared != by_warps:
                name = shared[-1].var.name
                raise self.wrong(f"a barrier stands inside the shared loop over {name}")
            scope = Role.SUBGROUP if by_warps else group
            if s.scope is not scope:
                raise self.wrong(f"a barrier of the {s.scope.value} is the {scope.value}'s")

    # Memory

    def written_first(self) -> None:
        """Memory of a group or a thread is written before it is read."""
        own, written = {b.name for b in self.kernel.scratch}, set[str]()
        for s in walk(self.kernel.body):
            every = [] if isinstance(s, For) else [a for a in accesses([s]) if a.buffer in own]
            sets = isinstance(s, Store) or (isinstance(s, Matmul) and not s.adds)
            read = {a.buffer for a in every if not a.writes or not sets}
            if not read <= written:
                missing = ", ".join(sorted(read - written))
                raise self.wrong(f"{missing} is read before it is written")
            written |= {a.buffer for a in every if a.writes}

    def row(self, name: str) -> None:
        """A row in packs is walked by loops of one shape, each thread at its own elements."""
        row = self.rows[name]
        for loop in row_loops(self.grid.body, name):
            is_whole = loop.var.extent == row.size and loop.lanes == row.pack
            at = variable(loop.var)
            own = (a.index.same(at) for a in accesses(loop.body) if a.buffer == name)
            if not is_whole or not all(own):
                raise self.wrong(f"the loop over {loop.var.name} does not walk the row {name}")
        walked = sum(_touches(loop, name=name) for loop in row_loops(self.grid.body, name))
        if not walked or walked != _touches(*self.grid.body, name=name):
            raise self.wrong(f"the row {name} is touched outside the loops that walk it")

    def statements(self, body: Sequence[Statement], since: _Since) -> None:
        """A barrier between statements of which one writes what the other touches."""
        waits = self.geometry.combine is not Combine.EXCHANGE
        last = max((i for i, s in enumerate(body) if isinstance(s, For)), default=0)
        for i, s in enumerate(body):
            if isinstance(s, Barrier):
                since.clear()
            elif isinstance(s, For) and s.role is Role.SEQUENTIAL:
                for _ in range(2):  # an iteration may meet the one before
                    self.statements(s.body, since)
            elif isinstance(s, For) and is_of_warps(s):
                self.warps(s, since)
            elif not waits or i <= last:
                self.meets(s, since)
                if waits and isinstance(s, For) and sums_of(s):
                    since.clear()  # all threads wait as they combine their parts

    def warps(self, loop: For, since: _Since) -> None:
        """Iterations that are a warp's each, and do not meet each other."""
        self.statements(loop.body, _Since())
        self.meets(loop, since)

    def meets(self, statement: Statement, since: _Since) -> None:
        every = [a for a in accesses([statement]) if a.buffer not in self.rows]
        touched = {a.buffer for a in every}
        written = {a.buffer for a in every if a.writes}
        meeting = touched & since.written | written & since.touched
        if meeting:
            names = ", ".join(sorted(meeting))
            raise self.wrong(f"no barrier stands between threads that meet in {names}")
        since.touched |= touched
        since.written |= written


def _touches(*body: Statement, name: str) -> int:
    """How often statements touch a buffer."""
    return sum(a.buffer == name for a in accesses(body))


class _Since:
    """Buffers that were written and touched since the last barrier."""

    def __init__(self) -> None:
        self.written, self.touched = set[str](), set[str]()

    def clear(self) -> None:
        self.written, self.touched = set(), set()
