"""Loops over float16 in packs of four: a thread has four neighbouring iterations.

A target whose elements of float16 take two bytes reads and writes four of them at once. Iterations
become four statements each, whose indices differ by a number: what is next to each other is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.base.dtypes import float16
from treadle.kernel.access import accesses
from treadle.kernel.geometry import Combine
from treadle.kernel.index import Index, Var, uses, variable
from treadle.kernel.mapped import grid_of
from treadle.kernel.nodes import Accumulate, For, Kernel, Let, Role, Statement, Store
from treadle.kernel.packs import is_pack
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import map_statements, substituted, with_locals
from treadle.schedule.mapping.groups import PACKED
from treadle.schedule.nests import Body

LEAST = 1 << 18  # iterations that leave enough threads for a device when each has four


def by_packs(kernel: Kernel, mapping: Mapping) -> Kernel:
    """A mapped kernel with loops over float16 by packs, where all of a buffer's are such."""
    geometry = kernel.geometry
    if geometry is None or not mapping.packs_narrow or geometry.template is not None:
        return kernel
    is_thread = geometry.share == 1
    if geometry.combine is not Combine.EXCHANGE or (is_thread and grid_of(kernel).count < LEAST):
        return kernel
    narrow = frozenset(b.name for b in kernel.buffers if b.dtype is float16)
    found: set[str] = set()

    def change(s: Statement) -> Sequence[Statement]:
        if not isinstance(s, For) or not _is_for_packs(s, narrow, is_thread):
            return [s]
        found.update(a.buffer for a in accesses(s.body) if a.buffer in narrow)
        return [_by_fours(s)]

    body = map_statements(kernel.body, change)
    if not found:
        return kernel
    return replace(kernel, body=body, geometry=replace(geometry, packs=frozenset(found)))


def _is_for_packs(loop: For, narrow: frozenset[str], is_thread: bool) -> bool:
    """Whether iterations are statements of a thread, and neighbours touch neighbours."""
    if loop.role is not (Role.GRID if is_thread else Role.GROUP) or loop.stop is not None:
        return False
    if loop.lanes > 1 or loop.var.extent % PACKED:
        return False
    if not all(isinstance(s, Let | Store | Accumulate) for s in loop.body):
        return False
    if any(isinstance(s, Store) and s.guard is not None for s in loop.body):
        return False
    own = [a for a in accesses(loop.body) if a.buffer in narrow]
    moving = [a.index for a in own if any(uses(atom, loop.var) for atom, _ in a.index.terms)]
    return bool(moving) and all(_is_plain(i, loop.var) for i in moving)


def _is_plain(index: Index, var: Var) -> bool:
    """Whether elements of a pack are told apart by a number alone."""
    moved = [atom for atom, _ in index.terms if uses(atom, var)]
    return moved == [var] and is_pack(index, var, PACKED)


def _by_fours(loop: For) -> For:
    var = Var(loop.var.name, loop.var.extent // PACKED)
    names = [s.local for s in loop.body if isinstance(s, Let)]
    body: Body = ()
    for u in range(PACKED):
        own = substituted(loop.body, {loop.var: variable(var) * PACKED + u})
        body += with_locals(own, {n: lane_name(n, u) for n in names}) if u else own
    return For(var, loop.role, body, None, 1, loop.unroll)


def lane_name(local: str, lane: int) -> str:
    """What a local is called in an iteration of a pack after the first."""
    return f"{local}~{lane}"
