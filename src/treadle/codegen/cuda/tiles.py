"""Small products as tiles of a block, with whatever follows each element in the same kernel.

A kernel that sums products of two operands, each along loops that the other does not walk, reads
every element many times: a block holds parts of both in shared memory. The depth is shared out
among neighbours in a warp, so that small results keep many threads busy.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.contractions import Contraction, load_of
from treadle.codegen.cuda.render import Writer
from treadle.codegen.cuda.shape import Shape, lane_step
from treadle.codegen.cuda.stages import Stages
from treadle.kernel.index import Var
from treadle.kernel.nodes import Kernel, Value

THREADS = 256
SHARED = 96 << 10  # bytes of both operands that a block holds at a time
MOST_HELD = 96  # numbers that a thread holds on their way to shared memory
BLOCKS = 128  # that run at a time
FEWEST = 8  # that a product gets beside larger ones


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

    def depth(self, found: Contraction) -> int:
        """How much of the depth a block holds at a time; 0 where the tile is too large for any."""
        whole = -(-found.sizes[-1] // self.shares) * self.shares  # the rest is zeros
        for depth in (whole, *range(whole // 32 * 32, 0, -32)):
            if self.held(found, depth) * found.wide.itemsize <= SHARED:
                return depth
        return 0

    def held(self, found: Contraction, depth: int) -> int:
        """Numbers of both operands in shared memory."""
        lengths = self.rows, self.columns
        sides = zip((found.left, found.right), lengths, strict=True)
        return sum(
            _step(is_along, n, depth, self.shares) * (n if is_along else depth)
            for is_along, n in ((_lies_along(value, found.depth), n) for value, n in sides)
        )


def _lies_along(value: Value, depth: tuple[Var, ...]) -> bool:
    """Whether an operand's elements along the depth lie next to each other."""
    return load_of(value).index.factor_of(depth[-1]) == 1


def _step(is_along: bool, length: int, depth: int, shares: int) -> int:
    """From one row of what is held to the next.

    Neighbours that share a depth read other banks: one after the other along the depth, or packs of
    rows, of which eight lanes read at a time.
    """
    if is_along:
        pad, length = max(4, shares) % 32, depth
    else:
        pad = 0 if shares == 1 else max(4, 32 // shares)
    return length + (pad - length) % 32


def share_of(work: int, total: int) -> int:
    """Blocks for a kernel beside others that run at the same time."""
    return BLOCKS if 8 * work >= 7 * total else max(FEWEST, BLOCKS * work // max(1, total))


def best_tile(found: Contraction, packs: bool, blocks: int = BLOCKS) -> Tile:
    """The tile that should take the least time, by counting what a multiprocessor must do."""
    _, m, n, _ = found.sizes
    best: tuple[float, Tile] | None = None
    for shares in (1, 2, 4, 8, 16, 32):
        groups = THREADS // shares
        for down in (1, 2, 4):
            for across in (1, 2, 4) if packs else (1,):
                if found.columns[-1].extent % across:
                    continue
                for tall in (2**i for i in range(groups.bit_length())):
                    tile = Tile(down * tall, across * (groups // tall), down, across, shares)
                    if tile.rows >= 2 * m + down or tile.columns >= 2 * n + across:
                        continue
                    if not tile.depth(found):
                        continue
                    cost = _cycles(tile, found, blocks)
                    if best is None or cost < best[0]:
                        best = cost, tile
    assert best is not None
    return best[1]


def _cycles(tile: Tile, found: Contraction, blocks: int) -> float:
    (batch, m, n, k), size = found.sizes, found.wide.itemsize
    waves = -(-tile.blocks(batch, m, n) // blocks)
    held = min(tile.rows, m) + min(tile.columns, n)
    load = held * k * size / 24  # bytes that one multiprocessor gets in a cycle
    reads, adds = tile.down + tile.across, tile.down * tile.across / 4
    inner = k / tile.shares * THREADS / 32 * max(reads, adds) * (size / 4)
    folds = tile.down * tile.across * math.log2(tile.shares) * THREADS / 16
    after = 250 * -(-tile.down // tile.shares)
    return waves * (500 + load + inner + folds + after)


class _Side:
    """How a block holds one operand: along the depth where that lies together, or along it."""

    def __init__(
        self,
        w: Writer,
        name: str,
        value: Value,
        loops: tuple[Var, ...],
        depth: tuple[Var, ...],
        held: tuple[int, int],
        wanted: tuple[int, bool],
    ):
        self.w, self.name, self.value, self.loops, self.depth_loops = w, name, value, loops, depth
        self.length, self.depth = held
        self.first = "first_row" if name == "lefts" else "first_column"
        self.count, self.whole = (math.prod(v.extent for v in vs) for vs in (loops, depth))
        shares, packs = wanted
        load = load_of(value)
        self.by_depth = _lies_along(value, depth)
        along = depth[-1] if self.by_depth else loops[-1]
        count = self.filled if self.by_depth else self.length
        self.lanes, most = 1, 16 // load.dtype.itemsize if packs else 1
        while self.lanes < most:
            wide = 2 * self.lanes
            if along.extent % wide or count % wide:
                break
            if lane_step(load.index, along, wide) != (1, True):
                break
            self.lanes = wide
        self.along = along
        self.step = _step(self.by_depth, self.length, self.depth, shares)

    @property
    def size(self) -> int:
        return self.step * (self.length if self.by_depth else self.depth)

    @property
    def turns(self) -> int:
        """How often each thread copies a pack until all of it is there."""
        return -(-self.size_of_packs // THREADS)

    @property
    def filled(self) -> int:
        """Places along the depth that there are, of one part of it."""
        return min(self.depth, self.whole)

    @property
    def size_of_packs(self) -> int:
        return self.length * self.filled // self.lanes

    def _each(self, begin: int, count: int) -> AbstractContextManager[None]:
        """A fixed number of turns, written out: loads of all of them are on their way at once."""
        w = self.w
        w.add("#pragma unroll")
        return w.block(f"for (int e = {begin}; e < {begin + count}; ++e)")

    def _place(self) -> list[str]:
        """Which pack this is, and the condition under which there is one."""
        w, fast = self.w, (self.filled if self.by_depth else self.length) // self.lanes
        w.add(f"const int q = threadIdx.x + e * {THREADS};")
        w.add(f"const int far = q / {fast}, near = q % {fast} * {self.lanes};")
        last = self.size_of_packs // THREADS
        return [f"(e < {last} || q < {self.size_of_packs})"] if self.size_of_packs % THREADS else []

    def load(self, begin: int, count: int) -> None:
        """Some packs of what the block needs, zeros where there is nothing."""
        w, v, got = self.w, self.lanes, f"{self.name}_{begin}"
        wide = scalars.register(self.value.dtype)
        before = dict(w.vars)
        w.add(f"{wide} {got}[{count}][{v}];")
        with self._each(begin, count):
            limits = self._place()
            i, d = ("far", "near") if self.by_depth else ("near", "far")
            w.add(f"const int at = {self.first} + {i}, turn = start + {d};")
            w.decode("at", self.loops)
            w.decode("turn", self.depth_loops)
            limits += [f"at < {self.count}"] if self.count % self.length else []
            limits += [f"turn < {self.whole}"] if self.whole % self.filled else []
            load = load_of(self.value)
            place = f"{w.places[load.buffer]} + {w.index(load.index)}"
            w.add(f"{scalars.register(load.dtype)} pack[{v}] = {{}};")
            w.add(f"if ({' && '.join(limits) or 'true'}) load<{v}>({place}, pack);")
            w.unrolled(f"{got}[e - {begin}][u] = ({wide})pack[u];", v)
        w.vars = before

    def store(self, begin: int, count: int) -> None:
        w, got = self.w, f"{self.name}_{begin}"
        with self._each(begin, count):
            limits = self._place()
            place = f"{self.name} + far * {self.step} + near"
            text = f"store<{self.lanes}>({place}, {got}[e - {begin}]);"
            w.add(f"if ({limits[0]}) {text}" if limits else text)

    def clear(self) -> None:
        """Zeros where the depth was made even."""
        more = self.depth - self.filled
        if more <= 0:
            return
        w = self.w
        with w.block(f"for (int q = threadIdx.x; q < {more * self.length}; q += {THREADS})"):
            far, near = (f"q / {more}", f"{self.filled} + q % {more}")
            if not self.by_depth:
                far, near = f"{self.filled} + q / {self.length}", f"q % {self.length}"
            w.add(f"{self.name}[({far}) * {self.step} + {near}] = 0;")

    def read(self, into: str, at: str, count: int) -> None:
        """A thread's elements at one place of the depth."""
        w = self.w
        if self.by_depth:
            w.unrolled(f"{into}[u] = {self.name}[({at} + u) * {self.step} + d];", count)
        else:
            w.add(f"load<{count}>({self.name} + d * {self.step} + {at}, {into});")


def tiled(
    kernel: Kernel, found: Contraction, is_aligned: bool, is_loose: bool, beside: int = BLOCKS
) -> tuple[list[str], Shape, int]:
    """Lines of the function, its shape, and the bytes of shared memory that a block needs."""
    batch, m, n, k = found.sizes
    tile = best_tile(found, is_aligned, beside)
    blocks = tile.blocks(batch, m, n)
    shape = Shape((), (Var("block", blocks),), (), THREADS, THREADS)
    w = Writer(kernel, shape, Stages(), is_aligned, is_loose)
    w.hoists, w.constant = True, set()
    size, wide = found.wide.itemsize, scalars.register(found.wide)
    depth = tile.depth(found)
    sides = [
        _Side(w, name, value, loops, found.depth, (length, depth), (tile.shares, is_aligned))
        for name, value, loops, length in (
            ("lefts", found.left, found.rows, tile.rows),
            ("rights", found.right, found.columns, tile.columns),
        )
    ]
    for s in found.lets:
        w.thread(s)
    tiles, across = blocks // batch, -(-n // tile.columns)
    w.add(f"const int tile = block % {tiles}, batch = block / {tiles};")
    w.decode("batch", found.batch)
    w.add(f"const int first_row = tile / {across} * {tile.rows};")
    w.add(f"const int first_column = tile % {across} * {tile.columns};")
    w.add("extern __shared__ __align__(16) unsigned char shared[];")
    w.add(f"{wide} *lefts = ({wide} *)shared, *rights = lefts + {-(-sides[0].size // 4) * 4};")
    w.add(f"{wide} sums[{tile.down}][{tile.across}] = {{}};")
    w.add(f"const int share = threadIdx.x % {tile.shares}, group = threadIdx.x / {tile.shares};")
    wide_groups = tile.columns // tile.across
    w.add(f"const int r = group / {wide_groups} * {tile.down};")
    w.add(f"const int c = group % {wide_groups} * {tile.across};")
    is_mine = _before(w, found, tile) if tile.down <= tile.shares else ""
    if depth < k:
        with w.block(f"for (int start = 0; start < {k}; start += {depth})"):
            _part(w, found, tile, sides, depth)
            w.add("__syncthreads();")
    else:
        w.add("const int start = 0;")
        _part(w, found, tile, sides, depth)
    _finish(w, found, tile, is_mine)
    shared = (-(-sides[0].size // 4) * 4 + sides[1].size) * size
    return w.lines, shape, shared


def _part(w: Writer, found: Contraction, tile: Tile, sides: list[_Side], depth: int) -> None:
    """A part of the depth: into shared memory, then each thread's share of it."""
    if sum(side.turns * side.lanes for side in sides) <= MOST_HELD:
        for side in sides:
            side.load(0, side.turns)
        for side in sides:
            side.store(0, side.turns)
    else:
        for side in sides:
            most = max(1, MOST_HELD // side.lanes)
            for begin in range(0, side.turns, most):
                count = min(most, side.turns - begin)
                side.load(begin, count)
                side.store(begin, count)
    for side in sides:
        side.clear()
    w.add("__syncthreads();")
    wide = scalars.register(found.wide)
    w.add(f"#pragma unroll {max(1, min(8, depth // tile.shares))}")
    with w.block(f"for (int e = 0; e < {depth // tile.shares}; ++e)"):
        w.add(f"const int d = share + e * {tile.shares};")
        w.add(f"{wide} a[{tile.down}], b[{tile.across}];")
        sides[0].read("a", "r", tile.down)
        sides[1].read("b", "c", tile.across)
        w.add("#pragma unroll")
        w.add(f"for (int i = 0; i < {tile.down}; ++i)")
        w.add("#pragma unroll")
        w.add(f"  for (int j = 0; j < {tile.across}; ++j)")
        w.add("    sums[i][j] = t_fma(a[i], b[j], sums[i][j]);")


def _place(w: Writer, found: Contraction, tile: Tile, turn: str) -> str:
    """Which row and columns of the result are a thread's, and whether there are such."""
    _, m, n, _ = found.sizes
    w.add(f"const int i = {turn} * {tile.shares} + share;")
    w.add("const int row = first_row + r + i, column = first_column + c;")
    limits = [f"i < {tile.down}"] if tile.down % tile.shares else []
    limits += [f"row < {m}"] if m % tile.rows else []
    limits += [f"column < {n}"] if n % tile.columns else []
    w.decode("row", found.rows)
    w.decode("column", found.columns)
    return " && ".join(limits) or "true"


def _before(w: Writer, found: Contraction, tile: Tile) -> str:
    """What follows needs values that can be on their way while the product is computed."""
    limits = _place(w, found, tile, "0")
    w.add(f"const bool is_mine = {limits};")
    if tile.across > 1:
        with w.in_lanes(found.columns[-1], tile.across, found.after, {found.local}):
            w.early(found.after, "is_mine")
    return "is_mine"


def _finish(w: Writer, found: Contraction, tile: Tile, is_mine: str) -> None:
    """Shares are added up, always in the same order; then what follows each element."""
    down, across, shares = tile.down, tile.across, tile.shares
    if shares > 1:
        w.add("#pragma unroll")
        with w.block(f"for (int far = {shares // 2}; far; far >>= 1)"):
            w.add("#pragma unroll")
            w.add(f"for (int i = 0; i < {down * across}; ++i)")
            w.add(f"  sums[i / {across}][i % {across}] += ")
            w.add(f"    shuffled(sums[i / {across}][i % {across}], far);")
    if is_mine:
        with w.block(f"if ({is_mine})"):
            _after(w, found, tile)
        return
    w.add("#pragma unroll")
    with w.block(f"for (int turn = 0; turn < {-(-down // shares)}; ++turn)"):
        limits = _place(w, found, tile, "turn")
        with w.block(f"if ({limits})"):
            _after(w, found, tile)


def _after(w: Writer, found: Contraction, tile: Tile) -> None:
    wide, across = scalars.register(found.wide), tile.across
    w.add(f"{wide} sum[{across}];")
    w.add("#pragma unroll")
    with w.block(f"for (int j = 0; j < {across}; ++j)"):
        w.add("sum[j] = sums[0][j];")
        w.add("#pragma unroll")
        w.add(f"for (int e = 1; e < {tile.down}; ++e) if (e == i) sum[j] = sums[e][j];")
    if across == 1:
        w.add(f"{wide} total = sum[0];")
        w.names[found.local] = "total"
        w.thread_all(found.after)
        return
    w.names[found.local] = "sum"
    with w.in_lanes(found.columns[-1], across, found.after, {found.local}):
        w.thread_all(found.after)
