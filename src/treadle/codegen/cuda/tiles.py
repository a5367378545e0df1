"""Contractions as tiles of a block, with whatever follows each element in the same kernel.

A block holds panels of both operands in shared memory. The depth is shared out among neighbours in
a warp, whose parts are combined by exchange.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

from treadle.codegen.c_like import statements
from treadle.codegen.c_like.tiles import limits_of, product_of, tiles_of
from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.render import Writer, counts_far
from treadle.kernel.geometry import Panel, Tiled
from treadle.kernel.index import Var
from treadle.kernel.nodes import Convert, Kernel, Load, Value


def tiled_lines(kernel: Kernel, tiled: Tiled) -> list[str]:
    """Lines of the function of a contraction."""
    return _Contraction(kernel, tiled).tiled()


class _Panel:
    """How a block copies one operand to shared memory, and how a thread reads it there."""

    def __init__(
        self, w: _Contraction, name: str, value: Value, loops: tuple[Var, ...], panel: Panel
    ):
        load = value.value if isinstance(value, Convert) else value
        assert isinstance(load, Load)
        self.w, self.name, self.load_, self.loops, self.panel = w, name, load, loops, panel
        self.wide = scalars.register(value.dtype)
        self.depth = w.tile.tile_depth
        self.first = "first_row" if name == "lefts" else "first_column"
        self.count, self.whole = (math.prod(v.extent for v in vs) for vs in (loops, w.tile.depth))
        self.filled = min(self.depth, self.whole)  # elements along the depth that there are
        self.packs = panel.length * self.filled // panel.lanes
        self.iterations = -(-self.packs // w.geometry.threads)  # copies of each thread

    def batches(self) -> list[tuple[int, int]]:
        """Copies that are under way at a time: the first, and how many."""
        most = self.iterations if self.w.tile.is_standalone else self.panel.batch
        starts = range(0, self.iterations, most)
        return [(begin, min(most, self.iterations - begin)) for begin in starts]

    def _each(self, begin: int, count: int) -> AbstractContextManager[None]:
        """A fixed number of copies, written out: loads of all of them are on their way at once."""
        return self.w.written_out("e", begin + count, begin)

    def _which(self) -> list[str]:
        """Which pack this is, and the condition under which there is one."""
        w, panel, threads = self.w, self.panel, self.w.geometry.threads
        fast = (self.filled if panel.is_along else panel.length) // panel.lanes
        w.add(f"const int q = threadIdx.x + e * {threads};")
        w.add(f"const int far = q / {fast}, near = q % {fast} * {panel.lanes};")
        last = self.packs // threads
        return [f"(e < {last} || q < {self.packs})"] if self.packs % threads else []

    def load(self, begin: int, count: int) -> None:
        """Some packs of what the block needs, zeros where there is nothing."""
        w, v, got, load = self.w, self.panel.lanes, f"{self.name}_{begin}", self.load_
        before = dict(w.vars)
        w.add(f"{self.wide} {got}[{count}][{v}];")
        with self._each(begin, count):
            limits = self._which()
            i, d = ("far", "near") if self.panel.is_along else ("near", "far")
            w.add(f"const int at = {self.first} + {i}, iteration = start + {d};")
            w.decode("at", self.loops)
            w.decode("iteration", w.tile.depth)
            limits += [f"at < {self.count}"] if self.count % self.panel.length else []
            limits += [f"iteration < {self.whole}"] if self.whole % self.filled else []
            address = f"{w.pointers[load.buffer]} + {w.index(load.index)}"
            w.add(f"{scalars.register(load.dtype)} pack[{v}] = {{}};")
            w.add(f"if ({' && '.join(limits) or 'true'}) load<{v}>({address}, pack);")
            w.unrolled(f"{got}[e - {begin}][u] = ({self.wide})pack[u];", v)
        w.vars = before

    def store(self, begin: int, count: int) -> None:
        w, got = self.w, f"{self.name}_{begin}"
        with self._each(begin, count):
            limits = self._which()
            address = f"{self.name} + far * {self.panel.step} + near"
            text = f"store<{self.panel.lanes}>({address}, {got}[e - {begin}]);"
            w.add(f"if ({limits[0]}) {text}" if limits else text)

    def clear(self) -> None:
        """Zeros where the depth was made even."""
        more, length = self.depth - self.filled, self.panel.length
        if more <= 0:
            return
        w, threads = self.w, self.w.geometry.threads
        with w.block(f"for (int q = threadIdx.x; q < {more * length}; q += {threads})"):
            far, near = (f"q / {more}", f"{self.filled} + q % {more}")
            if not self.panel.is_along:
                far, near = f"{self.filled} + q / {length}", f"q % {length}"
            w.add(f"{self.name}[({far}) * {self.panel.step} + {near}] = 0;")

    def read(self, into: str, at: str, count: int) -> None:
        """A thread's elements at one step of the depth."""
        w, step = self.w, self.panel.step
        if self.panel.is_along:
            w.unrolled(f"{into}[u] = {self.name}[({at} + u) * {step} + d];", count)
        else:
            w.add(f"load<{count}>({self.name} + d * {step} + {at}, {into});")


class _Contraction(Writer):
    """Writes a contraction in tiles; what follows each element is a thread's."""

    def __init__(self, kernel: Kernel, tiled: Tiled):
        super().__init__(kernel, counts_far(kernel, tiled.blocks))
        self.hoists, self.constant = True, set()
        self.tile = tiled
        found = product_of(self.grid.body, tiled)
        self.after, self.summed = found.after, found.local
        self.wide = scalars.register(found.dtype)
        self.panels = (
            _Panel(self, "lefts", found.left, tiled.rows, tiled.left),
            _Panel(self, "rights", found.right, tiled.columns, tiled.right),
        )

    def tiled(self) -> list[str]:
        tile, k = self.tile, self.tile.sizes[-1]
        for s in self.grid.lets:
            statements.statement(self, s)
        self._begin_tile()
        is_mine = self._before() if tile.down <= tile.shares else ""
        if tile.tile_depth < k:
            with self.block(f"for (int start = 0; start < {k}; start += {tile.tile_depth})"):
                self._part()
                self.add("__syncthreads();")
        else:
            self.add("const int start = 0;")
            self._part()
        self._finish(is_mine)
        return self.lines

    def _begin_tile(self) -> None:
        tile, wide = self.tile, self.wide
        rows, columns = tile.left.length, tile.right.length
        tiles, across = tiles_of(tile)
        self.add(f"const int tile = block % {tiles}, batch = block / {tiles};")
        self.decode("batch", tile.batch)
        self.add(f"const int first_row = tile / {across} * {rows};")
        self.add(f"const int first_column = tile % {across} * {columns};")
        self.add("extern __shared__ __align__(16) unsigned char shared[];")
        self.add(f"{wide} *lefts = ({wide} *)shared, *rights = lefts + {tile.right_start};")
        self.add(f"{wide} sums[{tile.down}][{tile.across}] = {{}};")
        shares = f"threadIdx.x % {tile.shares}, group = threadIdx.x / {tile.shares}"
        self.add(f"const int share = {shares};")
        groups = columns // tile.across
        self.add(f"const int r = group / {groups} * {tile.down};")
        self.add(f"const int c = group % {groups} * {tile.across};")

    def _part(self) -> None:
        """A part of the depth: into shared memory, then each thread's share of it."""
        tile = self.tile
        copies = [(panel, *part) for panel in self.panels for part in panel.batches()]
        for together in [copies] if tile.is_standalone else [[copy] for copy in copies]:
            for panel, begin, count in together:
                panel.load(begin, count)
            for panel, begin, count in together:
                panel.store(begin, count)
        for panel in self.panels:
            panel.clear()
        self.add("__syncthreads();")
        steps = tile.tile_depth // tile.shares
        self.add(f"#pragma unroll {tile.unroll}")
        with self.block(f"for (int e = 0; e < {steps}; ++e)"):
            self.add(f"const int d = share + e * {tile.shares};")
            self.add(f"{self.wide} a[{tile.down}], b[{tile.across}];")
            self.panels[0].read("a", "r", tile.down)
            self.panels[1].read("b", "c", tile.across)
            self.add("#pragma unroll")
            self.add(f"for (int i = 0; i < {tile.down}; ++i)")
            self.add("#pragma unroll")
            self.add(f"  for (int j = 0; j < {tile.across}; ++j)")
            self.add("    sums[i][j] = t_fma(a[i], b[j], sums[i][j]);")

    def _element(self, iteration: str) -> str:
        """Which row and columns of the result are a thread's, and whether there are such."""
        tile = self.tile
        self.add(f"const int i = {iteration} * {tile.shares} + share;")
        self.add("const int row = first_row + r + i, column = first_column + c;")
        limits = [f"i < {tile.down}"] if tile.down % tile.shares else []
        limits += limits_of(tile)
        self.decode("row", tile.rows)
        self.decode("column", tile.columns)
        return " && ".join(limits) or "true"

    def _before(self) -> str:
        """What follows needs values that can be on their way while the sums are computed."""
        tile, limits = self.tile, self._element("0")
        self.add(f"const bool is_mine = {limits};")
        if tile.across > 1:
            with self.in_lanes(tile.columns[-1], tile.across, self.after, {self.summed}):
                self.early(self.after, "is_mine")
        return "is_mine"

    def _finish(self, is_mine: str) -> None:
        """Shares are added up, always in the same order; then what follows each element."""
        down, across, shares = self.tile.down, self.tile.across, self.tile.shares
        if shares > 1:
            self.add("#pragma unroll")
            with self.block(f"for (int far = {shares // 2}; far; far >>= 1)"):
                self.add("#pragma unroll")
                self.add(f"for (int i = 0; i < {down * across}; ++i)")
                self.add(f"  sums[i / {across}][i % {across}] += ")
                self.add(f"    shuffled(sums[i / {across}][i % {across}], far);")
        own = nullcontext() if is_mine else self.written_out("iteration", -(-down // shares))
        with own:
            held = is_mine or self._element("iteration")
            with self.block(f"if ({held})"):
                self._after()

    def _after(self) -> None:
        across = self.tile.across
        self.add(f"{self.wide} sum[{across}];")
        with self.written_out("j", across):
            self.add("sum[j] = sums[0][j];")
            self.add("#pragma unroll")
            self.add(f"for (int e = 1; e < {self.tile.down}; ++e) if (e == i) sum[j] = sums[e][j];")
        if across == 1:
            self.add(f"{self.wide} total = sum[0];")
            self.names[self.summed] = "total"
            self.thread_all(self.after)
            return
        self.names[self.summed] = "sum"
        with self.in_lanes(self.tile.columns[-1], across, self.after, {self.summed}):
            self.thread_all(self.after)
