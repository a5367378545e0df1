"""Contractions by matrices that the warps of a workgroup hold, float16 summed in float32.

No matrix is touched under a condition: a compiler must see that all threads of a warp do the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base import dtypes
from treadle.codegen.c_like.tiles import limits_of
from treadle.codegen.wgsl.tiles import Contraction, Copy, load_of
from treadle.kernel.geometry import Panel, Tiled
from treadle.kernel.index import Index, Var, uses
from treadle.kernel.nodes import (
    Apply,
    Convert,
    Kernel,
    Literal,
    Local,
    Store,
)
from treadle.kernel.packs import is_pack
from treadle.kernel.traverse import subvalues


def _stride(index: Index, var: Var) -> int | None:
    """How far a step of a variable is; None where that is not the same everywhere."""
    found = [f for atom, f in index.terms if uses(atom, var)]
    return found[0] if len(found) == 1 and (var, found[0]) in index.terms else None


class Matrices(Contraction):
    """A contraction whose warps multiply matrices, float16 summed in float32."""

    panel_type = "f16"

    def __init__(self, kernel: Kernel, tiled: Tiled, halves: frozenset[str]):
        super().__init__(kernel, tiled, halves)
        sides = (tiled.left, self.product.left), (tiled.right, self.product.right)
        self.packed = frozenset(load_of(value).buffer for p, value in sides if p.lanes > 1)
        self.plain, self.fours = self._plain_store(), self._store_of_fours()
        self.floats = frozenset([self.plain[0].buffer] if self.plain else [])
        self.packed |= {self.fours.buffer} if self.fours else set()

    def _plain_store(self) -> tuple[Store, int] | None:
        """What follows, where that is a store of whole rows of float32 and nothing else."""
        tile, product = self.tile, self.product
        if len(product.after) != 1 or len(tile.rows) > 1 or len(tile.columns) > 1:
            return None
        store, (row,), (column,) = product.after[0], tile.rows, tile.columns
        if not isinstance(store, Store) or store.guard is not None or limits_of(tile):
            return None
        is_sum = store.value == Local(product.local, product.dtype)
        if not is_sum or self.types[store.buffer] is not dtypes.float32:
            return None
        stride, across = (_stride(store.index, v) for v in (row, column))
        reads = {load_of(product.left).buffer, load_of(product.right).buffer}
        is_plain = stride is not None and across == 1 and store.buffer not in reads
        return (store, stride) if is_plain and stride is not None else None

    def _store_of_fours(self) -> Store | None:
        """What follows, where that is a store of float16 made of the sum alone, in whole packs."""
        tile, product = self.tile, self.product
        store, column = product.after[0], tile.columns[-1]
        if len(product.after) != 1 or not isinstance(store, Store) or store.guard is not None:
            return None
        is_pure = all(
            isinstance(v, Local | Literal | Apply | Convert) for v in subvalues(store.value)
        )
        is_aligned = max(tile.left.lanes, tile.right.lanes) > 1 and column.extent % 4 == 0
        is_whole = is_aligned and is_pack(store.index, column, 4)
        reads = {load_of(product.left).buffer, load_of(product.right).buffer}
        is_narrow = store.buffer in self.halves - reads
        return store if is_pure and is_whole and is_narrow else None

    def _clear(self) -> None:
        self.edge, warps = self.tile.matrices, self.geometry.threads // self.tile.shares
        self.down, self.across = (n // self.edge for n in (self.tile.down, self.tile.across))
        if self.plain is None:
            size = warps * self.tile.stage_step * self.edge
            of_fours = self.fours is not None
            self.stage = (
                self.share("stage", "vec4<f32>", size // 4)
                if of_fours
                else self.share("stage", "f32", size)
            )
        self.matrix = f"coop_mat{self.edge}x{self.edge}"
        for i in range(self.down):
            for j in range(self.across):
                self.add(f"var sum_{i}_{j} = {self.matrix}<f32, C>();")

    def _walk(self, lefts: str, rights: str) -> None:
        """Matrices are multiplied under no condition: a compiler must see that all threads do.

        A part of the depth is loaded while the one before is multiplied, not before: a barrier
        waits for every load that is under way. The last part may be less than a whole one.
        """
        tile, depth, k = self.tile, self.tile.tile_depth, self.tile.sizes[-1]
        if not tile.is_ahead:
            super()._walk(lefts, rights)
            return
        whole, copies = k // depth * depth, self._places(lefts, rights)
        self._fetch_all(copies, "0")
        self._put_all(copies)
        self.add("workgroupBarrier();")
        with self.block(f"for (var start = {depth}; start < {whole}; start += {depth})"):
            self._fetch_all(copies, "start")
            self._multiply(lefts, rights, depth)
            self.add("workgroupBarrier();")
            self._put_all(copies)
            self.add("workgroupBarrier();")
        if whole < k:
            for copy in copies:  # zeros, where there is nothing to load
                for part in copy.got:
                    self.add(f"{part} = {self._nothing(copy.panel)};")
            self._fetch_all(copies, str(whole), True)
            with self.block(""):
                self._multiply(lefts, rights, depth)
            self.add("workgroupBarrier();")
            self._put_all(copies)
            self.add("workgroupBarrier();")
        with self.block(""):
            rest = (k - whole) or depth
            self._multiply(lefts, rights, -(-rest // self.edge) * self.edge)

    def _places(self, lefts: str, rights: str) -> list[Copy]:
        """All copies of a thread."""
        tile, product, threads = self.tile, self.product, self.geometry.threads
        sides = (
            (lefts, tile.left, product.left, tile.rows, "first_row"),
            (rights, tile.right, product.right, tile.columns, "first_column"),
        )
        return [self._place(*s, c * threads) for s in sides for c in range(s[1].batch)]

    def _fetch_all(self, copies: Sequence[Copy], start: str, may_end: bool = False) -> None:
        for copy in copies:
            with self.block(""):
                self._fetch(copy, start, may_end)

    def _put_all(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self.add(copy.store)

    def _multiply(self, lefts: str, rights: str, depth: int | None = None) -> None:
        """Matrices of the operand that has fewer are held, those of the other come one by one."""
        tile = self.tile
        own = ("a", lefts, tile.left, "ty", tile.down, self.down, "A")
        other = ("b", rights, tile.right, "tx", tile.across, self.across, "B")
        held, passing = (own, other) if self.down <= self.across else (other, own)
        for d in range(0, depth or tile.tile_depth, self.edge):
            for i in range(held[5]):
                self._take(d, i, *held)
            for j in range(passing[5]):
                self._take(d, j, *passing)
                for i in range(held[5]):
                    row, column = (i, j) if held is own else (j, i)
                    factors, total = f"a_{d}_{row}, b_{d}_{column}", f"sum_{row}_{column}"
                    self.add(f"{total} = coopMultiplyAdd({factors}, {total});")

    def _take(
        self, d: int, i: int, stem: str, name: str, panel: Panel, warp: str, length: int, _: int,
        role: str,
    ) -> None:  # fmt: skip
        """A matrix of a panel, from so far into the depth."""
        place = warp, length, i * self.edge
        self.add(f"let {stem}_{d}_{i} = {self._loaded(name, panel, place, d, role)};")

    def _loaded(self, name: str, panel: Panel, own: tuple[str, int, int], d: int, role: str) -> str:
        """A matrix of a panel: rows of the left operand, columns of the right one lie along it.

        Where it starts, and how far its rows are apart, is counted in elements of the panel.
        """
        is_by_rows, size = panel.is_along == (role == "A"), 4 if panel.lanes > 1 else 1
        warp, length, more = own
        step = panel.step // size
        if panel.is_along:
            start = f"({warp} * {length} + {more}) * {step} + {d // size}"
        else:
            start = f"{d * step} + {warp} * {length // size} + {more // size}"
        load = "coopLoadT" if is_by_rows else "coopLoad"
        return f"{load}<{self.matrix}<f16, {role}>>(&{name}[{start}], {step}u)"

    def _finish(self) -> None:
        """Some matrices at a time by way of memory, where threads of a warp find their elements."""
        if self.plain is not None:
            self._stored(*self.plain)
            return
        tile, edge, shares, staged = self.tile, self.edge, self.tile.shares, self.tile.staged
        each = 4 if self.fours is not None else 1  # elements of the stage's, which threads take
        wide, step = staged * edge // each, tile.stage_step // each
        stage, limits = f"index / {shares} * {edge * step}", limits_of(tile)
        ends = [f"{first} + {size} <= {n}" for first, size, n in self._ends()]
        if ends:
            self.add(f"let is_whole = {' && '.join(ends)};")
        for i in range(self.down):
            for j in range(0, self.across, staged):
                for u in range(staged):
                    place = f"&{self.stage}[{stage} + {u * edge // each}]"
                    self.add(f"coopStoreT(sum_{i}_{j + u}, {place}, {step}u);")
                self.add("subgroupBarrier();")  # no other warp has this part of the memory
                row = f"ty * {tile.down} + {i * edge} + e / {wide}"
                column = f"tx * {tile.across} + {j * edge} + e % {wide} * {each}"
                total = f"{self.stage}[{stage} + e / {wide} * {step} + e % {wide}]"
                # Elements are tested only in tiles that reach beyond the result.
                heads = (("if (is_whole)", ()), ("else", limits)) if limits else (("", ()),)
                for head, tested in heads:
                    loop = self.block(f"for (var e = share; e < {edge * wide}; e += {shares})")
                    with self.block(head), loop:
                        self._after(row, column, total, tested)
                self.add("subgroupBarrier();")

    def _ends(self) -> list[tuple[str, int, int]]:
        """Where tiles start that need not end within the result, their size, and its."""
        tile, (_, m, n, _) = self.tile, self.tile.sizes
        sides = ("first_row", tile.left.length, m), ("first_column", tile.right.length, n)
        return [side for side in sides if side[2] % side[1]]

    def _follows(self, total: str) -> None:
        if self.fours is None:
            super()._follows(total)
            return
        self.add(f"let four = {total};")
        local, store, parts = self.product.local, self.fours, list[str]()
        for u in range(4):
            self.names[local], self.dtypes[local] = f"four[{u}]", self.product.dtype
            parts.append(f"nearest_float16({self.value(store.value, True)})")
        into = self.pack(store.buffer, store.index)
        self.add(f"{into} = vec4<f16>({', '.join(parts)});")

    def _stored(self, store: Store, stride: int) -> None:
        """Matrices as they are, where nothing is to be done with their elements."""
        tile, edge, memory = self.tile, self.edge, self.outside[store.buffer]
        for i in range(self.down):
            for j in range(self.across):
                self.decode(f"(first_row + ty * {tile.down} + {i * edge})", tile.rows)
                self.decode(f"(first_column + tx * {tile.across} + {j * edge})", tile.columns)
                place = f"&memory{memory}[p{memory} + u32({self.index(store.index)})]"
                self.add(f"coopStoreT(sum_{i}_{j}, {place}, {stride}u);")
