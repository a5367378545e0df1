"""One kernel mapped to a GPU, by what it is: a template's, or loops shared out among threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.access import accesses
from treadle.kernel.geometry import Combine, Geometry, Scattered
from treadle.kernel.index import Var, substitute, variable
from treadle.kernel.launch import matmul_call_of
from treadle.kernel.mapped import held_matrices
from treadle.kernel.nodes import (
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Space,
    Statement,
    Store,
    library_call_of,
    standalone_matmul,
)
from treadle.kernel.rowsums import RowSums, row_sums_of
from treadle.kernel.scatter import is_scatter, itemsize_of, scatter_of, scatter_room
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import peel, walk
from treadle.schedule.mapping.contractions import as_loops, contraction_of, map_contraction
from treadle.schedule.mapping.groups import (
    COMMON,
    Group,
    Stage,
    in_order,
    lanes_of,
    nest,
    side_by_side,
    stages_of,
    with_locals,
    with_stages,
)
from treadle.schedule.mapping.matrices import are_matrices, map_matrices, warps_for
from treadle.schedule.mapping.packed import by_packs
from treadle.schedule.mapping.shapes import (
    Shape,
    chosen_shape,
    reads_ahead,
    shape_of,
    with_short_rows,
)
from treadle.schedule.nests import nested


def map_kernel(
    kernel: Kernel,
    mapping: Mapping,
    is_aligned: bool = True,
    beside: int | None = None,
    calls: int = 1,
) -> Kernel:
    """A kernel with its loops shared out; what a library computes, or is mapped, stays as it is.

    `is_aligned`: its buffers start at whole packs. `beside`: it is part of a cooperative launch,
    and should have about as many blocks beside the other kernels of its phase. `calls`: of it in
    one launch, at most.
    """
    if library_call_of(kernel) is not None or kernel.geometry is not None:
        return kernel
    if is_scatter(kernel, mapping):
        return _map_scatter(kernel, mapping)
    if standalone_matmul(kernel) is not None:
        if mapping.has_matmul and matmul_call_of(kernel) is not None:
            return kernel
        kernel = as_loops(kernel)
    found = contraction_of(kernel, mapping)
    if found is not None and are_matrices(found, mapping):
        return map_matrices(kernel, found, mapping, is_aligned, calls)
    if found is not None:
        blocks = mapping.blocks if beside is None else beside
        tiled = map_contraction(kernel, found, mapping, is_aligned, blocks)
        if tiled is not None:
            return tiled
    if beside is not None:
        shape = shape_of(kernel, mapping, is_aligned, mapping.threads)
        return _map_shape(kernel, shape, mapping, is_aligned, True)
    by_parts = map_row_sums(kernel, mapping) if is_aligned else None
    if by_parts is not None:
        return by_parts
    kernel = with_short_rows(kernel, mapping)
    shape = chosen_shape(kernel, mapping, is_aligned)
    warps = warps_for(kernel)
    if warps:
        shape = replace(shape, share=mapping.warp * warps, threads=mapping.warp * warps)
    mapped = _map_shape(kernel, shape, mapping, is_aligned, False)
    return by_packs(mapped, mapping) if is_aligned and not warps else mapped


def _map_shape(
    kernel: Kernel, shape: Shape, mapping: Mapping, is_aligned: bool, is_cooperative: bool
) -> Kernel:
    body: Sequence[Statement] = in_order(shape.body)
    scratch = tuple(replace(b, space=Space.PRIVATE) for b in kernel.scratch)
    in_shared: frozenset[str] = frozenset()  # rows that are staged there
    if shape.combine is not Combine.EXCHANGE:
        body = _columns(shape, mapping)
    elif shape.share > 1:
        inner, own = with_locals(side_by_side(shape.body), kernel.scratch)
        held = held_matrices(kernel)
        has_stages = is_aligned and not is_cooperative
        stages = stages_of(kernel, inner, shape.share, mapping) if has_stages else []
        in_shared = frozenset(s.memory.name for s in stages if s.memory.space is Space.SHARED)
        group = Group(
            kernel, mapping, shape.share, is_aligned, is_cooperative, frozenset(own),
            in_shared=in_shared, matrices=held,
        )  # fmt: skip
        body = group.statements(inner, with_stages(inner, stages))
        scratch = tuple(
            replace(b, space=Space.PRIVATE if b.name in held else Space.SHARED)
            for b in kernel.scratch
            if b.name not in own
        )
        scratch += tuple(s.memory for s in stages)
    mapped = (*shape.lets, *nest(shape.grid, Role.GRID, body, shape.lanes))
    room = 2 if in_shared else 1
    geometry = Geometry(shape.threads, shape.share, mapping.exchanging, shape.combine, room)
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
    shared_out = -(-found.row.extent // mapping.blocks)  # few rows are spread over all blocks
    rows = max(1, min(mapping.scatter_rows, room, shared_out))
    template = Scattered(
        rows,
        -(-found.row.extent // rows),
        mapping.scatter_noted,
        mapping.scatter_looked,
        mapping.scatter_terms,
    )
    loops, inner = peel(kernel.body, Role.PARALLEL)
    body = nest([loop.var for loop in loops], Role.GRID, in_order(inner))
    geometry = Geometry(mapping.scatter_threads, 1, mapping.warp, template=template)
    return replace(kernel, body=body, geometry=geometry)


def map_row_sums(kernel: Kernel, mapping: Mapping) -> Kernel | None:
    """A kernel of rows by parts as blocks whose warps share the rows; None for any other."""
    rows = row_sums_of(kernel)
    sums = [b for b in kernel.scratch if b.size > 1]
    if rows is None or len({b.size for b in sums}) != 1:
        return None
    if not all(_is_zero(s) for s in walk(rows.before) if not isinstance(s, For)):
        return None  # every warp starts from it
    lanes = _lanes(kernel, rows, {b.name for b in sums}, sums[0].size, mapping)
    mapping = mapping if lanes is None else replace(mapping, lanes=lanes)  # of every loop
    if lanes is None or -(-sums[0].size // (mapping.warp * lanes)) > mapping.unrolled:
        return None
    body, own = with_locals(side_by_side(rows.body), kernel.scratch)
    stages = stages_of(kernel, body, mapping.warp, mapping)
    if any(s.memory.pack != lanes or s.memory.space is not Space.PRIVATE for s in stages):
        return None
    memory = tuple(replace(b, space=Space.PRIVATE, pack=lanes) for b in sums)
    held = dict.fromkeys((b.name for b in sums), lanes)
    group = Group(kernel, mapping, mapping.warp, True, ignored=frozenset(own), held=held)
    first = group.statements(rows.before)
    ahead = [s for s in stages if any(b.name == s.key[0] for b in kernel.inputs)]
    row = [*_copies(ahead), *group.statements(body, with_stages(body, stages, ahead))]
    row += group.barrier()
    inside = (*first, For(rows.row, Role.GROUP, tuple(row)), *group.statements(rows.after))
    threads = mapping.warp * mapping.part_warps
    return replace(
        kernel,
        body=(For(rows.part, Role.GRID, inside),),
        scratch=(*memory, *(s.memory for s in stages)),
        geometry=Geometry(threads, threads, mapping.warp, room=2),
    )


def _is_zero(statement: Statement) -> bool:
    """Whether a statement names or stores 0, or stores what was named so."""
    if isinstance(statement, Store) and isinstance(statement.value, Local):
        return True
    value = statement.value if isinstance(statement, (Let, Store)) else None
    return isinstance(value, Literal) and value.value == 0


def _lanes(
    kernel: Kernel, rows: RowSums, names: set[str], width: int, mapping: Mapping
) -> int | None:
    """The fewest lanes of loops that touch the sums, each its own columns; None if that is one."""
    around = (*rows.before, *rows.body, *rows.after)
    touching = [s for s in around if any(a.buffer in names for a in accesses([s]))]
    walks = [s for s in touching if isinstance(s, For) and s.var.extent == width]
    if len(walks) != len(touching) or not all(_is_own(s, names) for s in walks):
        return None
    wanted = [lanes_of(kernel, s, mapping.warp, mapping) for s in walks if s in rows.body]
    fewest = min(wanted, default=1)
    return fewest if fewest > 1 else None


def _is_own(loop: For, names: set[str]) -> bool:
    """Whether every thread touches its own columns of the sums alone."""
    at = variable(Var(loop.var.name, loop.var.extent))
    return all(a.index == at for a in accesses([loop]) if a.buffer in names)


def _copies(stages: Sequence[Stage]) -> list[Statement]:
    """All of a row that is staged, before anything waits for it."""
    found: list[Statement] = []
    for i, stage in enumerate(stages):
        (buffer, index), memory = stage.key, stage.memory
        var = Var(f"ahead{i}", memory.size)
        at = variable(var)
        there = substitute(index, {Var(COMMON, memory.size): at})
        copy = Store(memory.name, at, Load(buffer, there, memory.dtype))
        found += nest([var], Role.SUBGROUP, [copy], memory.pack)
    return found
