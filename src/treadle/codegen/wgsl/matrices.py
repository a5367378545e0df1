"""Products of matrices that the warps of a workgroup hold, float16 summed in float32.

Either a whole contraction is made so, or one statement between blocks in a workgroup's memory. No
matrix is touched under a condition: a compiler must see that all threads of a warp do the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from treadle.base import dtypes
from treadle.codegen.c_like.tiles import limits_of
from treadle.codegen.wgsl.render import Writer
from treadle.codegen.wgsl.tiles import Contraction, load_of
from treadle.kernel.geometry import Panel, Tiled
from treadle.kernel.index import Index, Var, uses
from treadle.kernel.mapped import Nest
from treadle.kernel.nodes import (
    Apply,
    Convert,
    For,
    Kernel,
    Literal,
    Load,
    Local,
    Matmul,
    Matrix,
    Role,
    Store,
    Value,
)
from treadle.kernel.packs import copy_of, is_pack, packed_stores
from treadle.kernel.traverse import subvalues, walk


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


EDGE = 16  # of the matrices of a warp
COPIED = 8  # packs of a thread that are on their way at once
# What takes few operations of a device: numbers that are rounded to float16 next.
QUICK = {"exp": "exp", "max": "max"}


class Blocks(Writer):
    """A group's kernel that multiplies blocks in its memory, each warp as many matrices.

    Sums to which products are added are matrices of the warps throughout, rows of them each.
    """

    def __init__(self, kernel: Kernel, halves: frozenset[str]):
        narrow = {b.name for b in kernel.scratch if b.dtype is dtypes.float16}
        super().__init__(kernel, halves | narrow)
        products = [s for s in walk(kernel.body) if isinstance(s, Matmul)]
        self.sums = {s.target.buffer: s.target for s in products if s.adds}
        loops = [s for s in walk(kernel.body) if isinstance(s, For)]
        copies = [copy_of(loop.body) for loop in loops if loop.lanes > 1]
        # All blocks are vectors of four, from which a matrix is loaded by more than one element.
        self.packed = frozenset({x.buffer for copy in copies if copy is not None for x in copy})
        self.packed |= narrow | {s.target.buffer for s in products}
        packs = [p for loop in loops for p in packed_stores(loop.body, 4)]
        is_aligned = any(copy is not None for copy in copies)  # as all buffers of a kernel are
        self.packed |= {p[0].buffer for p in packs} & halves if is_aligned else set()

    def begin_group(self) -> None:
        super().begin_group()
        self.add(f"let warp = index / {self.warp};")
        self.held = {name: self.new("held") for name in self.sums}
        for name in self.sums:
            for total in self._totals(name):
                self.add(f"var {total} = {self._zero};")

    _zero = f"coop_mat{EDGE}x{EDGE}<f32, C>()"

    def _totals(self, buffer: str) -> list[str]:
        """A warp's row of matrices of some sums."""
        target = self.sums[buffer]
        assert target.rows.count == EDGE * (self.geometry.threads // self.warp)
        return [f"{self.held[buffer]}_{u}" for u in range(target.columns.count // EDGE)]

    def iterations(self, nest: Nest, role: Role, sums: Collection[str]) -> None:
        copy, stores = copy_of(nest.body), [s for s in nest.body if isinstance(s, Store)]
        if stores and stores[0].buffer in self.sums:
            for total in self._totals(stores[0].buffer):
                self.add(f"{total} = {self._zero};")
        elif copy is not None and copy[1].buffer in self.sums:
            self._moved(nest, *copy)
        elif nest.lanes > 1 and copy is not None:
            self._copied(nest, *copy)
        else:
            super().iterations(nest, role, sums)

    def _moved(self, nest: Nest, into: Store, out_of: Load) -> None:
        """Some columns of the sums to memory."""
        rows, columns = nest.variables
        step, first = into.index.factor_of(rows), out_of.index.offset // EDGE
        assert step is not None
        totals = self._totals(out_of.buffer)[first : first + columns.extent // EDGE]
        for u, total in enumerate(totals):
            at = f"warp * {EDGE * step // 4} + {u * EDGE // 4}"
            self.add(f"coopStoreT({total}, &{self.inside[into.buffer]}[{at}], {step // 4}u);")

    def _copied(self, nest: Nest, into: Store, out_of: Load) -> None:
        """Packs to memory; several loads of a thread are on their way at once."""
        width, packs = self.geometry.share, nest.count // nest.lanes
        for start in range(0, packs, COPIED * width):
            with self.block(""):
                lines = []
                for first in range(start, min(start + COPIED * width, packs), width):
                    is_whole = first + width <= packs
                    q = f"(tid + {first})" if is_whole else f"min(tid + {first}, {packs - 1})"
                    self.decode(f"({q} * {nest.lanes})", nest.variables)
                    got = self.new("got")
                    self.add(f"let {got} = {self.pack(out_of.buffer, out_of.index)};")
                    lines.append(f"{self.pack(into.buffer, into.index)} = {got};")
                for line in lines:
                    self.add(line)

    def applied(self, value: Apply, given: list[str], exceeds: bool) -> str:
        if value.op in QUICK and value.dtype is dtypes.float32:
            return f"{QUICK[value.op]}({', '.join(given)})"
        return super().applied(value, given, exceeds)

    def accumulated(self, op: str, value: Value, old: str) -> str:
        if op in QUICK:
            return f"{QUICK[op]}({old}, {self.value(value)})"
        return super().accumulated(op, value, old)

    def multiplied(self, s: Matmul) -> None:
        """Matrices side by side are a warp's, so that it loads those of the left once."""
        down, across = (n.count // EDGE for n in (s.target.rows, s.target.columns))
        each = down * across // (self.geometry.threads // self.warp)
        with self.block(""):
            row = self.new("row")
            self.add(f"let {row} = warp * {each} / {across} * {EDGE};")
            if each == across:
                columns = [str(u * EDGE) for u in range(each)]
            else:
                columns = [self.new("column") for _ in range(each)]
                for u, column in enumerate(columns):
                    self.add(f"let {column} = (warp * {each} + {u}) % {across} * {EDGE};")
            if s.adds:
                self._added(s, row, columns, self._totals(s.target.buffer))
                return
            sums = [self.new("sum") for _ in columns]
            for total in sums:
                self.add(f"var {total} = {self._zero};")
            self._added(s, row, columns, sums)
            for total, column in zip(sums, columns, strict=True):
                place, step, by_rows = self._place(s.target, row, column)
                assert by_rows, "sums lie along their rows"
                self.add(f"coopStoreT({total}, {place}, {step}u);")

    def _added(self, s: Matmul, row: str, columns: Sequence[str], sums: Sequence[str]) -> None:
        for d in range(0, s.left.columns.count, EDGE):
            left = self.new("a")
            self.add(f"let {left} = {self._loaded(s.left, row, str(d), 'A')};")
            for total, column in zip(sums, columns, strict=True):
                right = self.new("b")
                self.add(f"let {right} = {self._loaded(s.right, str(d), column, 'B')};")
                self.add(f"{total} = coopMultiplyAdd({left}, {right}, {total});")

    def _loaded(self, matrix: Matrix, row: str, column: str, role: str) -> str:
        place, step, by_rows = self._place(matrix, row, column)
        load = "coopLoadT" if by_rows else "coopLoad"
        return f"{load}<coop_mat{EDGE}x{EDGE}<f16, {role}>>({place}, {step}u)"

    def _place(self, matrix: Matrix, row: str, column: str) -> tuple[str, int, bool]:
        """Where a matrix starts, how far its lines are apart, and whether those are its rows."""
        down, across = matrix.rows.stride, matrix.columns.stride
        assert 1 in (down, across)
        assert matrix.buffer in self.inside
        assert matrix.buffer in self.packed
        start = f"{self.index(matrix.index)} + {row} * {down} + {column} * {across}"
        name, step = self.inside[matrix.buffer], max(down, across)
        return f"&{name}[u32({start}) >> 2u]", step // 4, across == 1
