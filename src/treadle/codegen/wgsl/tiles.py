"""Contractions as tiles of a workgroup, with whatever follows each element.

Operands of a tile are in the workgroup's memory, in vectors of four: along the depth, where rows of
the panel lie along it, or across. A thread has rows and columns at a distance, one by one or by
fours, so that its neighbours read and store beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

from treadle.codegen.c_like import statements
from treadle.codegen.c_like.tiles import limits_of, product_of, tiles_of
from treadle.codegen.wgsl.render import Writer
from treadle.kernel.geometry import Panel, Tiled
from treadle.kernel.index import Var
from treadle.kernel.nodes import Convert, Kernel, Load, Value


def load_of(value: Value) -> Load:
    """The load that a factor is, before it is converted."""
    inner = value.value if isinstance(value, Convert) else value
    assert isinstance(inner, Load)
    return inner


class Copy(NamedTuple):
    """What a thread copies to a panel: an element or packs of four."""

    panel: Panel
    value: Value
    loops: tuple[Var, ...]
    first: str  # row or column of the tile
    far: str  # row of the panel
    near: str  # place in its row
    got: list[str]  # variables
    inside: list[str]  # conditions under which it is the thread's
    store: str


class Contraction(Writer):
    """Writes a contraction in tiles; what follows each element is a thread's."""

    panel_type = "f32"

    def __init__(self, kernel: Kernel, tiled: Tiled, halves: frozenset[str]):
        super().__init__(kernel, halves)
        self.tile, self.product = tiled, product_of(self.grid.body, tiled)
        self.tall = tiled.left.length // tiled.down  # rows of threads
        self.wide = tiled.right.length // tiled.across
        size = min(4, tiled.across)
        self.type = "f32" if size == 1 else f"vec{size}<f32>"
        self.columns = [(j, size) for j in range(0, tiled.across, size)]  # a thread's, by vectors

    def written(self) -> list[str]:
        tile = self.tile
        self._begin()
        lefts, rights = (
            self._panel(name, panel)
            for name, panel in (("lefts", tile.left), ("rights", tile.right))
        )
        self._clear()
        self._walk(lefts, rights)
        self._finish()
        return self.lines

    def _walk(self, lefts: str, rights: str) -> None:
        """Through the depth: panels are filled, and multiplied."""
        tile, k = self.tile, self.tile.sizes[-1]
        end = k + tile.tile_depth if tile.is_ahead else k
        with self.block(f"for (var start = 0; start < {end}; start += {tile.tile_depth})"):
            stores = self._copies(lefts, rights)
            if tile.is_ahead:  # loads are under way while what was loaded before is multiplied
                with self.block("if (start > 0)"):
                    self._multiply(lefts, rights)
                self.add("workgroupBarrier();")
            with self.block(f"if (start < {k})") if tile.is_ahead else nullcontext():
                for line in stores:
                    self.add(line)
            self.add("workgroupBarrier();")
            if not tile.is_ahead:
                self._multiply(lefts, rights)
                self.add("workgroupBarrier();")

    def _copies(self, lefts: str, rights: str) -> list[str]:
        tile, product = self.tile, self.product
        stores = self._copy(lefts, tile.left, product.left, tile.rows, "first_row")
        return stores + self._copy(rights, tile.right, product.right, tile.columns, "first_column")

    def _panel(self, name: str, panel: Panel) -> str:
        is_packed = self.tile.by_fours or panel.lanes > 1
        type_ = f"vec4<{self.panel_type}>" if is_packed else self.panel_type
        return self.share(name, type_, panel.size(self.tile.tile_depth) // (4 if is_packed else 1))

    def _begin(self) -> None:
        """Which tile this is, and which part of it is the thread's, or its warp's."""
        tile, (tiles, across) = self.tile, tiles_of(self.tile)
        for s in self.grid.lets:
            statements.statement(self, s)
        self.add(f"let tile = i32(block) % {tiles};")
        self.add(f"let batch = i32(block) / {tiles};")
        self.decode("batch", tile.batch)
        below, beside = f"tile / {across}", f"tile % {across}"
        if tile.is_by_columns:
            below, beside = f"tile % {tiles // across}", f"tile / {tiles // across}"
        self.add(f"let first_row = {below} * {tile.left.length};")
        self.add(f"let first_column = {beside} * {tile.right.length};")
        self.add(f"let share = index % {tile.shares};")
        self.add(f"let ty = index / {tile.shares * self.wide};")
        self.add(f"let tx = index / {tile.shares} % {self.wide};")

    def _clear(self) -> None:
        for i in range(self.tile.down):
            for j, _ in self.columns:
                self.add(f"var sum_{i}_{j} = {self.type}();")

    # Panels

    def _copy(
        self, name: str, panel: Panel, value: Value, loops: tuple[Var, ...], first: str
    ) -> list[str]:
        """An operand's part of the tile, zeros after the end of the depth: loads, and stores to do.

        Several loads of a thread are under way at once. Where there are more, all is done here.
        """
        depth, threads = self.tile.tile_depth, self.geometry.threads
        starts = [c * threads for c in range(panel.batch)]
        if panel.batch == panel.copies(depth, threads):
            return [self._load(name, panel, value, loops, first, c) for c in starts]
        size, step = panel.length * depth // panel.lanes, threads * panel.batch
        with self.block(f"for (var q = 0; q < {size}; q += {step})"):
            stores = [self._load(name, panel, value, loops, first, c, "q + ") for c in starts]
            for line in stores:
                self.add(line)
        return []

    def _load(
        self, name: str, panel: Panel, value: Value, loops: tuple[Var, ...], first: str,
        number: int, base: str = "",
    ) -> str:  # fmt: skip
        """An element, or packs of four, into variables; the store of them."""
        depth, k = self.tile.tile_depth, self.tile.sizes[-1]
        copy = self._place(name, panel, value, loops, first, number, base)
        # Where one more part is loaded than there are, it is the last once more.
        is_after = self.tile.is_ahead and k % depth == 0
        self._fetch(copy, f"min(start, {k - depth})" if is_after else "start", k % depth > 0)
        return copy.store

    def _place(
        self, name: str, panel: Panel, value: Value, loops: tuple[Var, ...], first: str,
        number: int, base: str = "",
    ) -> Copy:  # fmt: skip
        """Where a thread's copy is in its panel, and variables for it."""
        depth, threads, lanes = self.tile.tile_depth, self.geometry.threads, panel.lanes
        size = panel.length * depth // lanes
        fast = (depth if panel.is_along else panel.length) // lanes
        far, near = self.new("far"), self.new("near")
        at_q = f"(u32({base}index) + {number}u)"
        if not base and threads % fast == 0:  # the same for all copies of a thread, but for a sum
            row, column = f"u32(index) / {fast}u + {number // fast}u", f"u32(index) % {fast}u"
        else:
            row, column = f"{at_q} / {fast}u", f"{at_q} % {fast}u"
        self.add(f"let {far} = {self._row(panel, row)};")
        self.add(f"let {near} = i32({column});")
        got = [self.new("got") for _ in range(max(1, lanes // 4))]
        for part in got:
            self.add(f"var {part} = {self._nothing(panel)};")
        inside = [f"{at_q} < {size}u"] if base or size < number + threads else []
        store = self._put(name, panel, far, near, got)
        store = f"if ({' && '.join(inside)}) {{ {store} }}" if inside else store
        return Copy(panel, value, loops, first, far, near, got, inside, store)

    def _nothing(self, panel: Panel) -> str:
        return "vec4<f16>()" if panel.lanes > 1 else "0.0f"

    def _fetch(self, copy: Copy, start: str, may_end: bool) -> None:
        """What is to be copied from a part of the depth, which may be less than a whole one."""
        panel, before = copy.panel, dict(self.vars)
        near = f"{copy.near} * {panel.lanes}" if panel.lanes > 1 else copy.near
        i, d = (copy.far, near) if panel.is_along else (near, copy.far)
        count = math.prod(v.extent for v in copy.loops)
        beside = 1 if panel.is_along else panel.lanes
        limits = [*copy.inside, *([f"{start} + {d} < {self.tile.sizes[-1]}"] if may_end else [])]
        # After its end the last row, or pack of columns, is loaded: no branch, and nothing is made
        # of it.
        own = f"{copy.first} + {i}"
        own = f"min({own}, {count - beside})" if count % panel.length else own
        with self.block(f"if ({' && '.join(limits)})") if limits else nullcontext():
            self.decode(f"({own})", copy.loops)
            self.decode(f"({start} + {d})", self.tile.depth)
            for u, part in enumerate(copy.got):
                wanted = load_of(copy.value)
                is_pack = panel.lanes > 1
                read = self.pack(wanted.buffer, wanted.index, u) if is_pack else None
                self.add(f"{part} = {read or self.value(copy.value)};")
        self.vars = before

    def _row(self, panel: Panel, number: str) -> str:
        """The row of a panel that is copied so manyth."""
        apart = panel.apart
        if apart == 1:
            return f"i32({number})"
        row, both = self.new("row"), 2 * apart
        self.add(f"let {row} = {number};")
        return f"i32({row} / {both}u * {both}u + {row} % 2u * {apart}u + {row} % {both}u / 2u)"

    def _put(self, name: str, panel: Panel, far: str, near: str, got: Sequence[str]) -> str:
        """The store of what was loaded, an element or packs of four."""
        if panel.lanes > 1:
            at = f"{far} * {panel.step // 4} + {near} * {panel.lanes // 4}"
            return " ".join(f"{name}[{at} + {u}] = {part};" for u, part in enumerate(got))
        given = got[0] if self.panel_type == "f32" else f"{self.panel_type}({got[0]})"
        place = f"{far} * {panel.step} + {near}]"
        if self.tile.by_fours:
            place = f"{far} * {panel.step // 4} + ({near} >> 2u)][{near} & 3]"
        return f"{name}[{place} = {given};"

    def _own(self, panel: Panel, thread: str, threads: int, u: str) -> str:
        """Which row or column of the tile is a thread's `u`th."""
        if self.tile.by_fours and not panel.is_along:
            return f"{thread} * 4 + {u} / 4 * {4 * threads} + {u} % 4"
        return f"{thread} + {u} * {threads}"

    def _parts(
        self, name: str, panel: Panel, stem: str, own: int, thread: str, threads: int
    ) -> list[list[str]]:
        """Elements of a thread for each step of the depth; their vectors are read here."""
        if self.tile.by_fours and not panel.is_along:
            for s in range(4):
                for u in range(0, own, 4):
                    at = f"(d * 4 + {s}) * {panel.step // 4} + {thread} + {u // 4 * threads}"
                    self.add(f"let {stem}_{s}_{u} = {name}[{at}];")
            parts = [(f"{u // 4 * 4}", "xyzw"[u % 4]) for u in range(own)]
            return [[f"{stem}_{s}_{at}.{c}" for at, c in parts] for s in range(4)]
        step = panel.step // 4 if self.tile.by_fours else panel.step
        for u in range(own):
            row = f"{thread} + {u * threads}"
            at = f"({row}) * {step} + d" if panel.is_along else f"d * {step} + {row}"
            self.add(f"let {stem}_{u} = {name}[{at}];")
        if self.tile.by_fours:
            return [[f"{stem}_{u}.{c}" for u in range(own)] for c in "xyzw"]
        return [[f"{stem}_{u}" for u in range(own)]]

    # Sums

    def _multiply(self, lefts: str, rights: str) -> None:
        tile = self.tile
        steps = tile.tile_depth // (4 if tile.by_fours else 1)
        with self.block(f"for (var d = share; d < {steps}; d += {tile.shares})"):
            left = self._parts(lefts, tile.left, "a", tile.down, "ty", self.tall)
            right = self._parts(rights, tile.right, "b", tile.across, "tx", self.wide)
            for s, (a, b) in enumerate(zip(left, right, strict=True)):
                for j, size in self.columns:
                    self.add(f"let c_{s}_{j} = {self.type}({', '.join(b[j : j + size])});")
                for i in range(tile.down):
                    for j, _ in self.columns:
                        total = f"sum_{i}_{j}"
                        self.add(f"{total} = fma({self.type}({a[i]}), c_{s}_{j}, {total});")

    def _finish(self) -> None:
        """Shares are added up, always in the same order; then what follows each element."""
        tile, count = self.tile, self.tile.down * self.tile.across
        parts = [(i, j, size) for i in range(tile.down) for j, size in self.columns]
        for far in (2**i for i in reversed(range(tile.shares.bit_length() - 1))):
            for i, j, _ in parts:
                self.add(f"sum_{i}_{j} += subgroupShuffleXor(sum_{i}_{j}, {far}u);")
        self.add(f"var sums = array<f32, {count}>();")
        for i, j, size in parts:
            for u in range(size):
                part = f"sum_{i}_{j}" + (f"[{u}]" if size > 1 else "")
                self.add(f"sums[{i * tile.across + j + u}] = {part};")
        with self.block(f"for (var e = share; e < {count}; e += {tile.shares})"):
            row = self._own(tile.left, "ty", self.tall, f"(e / {tile.across})")
            column = self._own(tile.right, "tx", self.wide, f"(e % {tile.across})")
            self._after(row, column, "sums[e]", limits_of(tile))

    def _after(self, row: str, column: str, total: str, limits: Sequence[str]) -> None:
        """What follows an element, where there is such a row and column."""
        self.add(f"let row = first_row + {row};")
        self.add(f"let column = first_column + {column};")
        with self.block(f"if ({' && '.join(limits) or 'true'})"):
            self.decode("row", self.tile.rows)
            self.decode("column", self.tile.columns)
            self._follows(total)

    def _follows(self, total: str) -> None:
        local = self.product.local
        self.add(f"var total: f32 = {total};")
        self.names[local], self.dtypes[local] = "total", self.product.dtype
        self.all(self.product.after)
