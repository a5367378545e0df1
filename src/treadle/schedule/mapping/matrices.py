"""Contractions of float16 whose warps multiply matrices: tiles by what a multiprocessor must do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.kernel.contraction import Axes, Operand
from treadle.kernel.geometry import Geometry, Panel, Tiled
from treadle.kernel.nodes import For, Kernel, Load, Matmul, Role
from treadle.kernel.packs import is_pack
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import walk
from treadle.schedule.mapping.contractions import Contracting, Tile, by_words, lies_along
from treadle.schedule.mapping.groups import PACKED, in_order, nest

HALF, WORD = 2, 4  # bytes of an operand, and of a sum


@dataclass(frozen=True, slots=True)
class Rated:
    """A tile of a workgroup, and what it takes a multiprocessor of an H200.

    Fitted to what whole products of SmolLM2's sizes and of 4096 cubed took, in cycles of 1.755 GHz
    (docs/decisions.md). The last tile is for those who have little memory; its rate is rough.
    """

    rows: int
    columns: int
    down: int  # rows of a warp
    across: int  # columns of a warp
    depth: int
    rate: int  # products that are summed up in a cycle
    rate_across: int  # the same where rows of both operands lie across the depth
    around: int  # cycles before and after them


# In the order in which ties are decided.
TILES = (
    Rated(128, 256, 64, 64, 32, 656, 712, 5200), Rated(256, 128, 64, 64, 32, 623, 686, 4600),
    Rated(192, 192, 48, 64, 32, 727, 709, 8500), Rated(192, 192, 64, 48, 32, 725, 722, 9100),
    Rated(160, 256, 80, 64, 32, 778, 807, 10400), Rated(256, 160, 64, 80, 32, 702, 659, 9400),
    Rated(224, 192, 112, 48, 32, 639, 554, 5100), Rated(128, 128, 64, 32, 64, 615, 636, 4300),
    Rated(128, 96, 32, 48, 64, 483, 507, 1700), Rated(128, 64, 32, 32, 64, 364, 373, 800),
    Rated(64, 64, 32, 32, 64, 226, 236, 800), Rated(64, 64, 32, 32, 16, 60, 60, 1000),
)  # fmt: skip
MULTIPROCESSORS = 132  # that all of this was measured with


def warps_for(kernel: Kernel) -> int:
    """Warps of a group that multiplies matrices in its memory, a strip each; 0 where none does."""
    loops = [s for s in walk(kernel.body) if isinstance(s, For) and s.role is Role.PARALLEL]
    strips = {s.var.extent for s in loops if any(isinstance(x, Matmul) for x in s.body)}
    assert len(strips) <= 1, "blocks of a kernel have as many strips"
    return strips.pop() if strips else 0


def are_matrices(found: Contracting, mapping: Mapping) -> bool:
    """Whether both factors are float16, enough of them for the matrices of a warp."""
    factors = found.axes.left.value, found.axes.right.value
    is_narrow = all(f.dtype is dtypes.float16 for f in factors)
    is_large = mapping.matrices > 0 and min(found.sizes[1:]) >= mapping.matrices
    return is_narrow and found.wide is dtypes.float32 and is_large


def map_matrices(
    kernel: Kernel, found: Contracting, mapping: Mapping, is_aligned: bool, calls: int
) -> Kernel:
    """The kernel with the tile that should take the least time; launches have so many calls."""
    every = _tiled(found, mapping, is_aligned)
    best, _ = min(every, key=lambda pair: _cycles(pair[0], pair[1], calls))
    body = (*found.lets, *nest(found.axes.result, Role.GRID, in_order(found.body)))
    geometry = Geometry(_threads(best), 1, mapping.warp, template=best)
    return replace(kernel, body=body, geometry=geometry)


def _threads(tile: Tiled) -> int:
    return tile.left.length // tile.down * (tile.right.length // tile.across) * tile.shares


def _cycles(tile: Tiled, rated: Rated, calls: int) -> float:
    """Of all tiles, one after the other where there are more than multiprocessors."""
    is_along = tile.left.is_along or tile.right.is_along
    rate = rated.rate if is_along else rated.rate_across
    each = rated.rows * rated.columns * tile.sizes[-1] / rate + rated.around
    return -(-calls * tile.blocks // MULTIPROCESSORS) * each


def _tiled(found: Contracting, mapping: Mapping, is_aligned: bool) -> Iterator[tuple[Tiled, Rated]]:
    """Tiles that a workgroup has memory and threads for."""
    for rated in TILES:
        threads = rated.rows // rated.down * (rated.columns // rated.across) * mapping.warp
        edge = mapping.matrices
        depth = min(rated.depth, -(-found.sizes[-1] // edge) * edge)
        tile = _Made(found, mapping, is_aligned, threads, depth).tile(
            Tile(rated.rows, rated.columns, rated.down, rated.across, mapping.warp)
        )
        room = mapping.shared_limit - HALF * tile.elements
        warps, counts = threads // mapping.warp, _divisors(rated.across // mapping.matrices)
        each = WORD * warps * mapping.matrices  # bytes of a column of what all warps stage
        fitting = [n for n in counts if each * _staged(tile, n).stage_step <= room]
        if fitting and threads <= mapping.most_threads:
            yield _staged(tile, fitting[-1]), rated


def _staged(tile: Tiled, count: int) -> Tiled:
    return replace(tile, staged=count)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


@dataclass(frozen=True, slots=True)
class _Made:
    """Templates of a contraction for workgroups of so many threads."""

    found: Contracting
    mapping: Mapping
    is_aligned: bool
    threads: int
    depth: int

    def tile(self, tile: Tile) -> Tiled:
        c = self.found.axes
        left = self._panel(c.left, c.rows, tile.rows)
        right = self._panel(c.right, c.columns, tile.columns)
        template = Tiled(
            c.batch, c.rows, c.columns, c.depth, self.found.is_swapped,
            self.depth, tile.down, tile.across, tile.shares, left, right, False, 1,
            self.mapping.matrices,
        )  # fmt: skip
        # Tiles that follow each other share the larger operand's part, and the smaller operand
        # stays in the cache.
        _, m, n, _ = template.sizes
        return replace(by_words(template, self.threads), is_by_columns=m < n)

    def _panel(self, operand: Operand[Load], loops: Axes, length: int) -> Panel:
        depth = self.found.axes.depth
        is_along = lies_along(operand, depth)
        step, along = (self.depth, depth[-1]) if is_along else (length, loops[-1])
        packs = self.is_aligned and along.extent % PACKED == 0
        lanes = PACKED if packs and is_pack(operand.value.index, along, PACKED) else 1
        batch = -(-length * self.depth // (lanes * self.threads))
        # Rows are padded by 16 bytes, so that those of a matrix lie in other banks.
        step += 8
        return Panel(is_along, length, step, lanes, batch, _apart(self.depth, step, is_along))


BANKS = 128 // HALF  # elements that all banks of shared memory have at once


def _apart(depth: int, step: int, is_along: bool) -> int:
    """How far rows are apart that fill the banks together, where each fills half of them.

    Neighbouring rows, which are padded, would meet in some.
    """
    if not is_along or 2 * depth != BANKS:
        return 1
    return next(n for n in (1, 2, 4, 8) if n * step % BANKS == depth)
