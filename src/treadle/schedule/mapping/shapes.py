"""How a kernel is spread over threads: which loops are the grid, and who runs the rest.

The grid is the parallel loops around everything. One of its iterations is a thread's, or it is
shared by a warp or a block, whose threads share the loops inside it. The choice depends on the
kernel alone, so that results do not depend on the device.

Sums of columns: neighbouring threads take neighbouring columns, and share each column's rows. A
column's threads are one in each warp of the block, whose parts are added in order; or fewer, in
rows of threads beside each other, whose parts are added as a tree. A kernel may have several such
sums, one after the other; what is stored between them waits for the end, as other threads may
still read what it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treadle.kernel.access import accesses, loads_of, locals_in
from treadle.kernel.contraction import size
from treadle.kernel.cost import flops, padded
from treadle.kernel.geometry import Combine
from treadle.kernel.index import Var, uses, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    For,
    Kernel,
    Let,
    Role,
    Set,
    Statement,
    Store,
    Update,
)
from treadle.kernel.packs import is_pack, lane_step, lanes_for
from treadle.kernel.races import conflicts_in
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import peel, substituted, walk
from treadle.schedule.nests import (
    Body,
    divisors,
    is_cleared,
    is_scan,
    is_sum,
    moves,
    nested,
    parallel,
)


@dataclass(frozen=True)
class Shape:
    """A kernel's grid, how many threads share an iteration of it, and how wide accesses are."""

    lets: Body  # before everything
    grid: tuple[Var, ...]
    body: Body
    share: int  # threads of an iteration
    threads: int  # of a block
    lanes: int = 1  # iterations that one thread takes at once, along the last variable
    combine: Combine = Combine.EXCHANGE

    @property
    def count(self) -> int:
        return size(self.grid)

    @property
    def launched(self) -> int:
        """Threads of all blocks."""
        groups = self.threads // self.share
        return -(-(self.count // self.lanes) // groups) * self.threads


def shape_of(kernel: Kernel, mapping: Mapping, is_aligned: bool, threads: int = 0) -> Shape:
    """How a kernel is spread; over blocks of as many threads as asked for, if that is said."""
    lets, grid, body = peeled(kernel)
    inner = [s for s in body if isinstance(s, For)]
    count = size(grid)
    flat = Shape(lets, grid, body, 1, mapping.threads)
    if any(is_serial(s) for s in inner) or not any(is_shared(s) for s in inner):
        is_small = sum(b.nbytes for b in kernel.scratch) <= mapping.private
        if is_small or any(is_serial(s) for s in inner):
            return _with_lanes(kernel, flat, mapping, is_aligned)
    if not kernel.scratch and _is_better_flat(grid, inner, count, mapping):
        return _with_lanes(kernel, flat, mapping, is_aligned)
    if threads:
        is_light = flops(kernel) <= mapping.warp_work * count
        share = _in_warp(kernel, body, count, mapping, is_aligned) if is_light else threads
        return Shape(lets, grid, body, share, threads)
    longest = max((extent_of(s) for s in _shared(body)), default=1)
    many = mapping.many_products if _is_product(inner) else mapping.many_rows
    share = _share(longest, count, many, mapping)
    if share > mapping.exchanging:
        return Shape(lets, grid, body, share, share)
    share = _in_warp(kernel, body, count, mapping, is_aligned)
    return Shape(lets, grid, body, share, _warp_threads(kernel, share, mapping))


def _warp_threads(kernel: Kernel, share: int, mapping: Mapping) -> int:
    """Threads of a block whose warps work apart: fewer where their memory would have no room."""
    each, threads = sum(padded(b.nbytes) for b in kernel.scratch), mapping.warp_threads
    while threads > share and threads // share * each > mapping.shared_limit:
        threads //= 2
    return threads


def _is_product(inner: Sequence[For]) -> bool:
    """Whether a row is walked once, to sum products: a token's with weights."""
    sums = [s for loop in inner for s in loop.body if isinstance(s, Accumulate)]
    products = [s.value.op == "mul" for s in sums if isinstance(s.value, Apply)]
    return len(inner) == 1 and len(products) == len(sums) > 0 and all(products)


def _share(longest: int, count: int, many: int, mapping: Mapping) -> int:
    """A warp for short rows where there are many; otherwise a block that fits the row."""
    is_short = longest <= mapping.warp_row and count >= many
    if longest <= 2 * mapping.warp or is_short:
        return mapping.warp
    is_many = count >= mapping.many
    wanted = longest // (4 if is_many else 2)
    most = mapping.few_threads if is_many else mapping.most_threads
    return min(most, max(2 * mapping.warp, 1 << (wanted - 1).bit_length()))


def _in_warp(kernel: Kernel, body: Body, count: int, mapping: Mapping, is_aligned: bool) -> int:
    """Threads of a warp that share an iteration: no more than a row has packs, where rows are many.

    The groups of a warp go the same way: no loop ends where data says, and the last warp has as
    many as the others. Threads that have left would be waited for where the others exchange.
    """
    share, loops = mapping.warp, list(_shared(body))
    is_large = sum(b.nbytes for b in kernel.scratch) > mapping.private
    if is_large or any(isinstance(s, For) and s.stop is not None for s in walk(body)):
        return share
    packs = max((_packs(kernel, s, mapping, is_aligned) for s in loops), default=share)
    while share > max(2, packs) and count * share // 2 >= mapping.busy:
        if count % (2 * mapping.warp // share):
            break
        share //= 2
    return share


def _packs(kernel: Kernel, loop: For, mapping: Mapping, is_aligned: bool) -> int:
    """How many threads a loop keeps busy that load no more than a pack at once."""
    loops, inner = nested(loop)
    lanes = lanes_for(kernel, loops[-1], inner, mapping) if is_aligned else 1
    sizes = {b.name: b.dtype.itemsize for b in (*kernel.buffers, *kernel.scratch)}
    near = [a for a in accesses(inner) if lane_step(a.index, loops[-1], 1)[0] == 1]
    widest = max((sizes[a.buffer] for a in near), default=mapping.pack)
    return -(-size(loops) // min(lanes, mapping.pack // widest))


def peeled(kernel: Kernel) -> tuple[Body, tuple[Var, ...], Body]:
    """Values named first, the parallel loops around everything else, and what is inside.

    With scratch only the outermost loop: scratch belongs to an iteration of that one.
    """
    body, count = kernel.body, _named_first(kernel.body)
    most = 1 if kernel.scratch else None
    loops, inner = peel(body[count:], Role.PARALLEL, Role.VECTOR, most=most)
    if not loops:
        return (), (), body
    return body[:count], tuple(s.var for s in loops), inner


def _named_first(body: Body) -> int:
    """How many statements name values before the last one."""
    count = 0
    while count < len(body) - 1 and isinstance(body[count], Let):
        count += 1
    return count


def with_short_rows(kernel: Kernel, mapping: Mapping) -> Kernel:
    """The kernel with what a short row has in common named by each element of it.

    A row of fewer elements than two warps would leave threads idle; elements are a thread's each.
    """
    loops, body = peel(kernel.body, Role.PARALLEL)
    count = _named_first(body)
    if kernel.scratch or not loops or not count or not is_parallel(body[-1]):
        return kernel
    row = body[-1]
    assert isinstance(row, For)
    variables, inner = nested(row)
    is_plain = count == len(body) - 1 and all(isinstance(s, (Let, Store)) for s in inner)
    if not is_plain or size(variables) >= 2 * mapping.warp:
        return kernel
    whole = parallel([loop.var for loop in loops] + variables, (*body[:count], *inner))
    return replace(kernel, body=whole)


def is_parallel(statement: Statement) -> bool:
    return (
        isinstance(statement, For)
        and statement.role in (Role.PARALLEL, Role.VECTOR)
        and statement.stop is None
    )


def is_shared(statement: Statement) -> bool:
    """Whether a group's threads can share a loop, or loops inside it."""
    return any(_can_share(s) for s in walk([statement]))


def _can_share(statement: Statement) -> bool:
    return is_parallel(statement) or is_sum(statement) or is_scan(statement)


def is_serial(statement: Statement) -> bool:
    """Whether a loop must be run in order, and nothing in it can be shared."""
    entered = walk([statement], lambda loop: not _can_share(loop))
    loops = [s for s in entered if isinstance(s, For) and not _can_share(s)]
    return any(
        not any(map(is_shared, loop.body)) or any(isinstance(s, (Set, Update)) for s in loop.body)
        for loop in loops
    )


def _shared(body: Sequence[Statement]) -> Iterator[For]:
    every = walk(body, lambda loop: not _can_share(loop))
    return (s for s in every if isinstance(s, For) and _can_share(s))


def extent_of(loop: For) -> int:
    return size(nested(loop)[0])


def _is_better_flat(
    grid: Sequence[Var], inner: Sequence[For], count: int, mapping: Mapping
) -> bool:
    """Whether threads that sum by themselves do better: few terms, or neighbours read together."""
    are_sums = all(is_sum(s) for s in inner)
    longest = max(map(extent_of, inner), default=0)
    if any(map(is_scan, inner)):
        is_few = longest <= mapping.short and count >= mapping.busy
        return bool(grid) and (is_few or lies_across(grid, inner))
    is_few = 0 < longest <= (mapping.short if are_sums else mapping.short_loop)
    if is_few and count >= mapping.busy and not _are_rows(grid, inner, longest, mapping):
        return True
    if not inner or not are_sums:
        return False
    if not grid or count < mapping.beside:
        return False
    return lies_across(grid, inner) and grid[-1].extent >= mapping.warp


def lies_across(grid: Sequence[Var], inner: Sequence[For]) -> bool:
    """Whether neighbours of what is summed belong to other sums.

    If some tensors lie so and as many do not, threads beside each other sum by themselves: what
    lies along a sum is near when the next term is read.
    """
    last = grid[-1]
    loads = [x for s in inner for t in nested(s)[1] for x in loads_of(t)]
    summed = [nested(s)[0][-1] for s in inner]
    both = [x.index for x in loads if x.index.factor_of(last) != 0]
    both = [i for i in both if any(i.factor_of(v) != 0 for v in summed)]  # what is large
    across = sum(lane_step(i, last, 1)[0] == 1 for i in both)
    along = sum(lane_step(i, v, 1)[0] == 1 for i in both for v in summed)
    return across >= max(1, along)


def _are_rows(grid: Sequence[Var], inner: Sequence[For], longest: int, mapping: Mapping) -> bool:
    """Whether what a loop touches lies side by side, and each iteration of the grid has its own.

    Threads that walk such rows alone would not read beside each other.
    """
    if longest < mapping.short_loop or lies_across(grid, inner):
        return False
    for loops, body in map(nested, inner):
        touched = [a.index for a in accesses(body)]
        rows = [i for i in touched if not all(uses(atom, loops[-1]) for atom, _ in i.terms)]
        if any(lane_step(i, loops[-1], 1)[0] == 1 for i in rows):
            return True
    return False


def _with_lanes(kernel: Kernel, flat: Shape, mapping: Mapping, is_aligned: bool) -> Shape:
    if not flat.grid or not is_aligned or kernel.scratch:
        return flat
    lanes = lanes_for(kernel, flat.grid[-1], flat.body, mapping)
    # A thread that goes through iterations of a scan waits for memory in each of them.
    is_scan = any(isinstance(s, For) and s.unroll > 1 for s in flat.body)
    least = mapping.scan_threads if is_scan else mapping.busy // 2
    while lanes > 1 and flat.count // lanes < least:
        lanes //= 2
    return _by_tiles(kernel, replace(flat, lanes=lanes), mapping)


def _by_tiles(kernel: Kernel, shape: Shape, mapping: Mapping) -> Shape:
    """Threads beside each other on tiles, where tensors lie along two axes.

    Threads of a warp are as many along the last axis as memory moves at once, and then along the
    axis along which the other tensors lie: neither is fetched or stored in pieces.
    """
    *outer, last = shape.grid
    if not outer:
        return shape
    every, sizes = list(accesses(shape.body)), {b.name: b.size for b in kernel.buffers}
    large = [a for a in every if 2 * sizes.get(a.buffer, 0) >= shape.count]
    lie = {v: [a for a in large if lane_step(a.index, v, 1)[0] == 1] for v in shape.grid}
    across = max(outer, key=lambda v: len(lie[v]))
    if not lie[last] or not lie[across] or across.extent < mapping.least_across:
        return shape
    width = min(b.dtype.itemsize for b in kernel.buffers if b.name in {a.buffer for a in lie[last]})
    packs = max(1, mapping.sector // (width * shape.lanes))
    near = _cut(last, packs * shape.lanes, shape.lanes)
    if near is None or near[0].extent == 1:
        return shape
    beside = _cut(across, mapping.across, 1) or (Var(f"{across.name}s", 1), across)
    values = {
        v: variable(a) * b.extent + variable(b) for v, (a, b) in ((last, near), (across, beside))
    }
    grid = (*(v for v in outer if v != across), beside[0], near[0], beside[1], near[1])
    grid = tuple(v for v in grid if v.extent > 1)
    return replace(shape, grid=grid, body=substituted(shape.body, values))


def _cut(var: Var, least: int, pack: int) -> tuple[Var, Var] | None:
    """A loop as one over parts and one inside of whole packs, not much longer than wanted."""
    found = [n for n in divisors(var.extent) if least <= n <= 4 * least and n % pack == 0]
    if not found:
        return None
    return Var(f"{var.name}s", var.extent // found[0]), Var(f"{var.name}t", found[0])


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
    large = [a.index for a in accesses(statements) if any(moves(a.index, v) for v in loops)]
    last = one.grid[-1]
    across = [is_pack(i, last, one.lanes) for i in large if moves(i, last)]
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
    sums = [s for s in plain if isinstance(s, Accumulate)]
    if not is_sum(replace(loop, body=plain)) or not all(is_cleared(before, s) for s in sums):
        return False
    summed = {s.local for s in sums}
    if any(s.guard or summed & locals_in(s.value) for s in stores):
        return False
    rows = [s for s in walk([loop]) if isinstance(s, For)]
    return not stores or not any(conflicts_in(row) for row in rows)


def _stores_last(body: Body) -> Body:
    """Stores between the sums after all of them."""
    last = max(i for i, s in enumerate(body) if isinstance(s, For)) + 1
    early = [s for s in body[:last] if isinstance(s, Store)]
    return (*(s for s in body[:last] if not isinstance(s, Store)), *early, *body[last:])


def reads_ahead(loop: For) -> bool:
    """Whether a sum reads one tensor only: then several rows of it can be on their way at once."""
    loops, inner = nested(loop)
    read = {x for s in inner for x in loads_of(s)}
    return len({x for x in read if any(moves(x.index, v) for v in loops)}) == 1
