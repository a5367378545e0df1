"""Shared-memory staging: results that a block reads again are also in memory its threads share.

Outputs of a kernel go to the device's memory. Other threads of the block that computed them would
wait long to read them back from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.access import accesses, names_in
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import Buffer, For, Kernel, Let, Local, Role, Statement, Store, Update
from treadle.kernel.traverse import map_statements, peel, rewrite, walk
from treadle.schedule.nests import Parts, fresh


def with_staging(kernel: Kernel, room: int) -> Kernel:
    """The kernel with copies, of so many bytes at most, of what one loop writes and others read."""
    loops, inner = peel(kernel.body, Role.PARALLEL, most=1)
    if not loops:
        return kernel
    var, own = loops[0].var, dict[str, Buffer]()
    for buffer in sorted(kernel.outputs, key=lambda b: b.nbytes):
        part = buffer.size // var.extent
        nbytes = part * buffer.dtype.itemsize
        if part > 1 and nbytes <= room and _is_read_again(inner, buffer, var):
            own[buffer.name] = Buffer(f"{buffer.name}.near", buffer.dtype, part)
            room -= nbytes
    if not own:
        return kernel
    taken = names_in(inner)
    body = map_statements(inner, lambda s: _copied(s, own, var, taken))
    scratch = (*kernel.scratch, *own.values())
    return replace(kernel, body=(replace(loops[0], body=body),), scratch=scratch)


def _is_read_again(body: Sequence[Statement], buffer: Buffer, var: Var) -> bool:
    """Whether only the iteration's part is touched, first by one statement's stores, then read."""
    every = [[a for a in accesses([s]) if a.buffer == buffer.name] for s in body]
    touching = [found for found in every if found]
    if not touching or any(not a.writes for a in touching[0]):
        return False
    if not any(not a.writes for found in touching[1:] for a in found):
        return False
    stores = (s for s in walk(body) if isinstance(s, (Store, Update)))
    writers = [s for s in stores if s.buffer == buffer.name]
    is_plain = all(isinstance(s, Store) and s.guard is None for s in writers)
    parts = Parts(variable(var), var.extent, {buffer.name: buffer.size})
    return is_plain and all(parts.has(a) for found in touching for a in found)


def _copied(
    statement: Statement, own: dict[str, Buffer], var: Var, taken: set[str]
) -> tuple[Statement, ...]:
    """The statement, reading the copies; a store of one is made twice."""
    if isinstance(statement, For):
        return (statement,)

    def at(buffer: str, index: Index) -> Index:
        return index - variable(var) * own[buffer].size if buffer in own else index

    def name_of(buffer: str) -> str:
        return own[buffer].name if buffer in own else buffer

    moved = rewrite(statement, at, name_of)
    if not isinstance(statement, Store) or statement.buffer not in own:
        return (moved,)
    assert isinstance(moved, Store)
    name = fresh("near", taken)
    value = Local(name, moved.value.dtype)
    far = replace(statement, value=value)
    return Let(name, moved.value), far, replace(moved, value=value)
