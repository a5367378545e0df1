"""Small products as tiles of a block, with whatever follows each element in the same kernel.

A kernel that sums products of two operands, each along loops that the other does not walk, reads
every element many times: a block holds parts of both in shared memory. The depth is shared out
among neighbours in a warp, so that small results keep many threads busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.base.dtypes import DType
from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.render import Writer
from treadle.codegen.cuda.shape import Shape, is_sum, lane_step, nested, peeled
from treadle.kernel.access import loads_of
from treadle.kernel.index import (
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    flatten,
    substitute,
    uses,
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
    Role,
    Set,
    Statement,
    Store,
    Value,
)
from treadle.kernel.places import map_places

THREADS = 256
LEAST_DEPTH, LEAST_SIDE, LEAST_WORK = 16, 4, 1 << 14
SHARED = 96 << 10  # bytes of both operands that a block holds at a time
BLOCKS = 128  # that run at a time
FEWEST = 8  # that a product gets beside larger ones


@dataclass(frozen=True, slots=True)
class Contraction:
    """A kernel as a product: loops of both operands, of each alone, and of the depth."""

    lets: tuple[Statement, ...]
    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    depth: tuple[Var, ...]
    left: Value  # along the rows
    right: Value
    local: str
    wide: DType
    after: tuple[Statement, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        groups = self.batch, self.rows, self.columns, self.depth
        b, m, n, k = (math.prod(v.extent for v in g) for g in groups)
        return b, m, n, k


def contraction_of(kernel: Kernel) -> Contraction | None:
    """The product that a kernel is; None where it is none, or too small to hold in tiles."""
    if kernel.scratch:
        return None
    lets, turns, body = peeled(kernel)
    if len(turns) == 1:
        turns, body = _split(turns[0], body)
    loops = [i for i, s in enumerate(body) if isinstance(s, For)]
    if not turns or len(loops) != 1:
        return None
    loop = body[loops[0]]
    assert isinstance(loop, For)
    before, after = body[: loops[0]], body[loops[0] + 1 :]
    if not is_sum(loop) or not all(isinstance(s, (Let, Set, Store)) for s in after):
        return None
    depth, inner = nested(loop, Role.SEQUENTIAL)
    if len(inner) != 1 or not isinstance(inner[0], Accumulate) or loop.stop is not None:
        return None
    operands = _operands(inner[0], before)
    if operands is None:
        return None
    return _sorted_out(lets, turns, depth, operands, inner[0], after)


def _operands(step: Accumulate, before: tuple[Statement, ...]) -> tuple[Value, Value] | None:
    """The two factors that are summed up from nothing."""
    start = before[0] if len(before) == 1 else None
    if not isinstance(start, Let) or start.local != step.local:
        return None
    is_none = isinstance(start.value, Literal) and start.value.value == 0
    product = step.value
    if not is_none or step.op != "add" or not isinstance(product, Apply) or product.op != "mul":
        return None
    if not product.dtype.is_float or product.dtype.is_narrow:
        return None
    first, second = product.operands
    return (first, second) if _is_load(first) and _is_load(second) else None


def _sorted_out(
    lets: tuple[Statement, ...],
    turns: tuple[Var, ...],
    depth: list[Var],
    operands: tuple[Value, Value],
    step: Accumulate,
    after: tuple[Statement, ...],
) -> Contraction | None:
    used = [{v for v in turns if _walks(o, v)} for o in operands]
    is_second = turns[-1] in used[1]  # columns are along the last loop: results lie together
    left, right = (0, 1) if is_second else (1, 0)
    both = used[0] & used[1]
    if turns[-1] in both or not (used[left] - both):
        return None
    found = Contraction(
        lets,
        tuple(v for v in turns if v in both or v not in used[0] | used[1]),
        tuple(v for v in turns if v in used[left] - both),
        tuple(v for v in turns if v in used[right] - both),
        tuple(depth),
        operands[left],
        operands[right],
        step.local,
        step.value.dtype,
        after,
    )
    batch, m, n, k = found.sizes
    is_worth = k >= LEAST_DEPTH and min(m, n) >= LEAST_SIDE and batch * m * n * k >= LEAST_WORK
    return found if turns[-1] in found.columns and is_worth else None


def _split(turn: Var, body: tuple[Statement, ...]) -> tuple[tuple[Var, ...], tuple[Statement, ...]]:
    """One loop as the several that its quotients and remainders speak of."""
    divisors = sorted({d for i in _indices(body) for d in _divisors(i, turn)}, reverse=True)
    extents, left = list[int](), turn.extent
    for d in divisors:
        if left % d or turn.extent % d:
            return (turn,), body
        extents.append(left // d)
        left = d
    if not divisors:
        return (turn,), body
    parts = tuple(Var(f"{turn.name}.{i}", n) for i, n in enumerate([*extents, left]))
    whole = flatten([variable(v) for v in parts], [v.extent for v in parts])
    return parts, tuple(map_places(s, lambda i: substitute(i, {turn: whole})) for s in body)


def _indices(body: tuple[Statement, ...]) -> Iterator[Index]:
    for s in body:
        if isinstance(s, For):
            yield from _indices(s.body)
            continue
        if isinstance(s, Store):
            yield s.index
        yield from (x.index for x in loads_of(s))


def _divisors(index: Index, turn: Var) -> Iterator[int]:
    for atom, _ in index.terms:
        if isinstance(atom, (Quotient, Remainder)):
            if atom.index == variable(turn):
                yield atom.divisor
            else:
                yield from _divisors(atom.index, turn)


def _is_load(value: Value) -> bool:
    inner = value.value if isinstance(value, Convert) else value
    return isinstance(inner, Load) and not any(isinstance(a, Data) for a, _ in inner.index.terms)


def _load(value: Value) -> Load:
    inner = value.value if isinstance(value, Convert) else value
    assert isinstance(inner, Load)
    return inner


def _walks(value: Value, var: Var) -> bool:
    return any(uses(a, var) for a, _ in _load(value).index.terms)


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
        shares, packs = wanted
        load = _load(value)
        self.by_depth = load.index.factor_of(depth[-1]) == 1
        along = depth[-1] if self.by_depth else loops[-1]
        count = self.depth if self.by_depth else self.length
        self.lanes, most = 1, 16 // load.dtype.itemsize if packs else 1
        while self.lanes < most:
            wide = 2 * self.lanes
            if along.extent % wide or count % wide:
                break
            if lane_step(load.index, along, wide) != (1, True):
                break
            self.lanes = wide
        self.along = along
        if self.by_depth:
            pad = max(4, shares) % 32
            self.step = self.depth + (pad - self.depth) % 32
        else:
            self.step = -(-self.length // 4) * 4

    @property
    def size(self) -> int:
        return self.step * (self.length if self.by_depth else self.depth)

    def fill(self, first: str, count: int, start: str, depth: int) -> None:
        """Copies of what the block needs, nothing where there is none."""
        w, v = self.w, self.lanes
        fast = (self.depth if self.by_depth else self.length) // v
        slow = self.length if self.by_depth else self.depth
        total = fast * slow
        w.add(f"#pragma unroll {max(1, min(10, -(-total // THREADS)))}")
        with w.block(f"for (int q = threadIdx.x; q < {total}; q += {THREADS})"):
            w.add(f"const int far = q / {fast}, near = q % {fast} * {v};")
            i, d = ("far", "near") if self.by_depth else ("near", "far")
            w.add(f"const int at = {first} + {i}, turn = {start} + {d};")
            w.decode("at", self.loops)
            w.decode("turn", self.depth_loops)
            place = f"{self.name} + far * {self.step} + near"
            limits = [f"at < {count}"] if count % self.length or count < self.length else []
            limits += [f"turn < {depth}"] if depth % self.depth else []
            if not limits:
                self._copy(place)
                return
            with w.block(f"if ({' && '.join(limits)})"):
                self._copy(place)
            with w.block("else"):
                w.add("#pragma unroll")
                w.add(f"for (int u = 0; u < {v}; ++u) ({place})[u] = 0;")

    def _copy(self, place: str) -> None:
        w = self.w
        if self.lanes == 1:
            w.add(f"*({place}) = {w.value(self.value)};")
            return
        with w.in_lanes(self.along, self.lanes, ()), w.packed(self.value):
            w.add(f"store<{self.lanes}>({place}, {w.array(self.value)});")

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
    w = Writer(kernel, shape, is_aligned, is_loose)
    size, wide = found.wide.itemsize, scalars.register(found.wide)
    depth = k
    if (tile.rows + tile.columns) * (k + 32) * size > SHARED:
        depth = SHARED // ((tile.rows + tile.columns) * size) // 32 * 32 - 32
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
    if depth < k:
        with w.block(f"for (int start = 0; start < {k}; start += {depth})"):
            _part(w, found, tile, sides, depth)
            w.add("__syncthreads();")
    else:
        w.add("const int start = 0;")
        _part(w, found, tile, sides, depth)
    _finish(w, found, tile)
    shared = (-(-sides[0].size // 4) * 4 + sides[1].size) * size
    return w.lines, shape, shared


def _part(w: Writer, found: Contraction, tile: Tile, sides: list[_Side], depth: int) -> None:
    """A part of the depth: into shared memory, then each thread's share of it."""
    _, m, n, k = found.sizes
    sides[1].fill("first_column", n, "start", k)
    sides[0].fill("first_row", m, "start", k)
    w.add("__syncthreads();")
    wide = scalars.register(found.wide)
    w.add(f"#pragma unroll {max(1, min(8, depth // tile.shares))}")
    with w.block(f"for (int d = share; d < {depth}; d += {tile.shares})"):
        w.add(f"{wide} a[{tile.down}], b[{tile.across}];")
        sides[0].read("a", "r", tile.down)
        sides[1].read("b", "c", tile.across)
        w.add("#pragma unroll")
        w.add(f"for (int i = 0; i < {tile.down}; ++i)")
        w.add("#pragma unroll")
        w.add(f"  for (int j = 0; j < {tile.across}; ++j)")
        w.add("    sums[i][j] = t_fma(a[i], b[j], sums[i][j]);")


def _finish(w: Writer, found: Contraction, tile: Tile) -> None:
    """Shares are added up, always in the same order; then what follows each element."""
    _, m, n, _ = found.sizes
    wide, (down, across, shares) = (
        scalars.register(found.wide),
        (tile.down, tile.across, tile.shares),
    )
    if shares > 1:
        w.add("#pragma unroll")
        with w.block(f"for (int far = {shares // 2}; far; far >>= 1)"):
            w.add("#pragma unroll")
            w.add(f"for (int i = 0; i < {down * across}; ++i)")
            w.add(f"  sums[i / {across}][i % {across}] += ")
            w.add(f"    shuffled(sums[i / {across}][i % {across}], far);")
    w.add("#pragma unroll")
    with w.block(f"for (int turn = 0; turn < {-(-down // shares)}; ++turn)"):
        w.add(f"const int i = turn * {shares} + share;")
        w.add("const int row = first_row + r + i, column = first_column + c;")
        limits = [f"i < {down}"] if down % shares else []
        limits += [f"row < {m}"] if m % tile.rows else []
        limits += [f"column < {n}"] if n % tile.columns else []
        with w.block(f"if ({' && '.join(limits) or 'true'})"):
            w.add(f"{wide} sum[{across}];")
            w.add("#pragma unroll")
            with w.block(f"for (int j = 0; j < {across}; ++j)"):
                w.add("sum[j] = sums[0][j];")
                w.add("#pragma unroll")
                w.add(f"for (int e = 1; e < {down}; ++e) if (e == i) sum[j] = sums[e][j];")
            w.decode("row", found.rows)
            w.decode("column", found.columns)
            if across == 1:
                w.add(f"{wide} total = sum[0];")
                w.names[found.local] = "total"
                w.thread_all(found.after)
            else:
                w.names[found.local] = "sum"
                with w.in_lanes(found.columns[-1], across, found.after, {found.local}):
                    w.thread_all(found.after)
