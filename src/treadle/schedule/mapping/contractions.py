"""Contractions as tiles that blocks compute, whatever follows each element of the result.

A kernel that sums products of two operands, each along loops that the other does not have, reads
every element many times: a block holds panels of both in shared memory. The depth is shared out
among neighbours in a warp, so that small results keep many threads busy. Tiles are chosen by
counting what a multiprocessor must do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.kernel.access import accesses
from treadle.kernel.contraction import Axes, Contraction, Operand, oriented, size
from treadle.kernel.geometry import Geometry, Panel, Tiled
from treadle.kernel.index import (
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    constant,
    variable,
)
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matrix,
    Role,
    Set,
    Store,
    Value,
    standalone_matmul,
)
from treadle.kernel.packs import is_pack
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import substituted
from treadle.schedule.mapping.groups import in_order, nest
from treadle.schedule.mapping.shapes import peeled
from treadle.schedule.nests import (
    Body,
    apply,
    as_dtype,
    flat_index,
    is_cleared,
    is_sum,
    moves,
    nested,
)


def as_loops(kernel: Kernel) -> Kernel:
    """The kernel of a matmul with its sums written out, in the dtype that it sums in."""
    found = standalone_matmul(kernel)
    assert found is not None, f"{kernel.name} is no matmul"
    batch, matmul = found
    types = {b.name: b.dtype for b in kernel.buffers}
    into = types[matmul.target.buffer]
    wide = dtypes.float32 if into.is_narrow else into
    row = Var("row", matmul.target.rows.count)
    column = Var("column", matmul.target.columns.count)
    depth = Var("depth", matmul.left.columns.count)

    def read(buffer: str, index: Index) -> Value:
        return as_dtype(Load(buffer, index, types[buffer]), wide)

    left = read(matmul.left.buffer, _index(matmul.left, row, depth))
    right = read(matmul.right.buffer, _index(matmul.right, depth, column))
    step = Accumulate("sum", "add", apply("mul", left, right))
    at = _index(matmul.target, row, column)
    total: Value = Local("sum", wide)
    for name, element in matmul.scales:
        total = apply("mul", total, read(name, constant(element)))
    if matmul.bias is not None:
        total = apply("add", total, read(matmul.bias, variable(column)))
    if matmul.adds:
        total = apply("add", read(matmul.target.buffer, at), total)
    body = [
        Let("sum", Literal(0, wide)),
        *nest([depth], Role.SEQUENTIAL, [step]),
        Store(matmul.target.buffer, at, as_dtype(total, into)),
    ]
    loops = nest([*batch, row, column], Role.PARALLEL, body)
    return replace(kernel, body=loops, is_standalone=False)


def _index(matrix: Matrix, row: Var, column: Var) -> Index:
    assert not matrix.rows.listed + matrix.columns.listed, "a GPU's matrices have strides"
    down, across = variable(row) * matrix.rows.stride, variable(column) * matrix.columns.stride
    return matrix.index + down + across


@dataclass(frozen=True, slots=True)
class Contracting:
    """A kernel that contracts two loads: values named first, and an iteration of its loops."""

    lets: Body
    body: Body
    axes: Contraction[Load]  # of which the result are the kernel's loops
    is_swapped: bool  # the second factor is the left operand
    wide: DType

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        c = self.axes
        return size(c.batch), size(c.rows), size(c.columns), size(c.depth)


def contraction_of(kernel: Kernel, mapping: Mapping) -> Contracting | None:
    """The contraction that a kernel is; None where it is none, or too small to hold in tiles."""
    if kernel.scratch:
        return None
    lets, grid, body = peeled(kernel)
    if len(grid) == 1:
        grid, body = _split(grid[0], body)
    loops = [i for i, s in enumerate(body) if isinstance(s, For)]
    if not grid or len(loops) != 1:
        return None
    loop, before, after = body[loops[0]], body[: loops[0]], body[loops[0] + 1 :]
    assert isinstance(loop, For)
    if not is_sum(loop) or not all(isinstance(s, (Let, Set, Store)) for s in after):
        return None
    depth, inner = nested(loop)
    step = inner[0]
    if len(inner) != 1 or not isinstance(step, Accumulate):
        return None
    factors = _factors(step, before)
    if factors is None:
        return None
    # Columns are along the last loop: results lie together.
    is_swapped = not moves(factors[1].index, grid[-1])
    every = (*grid, *depth)
    operands = [Operand(f, tuple(v for v in every if moves(f.index, v)), f) for f in factors]
    left, right = operands[::-1] if is_swapped else operands
    left = replace(left, axes=(*(v for v in left.axes if v in grid), *depth))
    found = Contracting(lets, body, oriented(left, right, grid), is_swapped, step.value.dtype)
    has_sides = found.axes.rows and grid[-1] in found.axes.columns
    return found if has_sides and _is_worth(found, mapping) else None


def _is_worth(found: Contracting, mapping: Mapping) -> bool:
    batch, m, n, k = found.sizes
    is_large = batch * m * n * k >= mapping.least_work
    return is_large and k >= mapping.least_depth and min(m, n) >= mapping.least_side


def _factors(step: Accumulate, before: Body) -> tuple[Load, Load] | None:
    """The two factors that are summed up from nothing."""
    product = step.value
    if len(before) != 1 or not is_cleared(before, step) or step.op != "add":
        return None
    if not isinstance(product, Apply) or product.op != "mul":
        return None
    if not product.dtype.is_float or product.dtype.is_narrow:
        return None
    first, second = map(load_of, product.operands)
    return None if first is None or second is None else (first, second)


def _split(var: Var, body: Body) -> tuple[tuple[Var, ...], Body]:
    """One loop as the several that its quotients and remainders speak of."""
    divisors = sorted({d for a in accesses(body) for d in _divisors(a.index, var)}, reverse=True)
    extents, left = list[int](), var.extent
    for d in divisors:
        if left % d or var.extent % d:
            return (var,), body
        extents.append(left // d)
        left = d
    if not divisors:
        return (var,), body
    parts = tuple(Var(f"{var.name}.{i}", n) for i, n in enumerate([*extents, left]))
    whole = flat_index(parts)
    return parts, substituted(body, {var: whole})


def _divisors(index: Index, var: Var) -> Iterator[int]:
    for atom, _ in index.terms:
        if isinstance(atom, (Quotient, Remainder)):
            if atom.index == variable(var):
                yield atom.divisor
            else:
                yield from _divisors(atom.index, var)


def load_of(value: Value) -> Load | None:
    """The load that an operand is, before it is converted; None where it is something else."""
    inner = value.value if isinstance(value, Convert) else value
    is_load = isinstance(inner, Load) and not any(isinstance(a, Data) for a, _ in inner.index.terms)
    return inner if isinstance(inner, Load) and is_load else None


BANKS = 32  # of shared memory, of four bytes each


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a block and of a thread, and threads that share an element's depth."""

    rows: int
    columns: int
    down: int
    across: int
    shares: int

    def blocks(self, batch: int, m: int, n: int) -> int:
        return batch * -(-m // self.rows) * -(-n // self.columns)

    def depth(self, found: Contracting, mapping: Mapping) -> int:
        """How much of the depth a block holds at a time; 0 where the tile is too large for any."""
        limit, step = min(mapping.tile_bytes, mapping.shared_limit), mapping.tile_step
        taken = self.shares * mapping.tile_steps  # by all that share an element, at once
        step = max(step, taken)
        whole = -(-found.sizes[-1] // taken) * taken  # the rest is zeros
        most = min(whole, limit // (found.wide.itemsize * (self.rows + self.columns)))  # unpadded
        for depth in (*([whole] if whole == most else []), *range(most // step * step, 0, -step)):
            if self.held(found, depth, mapping) * found.wide.itemsize <= limit:
                return depth
        return 0

    def held(self, found: Contracting, depth: int, mapping: Mapping) -> int:
        """Numbers of both operands in shared memory."""
        c, total = found.axes, 0
        for operand, n in ((c.left, self.rows), (c.right, self.columns)):
            is_along = lies_along(operand, c.depth)
            step = _step(is_along, n, depth, self.shares, mapping)
            total += step * (n if is_along else depth)
        return total


def lies_along(operand: Operand[Load], depth: Axes) -> bool:
    """Whether an operand's elements along the depth lie next to each other."""
    return operand.stride(depth[-1]) == 1


def _step(is_along: bool, length: int, depth: int, shares: int, mapping: Mapping) -> int:
    """From one row of a panel to the next.

    Neighbours that share a depth read other banks: one after the other along the depth, or packs of
    rows, of which eight lanes read at a time.
    """
    pack = mapping.pack // 4
    if is_along:
        pad, length = max(pack, shares * mapping.tile_steps) % BANKS, depth
    else:
        pad = 0 if shares == 1 else max(pack, BANKS // shares // mapping.tile_steps)
    return length + (pad - length) % BANKS


def best_tile(found: Contracting, packs: bool, mapping: Mapping, blocks: int) -> Tile | None:
    """The tile that should take the least time; None where none has work for all threads."""
    best: tuple[float, Tile] | None = None
    for tile in _tiles(found, packs, mapping):
        if tile.depth(found, mapping):
            cost = _cycles(tile, found, blocks, mapping)
            if best is None or cost < best[0]:
                best = cost, tile
    return best[1] if best is not None else None


def _tiles(found: Contracting, packs: bool, mapping: Mapping) -> Iterator[Tile]:
    _, m, n, _ = found.sizes
    own = [2**i for i in range(mapping.tile_thread.bit_length())]
    for shares in (2**i for i in range(mapping.exchanging.bit_length())):
        groups = mapping.threads // shares
        for down in own:
            for across in own if packs else (1,):
                if found.axes.columns[-1].extent % across:
                    continue
                for tall in (2**i for i in range(groups.bit_length())):
                    tile = Tile(down * tall, across * (groups // tall), down, across, shares)
                    if tile.rows < 2 * m + down and tile.columns < 2 * n + across:
                        yield tile


def _reads(tile: Tile, found: Contracting, mapping: Mapping) -> float:
    """Cycles of a warp's reads of shared memory for a step of the depth."""
    c = found.axes
    own = (c.left, tile.down), (c.right, tile.across)
    is_packed = all(lies_along(x, c.depth) or n % mapping.tile_steps == 0 for x, n in own)
    if mapping.tile_steps == 1 or not is_packed:
        return tile.down + tile.across
    # Packs of 16 bytes: eight lanes at a time, and lanes that read the same count once.
    beside = min(mapping.warp, tile.columns // tile.across * tile.shares)
    below = mapping.warp // beside * tile.shares
    right, left = (max(1.0, lanes / 8) for lanes in (beside, below))
    return (tile.across * right + tile.down * left) / mapping.tile_steps


def _cycles(tile: Tile, found: Contracting, blocks: int, mapping: Mapping) -> float:
    threads = mapping.threads
    (batch, m, n, k), size = found.sizes, found.wide.itemsize
    waves = -(-tile.blocks(batch, m, n) // blocks)
    held = min(tile.rows, m) + min(tile.columns, n)
    load = held * k * size / 24  # bytes that one multiprocessor gets in a cycle
    reads, adds = _reads(tile, found, mapping), tile.down * tile.across / 4
    inner = k / tile.shares * threads / 32 * max(reads, adds) * (size / 4)
    folds = tile.down * tile.across * math.log2(tile.shares) * threads / 16
    after = 250 * -(-tile.down // tile.shares)
    return waves * (500 + load + inner + folds + after)


def map_contraction(
    kernel: Kernel, found: Contracting, mapping: Mapping, is_aligned: bool, blocks: int
) -> Kernel | None:
    """The kernel with its tile; its loops say what is computed. None where no tile will do."""
    tile = best_tile(found, is_aligned, mapping, blocks)
    if tile is None:
        return None
    depth = tile.depth(found, mapping)
    c, copies = found.axes, _Copies(found, tile, depth, mapping, is_aligned)
    left = copies.panel(c.left, c.rows, tile.rows)
    right = copies.panel(c.right, c.columns, tile.columns)
    # Copies of both panels are under way at once, where a thread has registers for them.
    held = left.batch * left.lanes + right.batch * right.lanes
    is_whole = held <= mapping.in_flight
    if not is_whole:
        most = (max(1, mapping.in_flight // p.lanes) for p in (left, right))
        left, right = (replace(p, batch=n) for p, n in zip((left, right), most, strict=True))
    unroll = max(1, min(mapping.tile_unroll, depth // tile.shares))
    template = Tiled(
        c.batch, c.rows, c.columns, c.depth, found.is_swapped,
        depth, tile.down, tile.across, tile.shares, left, right, is_whole, unroll,
    )  # fmt: skip
    if mapping.lanes == 1:
        template = by_words(template, mapping.threads)
    body = (*found.lets, *nest(c.result, Role.GRID, in_order(found.body)))
    geometry = Geometry(mapping.threads, 1, mapping.warp, template=template)
    return replace(kernel, body=body, geometry=geometry)


FEW = 4  # copies under way at a time, where the index of each takes many operations


def by_words(tile: Tiled, threads: int) -> Tiled:
    """Panels that threads copy word by word, and read by fours where they lie so."""
    depth = tile.tile_depth

    def copied(panel: Panel, loops: Axes) -> Panel:
        is_simple = len(loops) + len(tile.depth) == 2
        words = panel if tile.matrices else replace(panel, lanes=1)
        most = panel.batch * panel.lanes // words.lanes
        return replace(words, batch=min(most if is_simple else FEW, words.copies(depth, threads)))

    def is_by_fours(panel: Panel, own: int) -> bool:
        return panel.step % 4 == 0 and (panel.is_along or own % 4 == 0)

    left, right = copied(tile.left, tile.rows), copied(tile.right, tile.columns)
    is_whole = all(p.batch == p.copies(depth, threads) for p in (left, right))
    by_fours = is_by_fours(left, tile.down) and is_by_fours(right, tile.across)
    return replace(
        tile,
        left=left,
        right=right,
        is_ahead=is_whole and tile.sizes[-1] > depth,
        by_fours=not tile.matrices and depth % (4 * tile.shares) == 0 and by_fours,
    )


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of a tile's operands into shared memory."""

    found: Contracting
    tile: Tile
    depth: int
    mapping: Mapping
    is_aligned: bool

    def panel(self, operand: Operand[Load], loops: Axes, length: int) -> Panel:
        """How a block holds an operand: along the depth where that lies together, or across it."""
        load, last = operand.value, self.found.axes.depth[-1]
        is_along = lies_along(operand, self.found.axes.depth)
        depth = min(self.depth, self.found.sizes[-1])
        along, count = (last, depth) if is_along else (loops[-1], length)
        pack = self.mapping.pack if self.is_aligned else 1
        lanes = 1
        while 2 * lanes * load.dtype.itemsize <= pack:
            wide = 2 * lanes
            if along.extent % wide or count % wide or not is_pack(load.index, along, wide):
                break
            lanes = wide
        step = _step(is_along, length, self.depth, self.tile.shares, self.mapping)
        batch = -(-(length * depth // lanes) // self.mapping.threads)
        return Panel(is_along, length, step, lanes, batch)
