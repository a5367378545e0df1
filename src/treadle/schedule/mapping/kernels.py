"""One kernel mapped to a GPU, by what it is: a template's, or loops shared out among threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.geometry import Combine, Geometry, Scattered
from treadle.kernel.launch import matmul_call_of
from treadle.kernel.nodes import (
    Buffer,
    For,
    Kernel,
    Role,
    Space,
    Statement,
    library_call_of,
    standalone_matmul,
)
from treadle.kernel.scatter import is_scatter, itemsize_of, scatter_of, scatter_room
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import peel
from treadle.schedule.mapping.columns import chosen_shape, reads_ahead
from treadle.schedule.mapping.contractions import contraction_of
from treadle.schedule.mapping.groups import Group, in_order, nest
from treadle.schedule.mapping.matmuls import as_loops
from treadle.schedule.mapping.row_sums import map_row_sums
from treadle.schedule.mapping.shapes import Shape, nested, shape_of
from treadle.schedule.mapping.staging import stages_of, with_locals, with_stages
from treadle.schedule.mapping.tiles import map_contraction


def map_kernel(
    kernel: Kernel, mapping: Mapping, is_aligned: bool = True, beside: int | None = None
) -> Kernel:
    """A kernel with its loops shared out; what a library computes stays as it is.

    `is_aligned`: its buffers start at whole packs. `beside`: it is part of a cooperative launch,
    and should have about as many blocks beside the other kernels of its phase.
    """
    if library_call_of(kernel) is not None:
        return kernel
    if is_scatter(kernel, mapping):
        return _map_scatter(kernel, mapping)
    if standalone_matmul(kernel) is not None:
        if mapping.has_matmul and matmul_call_of(kernel) is not None:
            return kernel
        kernel = as_loops(kernel)
    found = contraction_of(kernel, mapping)
    if found is not None:
        blocks = mapping.blocks if beside is None else beside
        return map_contraction(kernel, found, mapping, is_aligned, blocks)
    if beside is not None:
        shape = shape_of(kernel, mapping, is_aligned, mapping.threads)
        return _map_shape(kernel, shape, mapping, is_aligned, True)
    by_parts = map_row_sums(kernel, mapping) if is_aligned else None
    if by_parts is not None:
        return by_parts
    shape = chosen_shape(kernel, mapping, is_aligned)
    return _map_shape(kernel, shape, mapping, is_aligned, False)


def _map_shape(
    kernel: Kernel, shape: Shape, mapping: Mapping, is_aligned: bool, is_cooperative: bool
) -> Kernel:
    geometry = Geometry(shape.threads, shape.share, mapping.warp, shape.combine)
    if shape.share == 1:
        scratch = tuple(replace(b, space=Space.PRIVATE) for b in kernel.scratch)
        return _built(kernel, shape, in_order(shape.body), scratch, geometry)
    if shape.combine is not Combine.EXCHANGE:
        body = _columns(shape, mapping)
        return _built(kernel, shape, body, (), geometry)
    inner, own = with_locals(shape.body, kernel.scratch)
    has_stages = is_aligned and not is_cooperative
    stages = stages_of(kernel, inner, shape.share, mapping) if has_stages else []
    in_shared = frozenset(s.memory.name for s in stages if s.memory.space is Space.SHARED)
    group = Group(
        kernel, mapping, shape.share, is_aligned, is_cooperative, frozenset(own),
        in_shared=in_shared,
    )  # fmt: skip
    body = group.statements(inner, with_stages(inner, stages))
    scratch = tuple(replace(b, space=Space.SHARED) for b in kernel.scratch if b.name not in own)
    scratch += tuple(s.memory for s in stages)
    geometry = replace(geometry, room=2 if in_shared else 1)
    return _built(kernel, shape, body, scratch, geometry)


def _built(
    kernel: Kernel,
    shape: Shape,
    body: Sequence[Statement],
    scratch: tuple[Buffer, ...],
    geometry: Geometry,
) -> Kernel:
    mapped = (*shape.lets, *nest(shape.grid, Role.GRID, body, shape.lanes))
    return replace(kernel, body=mapped, scratch=scratch, geometry=geometry)


def _columns(shape: Shape, mapping: Mapping) -> list[Statement]:
    """Sums of columns, each shared out among the threads of its column."""
    found: list[Statement] = []
    for s in shape.body:
        if isinstance(s, For):
            is_ahead = shape.combine is Combine.IN_ORDER or reads_ahead(s)
            loops, inner = nested(s)
            found += nest(loops, Role.GROUP, inner, unroll=mapping.ahead if is_ahead else 1)
        else:
            found.append(s)
    return found


def _map_scatter(kernel: Kernel, mapping: Mapping) -> Kernel:
    found = scatter_of(kernel)
    assert found is not None
    room = scatter_room(mapping) // (found.width * itemsize_of(kernel, found))
    rows = max(1, min(mapping.scatter_rows, room))
    template = Scattered(
        rows,
        -(-found.row.extent // rows),
        mapping.scatter_noted,
        mapping.scatter_looked,
        mapping.scatter_terms,
    )
    geometry = Geometry(mapping.scatter_threads, 1, mapping.warp, template=template)
    return replace(kernel, body=_on_grid(kernel.body), geometry=geometry)


def _on_grid(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Parallel loops around everything as loops of the grid; all others in order."""
    loops, inner = peel(body, Role.PARALLEL)
    found = in_order(inner)
    for loop in reversed(loops):
        found = (replace(loop, role=Role.GRID, body=found),)
    return found
