"""Sums of columns: neighbouring threads take neighbouring columns, and share each column's rows.

A column's threads are one in each warp of the block, whose parts are added in order; or fewer, in
rows of threads beside each other, whose parts are added as a tree. A kernel may have several such
sums, one after the other; what is stored between them waits for the end, as other threads may
still read what it changes.
"""

from __future__ import annotations

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
    Statement,
    Store,
)
from treadle.kernel.packs import is_pack, lanes_for
from treadle.kernel.races import conflicts_in
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import walk
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
    lets, grid, body = peeled(kernel)
    loops = [s for s in body if isinstance(s, For)]
    if kernel.scratch or not grid or not loops or not _are_sums_of_columns(body):
        return shape_of(kernel, mapping, is_aligned)
    lanes = lanes_for(kernel, grid[-1], body, mapping) if is_aligned else 1
    one = Shape(lets, grid, body, 1, mapping.threads, lanes)
    found = [s for s in (_in_order(one, loops, mapping), _tree(one, loops, mapping)) if s]
    if not found:
        return shape_of(kernel, mapping, is_aligned)
    return max(found, key=lambda shape: shape.launched)


def _sums(loops: Sequence[For]) -> list[Accumulate]:
    return [s for loop in loops for s in nested(loop)[1] if isinstance(s, Accumulate)]


# One thread of a column in each warp


def _in_order(one: Shape, inner: Sequence[For], mapping: Mapping) -> Shape | None:
    """One sum, of columns that lie in whole packs; None for any other."""
    loops, statements = nested(inner[0])
    if len(inner) != 1 or one.lanes == 1 or extent_of(inner[0]) < 2 * mapping.least_each:
        return None
    large = [a.index for a in accesses(statements) if any(_moves(a.index, v) for v in loops)]
    last = one.grid[-1]
    across = [is_pack(i, last, one.lanes) for i in large if _moves(i, last)]
    if not across or not all(across):
        return None
    count = _warps(one, inner[0], mapping)
    return replace(one, share=count, threads=mapping.warp * count, combine=Combine.IN_ORDER)


def _warps(one: Shape, loop: For, mapping: Mapping) -> int:
    """Warps that share a column, as many as have rows to sum and room for their parts."""
    blocks = one.count // one.lanes // mapping.warp
    part = mapping.warp * one.lanes * sum(max(4, s.value.dtype.itemsize) for s in _sums([loop]))
    is_many = blocks >= mapping.few_blocks
    most = mapping.column_warps if is_many else mapping.most_threads // mapping.warp
    most, count = min(most, mapping.column_bytes // part), 2
    while 2 * count <= min(most, extent_of(loop) // mapping.least_each):
        count *= 2
    return count


def _moves(index: Index, var: Var) -> bool:
    return any(uses(atom, var) for atom, _ in index.terms)


# Rows of threads


def _tree(one: Shape, loops: Sequence[For], mapping: Mapping) -> Shape | None:
    """Sums whose rows of threads fill whole blocks; None for any other."""
    if not lies_across(one.grid, loops):
        return None
    rows, lanes = min(map(extent_of, loops)), one.lanes
    room = sum(s.value.dtype.itemsize for s in _sums(loops)) * mapping.threads
    least = mapping.busy // 4 // mapping.tallest
    while lanes > 1 and (one.count // lanes < least or room * lanes > mapping.tall_bytes):
        lanes //= 2
    count, tall = one.count // lanes, mapping.tallest
    while tall > 1:
        is_even = count % (mapping.threads // tall) == 0
        is_full = count * tall > mapping.tall_threads
        if is_even and mapping.tall_rows * tall <= rows and not is_full:
            body = _stores_last(one.body)
            return replace(one, body=body, share=tall, lanes=lanes, combine=Combine.TREE)
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
    """Whether a loop only accumulates from nothing, and perhaps stores what it adds.

    Its rows do not meet in what they store.
    """
    assert isinstance(loop, For)
    inner = nested(loop)[1]
    stores = [s for s in inner if isinstance(s, Store)]
    plain = tuple(s for s in inner if not isinstance(s, Store))
    starts = {s.local: s.value for s in before if isinstance(s, Let)}
    if not is_sum(replace(loop, body=plain)):
        return False
    for s in (s for s in plain if isinstance(s, Accumulate)):
        start = starts.get(s.local)
        if not isinstance(start, Literal) or start.value != identity(s.op, s.value.dtype):
            return False
    summed = {s.local for s in plain if isinstance(s, Accumulate)}
    if any(s.guard or summed & locals_in(s.value) for s in stores):
        return False
    rows = [s for s in walk([loop]) if isinstance(s, For)]
    return not stores or not any(conflicts_in(row) for row in rows)


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
