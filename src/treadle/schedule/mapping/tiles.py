"""The tiles in which blocks compute a contraction, by counting what a multiprocessor must do.

A kernel that sums products of two operands, each along loops that the other does not have, reads
every element many times: a block holds panels of both in shared memory. The depth is shared out
among neighbours in a warp, so that small results keep many threads busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle.kernel.geometry import Geometry, Panel, Tiled
from treadle.kernel.index import Var
from treadle.kernel.nodes import (
    Kernel,
    Load,
    Role,
)
from treadle.kernel.packs import is_pack
from treadle.kernel.target import Mapping
from treadle.schedule.mapping.contractions import Contraction
from treadle.schedule.mapping.groups import in_order, nest

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

    def depth(self, found: Contraction, limit: int) -> int:
        """How much of the depth a block holds at a time; 0 where the tile is too large for any."""
        whole = -(-found.sizes[-1] // self.shares) * self.shares  # the rest is zeros
        for depth in (whole, *range(whole // 32 * 32, 0, -32)):
            if self.held(found, depth) * found.wide.itemsize <= limit:
                return depth
        return 0

    def held(self, found: Contraction, depth: int) -> int:
        """Numbers of both operands in shared memory."""
        lengths = self.rows, self.columns
        sides = zip((found.left, found.right), lengths, strict=True)
        return sum(
            _step(is_along, n, depth, self.shares) * (n if is_along else depth)
            for is_along, n in ((_lies_along(load, found.depth), n) for load, n in sides)
        )


def _lies_along(load: Load, depth: tuple[Var, ...]) -> bool:
    """Whether an operand's elements along the depth lie next to each other."""
    return load.index.factor_of(depth[-1]) == 1


def _step(is_along: bool, length: int, depth: int, shares: int) -> int:
    """From one row of a panel to the next.

    Neighbours that share a depth read other banks: one after the other along the depth, or packs of
    rows, of which eight lanes read at a time.
    """
    if is_along:
        pad, length = max(4, shares) % BANKS, depth
    else:
        pad = 0 if shares == 1 else max(4, BANKS // shares)
    return length + (pad - length) % BANKS


def best_tile(found: Contraction, packs: bool, mapping: Mapping, blocks: int) -> Tile:
    """The tile that should take the least time."""
    limit = min(mapping.tile_bytes, mapping.shared_limit)
    best: tuple[float, Tile] | None = None
    for tile in _tiles(found, packs, mapping):
        if tile.depth(found, limit):
            cost = _cycles(tile, found, blocks, mapping.threads)
            if best is None or cost < best[0]:
                best = cost, tile
    assert best is not None
    return best[1]


def _tiles(found: Contraction, packs: bool, mapping: Mapping) -> Iterator[Tile]:
    _, m, n, _ = found.sizes
    own = [2**i for i in range(mapping.tile_thread.bit_length())]
    for shares in (2**i for i in range(mapping.warp.bit_length())):
        groups = mapping.threads // shares
        for down in own:
            for across in own if packs else (1,):
                if found.columns[-1].extent % across:
                    continue
                for tall in (2**i for i in range(groups.bit_length())):
                    tile = Tile(down * tall, across * (groups // tall), down, across, shares)
                    if tile.rows < 2 * m + down and tile.columns < 2 * n + across:
                        yield tile


def _cycles(tile: Tile, found: Contraction, blocks: int, threads: int) -> float:
    (batch, m, n, k), size = found.sizes, found.wide.itemsize
    waves = -(-tile.blocks(batch, m, n) // blocks)
    held = min(tile.rows, m) + min(tile.columns, n)
    load = held * k * size / 24  # bytes that one multiprocessor gets in a cycle
    reads, adds = tile.down + tile.across, tile.down * tile.across / 4
    inner = k / tile.shares * threads / 32 * max(reads, adds) * (size / 4)
    folds = tile.down * tile.across * math.log2(tile.shares) * threads / 16
    after = 250 * -(-tile.down // tile.shares)
    return waves * (500 + load + inner + folds + after)


def map_contraction(
    kernel: Kernel, found: Contraction, mapping: Mapping, is_aligned: bool, blocks: int
) -> Kernel:
    """The kernel with its tile; its loops say what is computed."""
    tile = best_tile(found, is_aligned, mapping, blocks)
    depth = tile.depth(found, min(mapping.tile_bytes, mapping.shared_limit))
    pack = mapping.pack if is_aligned else 1
    left = _panel(found.left, found.rows, tile.rows, found, tile, depth, pack)
    right = _panel(found.right, found.columns, tile.columns, found, tile, depth, pack)
    # Copies of both panels are under way at once, where a thread has registers for them.
    left, right = (_in_batches(p, found, depth, mapping.threads) for p in (left, right))
    held = left.batch * left.lanes + right.batch * right.lanes
    is_whole = held <= mapping.in_flight
    if not is_whole:
        most = (max(1, mapping.in_flight // p.lanes) for p in (left, right))
        left, right = (replace(p, batch=n) for p, n in zip((left, right), most, strict=True))
    unroll = max(1, min(mapping.tile_unroll, depth // tile.shares))
    template = Tiled(
        found.batch, found.rows, found.columns, found.depth, found.is_swapped,
        depth, tile.down, tile.across, tile.shares, left, right, is_whole, unroll,
    )  # fmt: skip
    body = (*found.lets, *nest(found.grid, Role.GRID, in_order(found.body)))
    geometry = Geometry(mapping.threads, 1, mapping.warp, template=template)
    return replace(kernel, body=body, geometry=geometry)


def _panel(
    load: Load,
    loops: tuple[Var, ...],
    length: int,
    found: Contraction,
    tile: Tile,
    depth: int,
    pack: int,
) -> Panel:
    """How a block holds one operand: along the depth where that lies together, or across it."""
    is_along = _lies_along(load, found.depth)
    along = found.depth[-1] if is_along else loops[-1]
    count = min(depth, found.sizes[-1]) if is_along else length
    lanes = 1
    while 2 * lanes * load.dtype.itemsize <= pack:
        wide = 2 * lanes
        if along.extent % wide or count % wide or not is_pack(load.index, along, wide):
            break
        lanes = wide
    return Panel(is_along, length, _step(is_along, length, depth, tile.shares), lanes, 0)


def _in_batches(panel: Panel, found: Contraction, depth: int, threads: int) -> Panel:
    """The panel with as many copies under way as each thread makes."""
    packs = panel.length * min(depth, found.sizes[-1]) // panel.lanes
    return replace(panel, batch=-(-packs // threads))
