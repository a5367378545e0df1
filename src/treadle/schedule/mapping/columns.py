"""Sums of columns: neighbouring threads take neighbouring columns, and share each column's rows.

A column's threads are one in each warp of the block, whose parts are added in order; or fewer, in
rows of threads beside each other, whose parts are added as a tree. A kernel may have several such
sums, one after the other; what is stored between them waits for the end, as other threads may
still read what it changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.access import accesses, loads_of, locals_in
from treadle.kernel.arithmetic import identity
from treadle.kernel.geometry import Combine
from treadle.kernel.index import Index, Var, uses
from treadle.kernel.nodes import (
    Accumulate,
    For,
    Kernel,
    Let,
    Literal,
    Role,
    Statement,
    Store,
)
from treadle.kernel.packs import is_pack, lanes_for
from treadle.kernel.target import Mapping
from treadle.schedule.mapping.shapes import (
    Shape,
    extent_of,
    is_sum,
    lies_across,
    nested,
    peeled,
    shape_of,
)


def chosen_shape(kernel: Kernel, mapping: Mapping, is_aligned: bool = True) -> Shape:
    """How a kernel is spread; of two ways to share sums of columns the one with more threads."""
    tree = tree_of(kernel, mapping, is_aligned)
    in_order = warps_of(kernel, mapping) if is_aligned else None
    if tree is not None and in_order is not None:
        return tree if tree.launched > in_order.launched else in_order
    return tree or in_order or shape_of(kernel, mapping, is_aligned)


# One thread of a column in each warp


def warps_of(kernel: Kernel, mapping: Mapping) -> Shape | None:
    """The shape of a kernel with one sum of columns; None for any other."""
    lets, grid, body = peeled(kernel)
    inner = [s for s in body if isinstance(s, For)]
    if kernel.scratch or len(inner) != 1 or not grid:
        return None
    (loop,) = inner
    loops, statements = nested(loop)
    lanes = lanes_for(kernel, grid[-1], body, mapping)
    rows = math.prod(v.extent for v in loops)
    if lanes == 1 or rows < 2 * mapping.least_each:
        return None
    if not _are_sums_of_columns(body) or not _stores_apart(body, loops, loop):
        return None
    large = [a.index for a in accesses(statements) if any(_moves(a.index, v) for v in loops)]
    across = [is_pack(i, grid[-1], lanes) for i in large if _moves(i, grid[-1])]
    if not across or not all(across):
        return None
    shape = Shape(lets, grid, body, 1, mapping.warp, lanes, Combine.IN_ORDER)
    sums = [s for s in statements if isinstance(s, Accumulate)]
    count = _warps(shape, sums, rows, mapping)
    return replace(shape, share=count, threads=mapping.warp * count)


def _warps(shape: Shape, sums: Sequence[Accumulate], rows: int, mapping: Mapping) -> int:
    """Warps that share a column, as many as have rows to sum and room for their parts."""
    blocks = shape.count // shape.lanes // mapping.warp
    part = mapping.warp * shape.lanes * sum(max(4, s.value.dtype.itemsize) for s in sums)
    is_many = blocks >= mapping.few_blocks
    most = mapping.column_warps if is_many else mapping.most_threads // mapping.warp
    most, count = min(most, mapping.column_bytes // part), 2
    while 2 * count <= min(most, rows // mapping.least_each):
        count *= 2
    return count


def _moves(index: Index, var: Var) -> bool:
    return any(uses(atom, var) for atom, _ in index.terms)


def _stores_apart(body: Sequence[Statement], loops: Sequence[Var], loop: For) -> bool:
    """Whether what rows store is read nowhere, and no two rows store to one element."""
    stores = [s for s in nested(loop)[1] if isinstance(s, Store)]
    stored = {s.buffer for s in stores}
    if any(a.buffer in stored and not a.writes for a in accesses(list(body))):
        return False
    return all(_is_apart(s.index, loops) for s in stores)


def _start_from_nothing(sums: dict[str, Accumulate], before: Sequence[Statement]) -> bool:
    starts = {s.local: s.value for s in before if isinstance(s, Let)}
    return all(
        isinstance(start := starts.get(local), Literal)
        and start.value == identity(s.op, s.value.dtype)
        for local, s in sums.items()
    )


def _is_apart(index: Index, loops: Sequence[Var]) -> bool:
    """Whether elements of two rows differ: each factor is beyond the reach of the smaller ones."""
    if not all(isinstance(atom, Var) for atom, _ in index.terms):
        return False
    known = {atom for atom, _ in index.terms}
    reach = 0
    for atom, factor in sorted(index.terms, key=lambda t: abs(t[1])):
        assert isinstance(atom, Var)
        if abs(factor) <= reach:
            return False
        reach += abs(factor) * (atom.extent - 1)
    return all(v in known for v in loops if v.extent > 1)


# Rows of threads


def tree_of(kernel: Kernel, mapping: Mapping, is_aligned: bool = True) -> Shape | None:
    """The shape of a kernel of sums of columns that rows of threads share; None for any other."""
    lets, grid, body = peeled(kernel)
    loops = [s for s in body if isinstance(s, For)]
    if not loops or not grid or kernel.scratch or not _are_sums_of_columns(body):
        return None
    if not lies_across(grid, loops):
        return None
    rows, count = min(map(extent_of, loops)), math.prod(v.extent for v in grid)
    inner = [s for loop in loops for s in nested(loop)[1]]
    room = sum(s.value.dtype.itemsize for s in inner if isinstance(s, Accumulate))
    room *= mapping.threads
    lanes = lanes_for(kernel, grid[-1], body, mapping) if is_aligned else 1
    least = mapping.busy // 4 // mapping.tallest
    while lanes > 1 and (count // lanes < least or room * lanes > mapping.tall_bytes):
        lanes //= 2
    tall = mapping.tallest
    while tall > 1:
        is_even = count // lanes % (mapping.threads // tall) == 0
        is_full = count // lanes * tall > mapping.tall_threads
        if is_even and mapping.tall_rows * tall <= rows and not is_full:
            ordered = _stores_last(body)
            return Shape(lets, grid, ordered, tall, mapping.threads, lanes, Combine.TREE)
        tall //= 2
    return None


def _are_sums_of_columns(body: Sequence[Statement]) -> bool:
    """Whether all loops accumulate, and what is stored between them is not read afterwards."""
    loops = [i for i, s in enumerate(body) if isinstance(s, For)]
    if any(not isinstance(s, (For, Let, Store)) for s in body):
        return False
    for i, s in enumerate(body[: loops[-1]]):
        rest = accesses(body[i + 1 :])
        if isinstance(s, Store) and any(a.buffer == s.buffer and not a.writes for a in rest):
            return False
    return all(_is_sum_of_columns(body[:i], body[i]) for i in loops)


def _is_sum_of_columns(before: Sequence[Statement], loop: Statement) -> bool:
    """Whether a loop only accumulates from nothing, and perhaps stores what it adds."""
    assert isinstance(loop, For)
    inner = nested(loop)[1]
    if loop.role is not Role.SEQUENTIAL or loop.stop is not None:
        return False
    stores = [s for s in inner if isinstance(s, Store)]
    plain = tuple(s for s in inner if not isinstance(s, Store))
    sums = {s.local: s for s in plain if isinstance(s, Accumulate)}
    if not _start_from_nothing(sums, before) or not is_sum(replace(loop, body=plain)):
        return False
    return not any(s.guard or set(sums) & locals_in(s.value) for s in stores)


def _stores_last(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Stores between the sums after all of them."""
    last = max(i for i, s in enumerate(body) if isinstance(s, For)) + 1
    early = [s for s in body[:last] if isinstance(s, Store)]
    return (*(s for s in body[:last] if not isinstance(s, Store)), *early, *body[last:])


def reads_ahead(loop: For) -> bool:
    """Whether a sum reads one tensor only: then several rows of it can be on their way at once."""
    loops, inner = nested(loop)
    read = {x for s in inner for x in loads_of(s)}
    return len({x for x in read if any(_moves(x.index, v) for v in loops)}) == 1
