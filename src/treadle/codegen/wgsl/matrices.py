"""Contractions by matrices that the warps of a workgroup hold, float16 summed in float32.

No matrix is touched under a condition: a compiler must see that all threads of a warp do the same.
"""

from __future__ import annotations

from treadle.base import dtypes
from treadle.codegen.c_like.tiles import limits_of
from treadle.codegen.wgsl.tiles import Contraction, load_of
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
        """Matrices are multiplied under no condition: a compiler must see that all threads do."""
        tile, depth, k = self.tile, self.tile.tile_depth, self.tile.sizes[-1]
        if not tile.is_ahead:
            super()._walk(lefts, rights)
            return
        for head in ("", f"for (var start = {depth}; start < {k}; start += {depth})"):
            with self.block(head):
                if not head:
                    self.add("let start = 0;")
                stores = self._copies(lefts, rights)
                if head:
                    self._multiply(lefts, rights)
                    self.add("workgroupBarrier();")
                for line in stores:
                    self.add(line)
                self.add("workgroupBarrier();")
        with self.block(""):
            self._multiply(lefts, rights)

    def _multiply(self, lefts: str, rights: str) -> None:
        tile, edge = self.tile, self.edge
        for d in range(0, tile.tile_depth, edge):
            for i in range(self.down):
                row = "ty", tile.down, i * edge
                self.add(f"let a_{d}_{i} = {self._loaded(lefts, tile.left, row, d, 'A')};")
            for j in range(self.across):
                column = "tx", tile.across, j * edge
                self.add(f"let b_{d}_{j} = {self._loaded(rights, tile.right, column, d, 'B')};")
                for i in range(self.down):
                    name = f"sum_{i}_{j}"
                    self.add(f"{name} = coopMultiplyAdd(a_{d}_{i}, b_{d}_{j}, {name});")

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
        tile, edge, shares, staged = self.tile, self.edge, self.tile.shares, self.tile.staged
        if self.plain is not None:
            self._stored(*self.plain)
            return
        each = 4 if self.fours is not None else 1  # elements of the stage's, which threads take
        wide, step = staged * edge // each, tile.stage_step // each
        stage = f"index / {shares} * {edge * step}"
        for i in range(self.down):
            for j in range(0, self.across, staged):
                for u in range(staged):
                    place = f"&{self.stage}[{stage} + {u * edge // each}]"
                    self.add(f"coopStoreT(sum_{i}_{j + u}, {place}, {step}u);")
                self.add("workgroupBarrier();")
                with self.block(f"for (var e = share; e < {edge * wide}; e += {shares})"):
                    row = f"ty * {tile.down} + {i * edge} + e / {wide}"
                    column = f"tx * {tile.across} + {j * edge} + e % {wide} * {each}"
                    self._after(
                        row, column, f"{self.stage}[{stage} + e / {wide} * {step} + e % {wide}]"
                    )
                self.add("workgroupBarrier();")

    def _follows(self, total: str) -> None:
        if self.fours is None:
            super()._follows(total)
            return
        self.add(f"let four = {total};")
        local, store, parts = self.product.local, self.fours, list[str]()
        for u in range(4):
            self.names[local], self.dtypes[local] = f"four[{u}]", self.product.dtype
            parts.append(f"f16({self.stored_value(store.value)})")
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
