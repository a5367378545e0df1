"""Products of matrices that the warps of a workgroup hold, float16 summed in float32.

Either a whole contraction is made so, or one statement between blocks in a workgroup's memory. No
matrix is touched under a condition: a compiler must see that all threads of a warp do the same.
"""

from __future__ import annotations

from collections.abc import Collection

from treadle.base import dtypes
from treadle.codegen.c_like.tiles import limits_of
from treadle.codegen.wgsl.render import Writer
from treadle.codegen.wgsl.tiles import Contraction, load_of
from treadle.kernel.geometry import Panel, Tiled
from treadle.kernel.index import Index, Var, uses
from treadle.kernel.mapped import Nest
from treadle.kernel.nodes import For, Kernel, Local, Matmul, Matrix, Role, Store
from treadle.kernel.packs import copy_of
from treadle.kernel.traverse import walk


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
        self.plain = self._plain_store()
        self.floats = frozenset([self.plain[0].buffer] if self.plain else [])

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

    def _clear(self) -> None:
        self.edge, warps = self.tile.matrices, self.geometry.threads // self.tile.shares
        self.down, self.across = (n // self.edge for n in (self.tile.down, self.tile.across))
        if self.plain is None:
            self.stage = self.share("stage", "f32", warps * self.tile.stage_step * self.edge)
        self.matrix = f"coop_mat{self.edge}x{self.edge}"
        for i in range(self.down):
            for j in range(self.across):
                self.add(f"var sum_{i}_{j} = {self.matrix}<f32, C>();")

    def _walk(self, lefts: str, rights: str) -> None:
        """Matrices are multiplied under no condition: a compiler must see that all threads do."""
        tile, depth = self.tile, self.tile.tile_depth
        if not tile.is_ahead:
            super()._walk(lefts, rights)
            return
        end = -(-tile.sizes[-1] // depth) * depth
        for head in ("", f"for (var start = {depth}; start <= {end}; start += {depth})"):
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
        wide, step = staged * edge, tile.stage_step
        stage = f"index / {shares} * {edge * step}"
        for i in range(self.down):
            for j in range(0, self.across, staged):
                for u in range(staged):
                    place = f"&{self.stage}[{stage} + {u * edge}]"
                    self.add(f"coopStoreT(sum_{i}_{j + u}, {place}, {step}u);")
                self.add("workgroupBarrier();")
                with self.block(f"for (var e = share; e < {edge * wide}; e += {shares})"):
                    row = f"ty * {tile.down} + {i * edge} + e / {wide}"
                    column = f"tx * {tile.across} + {j * edge} + e % {wide}"
                    at = f"{stage} + e / {wide} * {step} + e % {wide}"
                    self._after(row, column, f"{self.stage}[{at}]")
                self.add("workgroupBarrier();")

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


class Blocks(Writer):
    """A group's kernel that multiplies blocks in its memory, each warp as many matrices."""

    def __init__(self, kernel: Kernel, halves: frozenset[str]):
        narrow = {b.name for b in kernel.scratch if b.dtype is dtypes.float16}
        super().__init__(kernel, halves | narrow)
        loops = (s for s in walk(kernel.body) if isinstance(s, For) and s.lanes > 1)
        copies = [copy_of(loop.body) for loop in loops]
        # All blocks are vectors of four, from which a matrix is loaded by more than one element.
        self.packed = frozenset({x.buffer for copy in copies if copy is not None for x in copy})
        self.packed |= narrow

    def begin_group(self) -> None:
        super().begin_group()
        self.add(f"let warp = index / {self.warp};")

    def iterations(self, nest: Nest, role: Role, sums: Collection[str]) -> None:
        copy = copy_of(nest.body)
        if nest.lanes == 1 or copy is None:
            super().iterations(nest, role, sums)
            return
        q, width, packs = self.new("q"), self.geometry.share, nest.count // nest.lanes
        with self.block(f"for (var {q} = tid; {q} < {packs}; {q} += {width})"):
            self.decode(f"({q} * {nest.lanes})", nest.variables)
            into, at = self.inside[copy[0].buffer], self.index(copy[0].index)
            self.add(f"{into}[u32({at}) >> 2u] = {self.pack(copy[1], 0)};")

    def multiplied(self, s: Matmul) -> None:
        """Matrices side by side are a warp's, so that it loads those of the left once."""
        down, across = (n.count // EDGE for n in (s.target.rows, s.target.columns))
        each = down * across // (self.geometry.threads // self.warp)
        with self.block(""):
            row, columns = self.new("row"), [self.new("column") for _ in range(each)]
            self.add(f"let {row} = warp * {each} / {across} * {EDGE};")
            for u, column in enumerate(columns):
                self.add(f"let {column} = (warp * {each} + {u}) % {across} * {EDGE};")
            sums = [self._sum(s, row, column) for column in columns]
            for d in range(0, s.left.columns.count, EDGE):
                left = self.new("a")
                self.add(f"let {left} = {self._loaded(s.left, row, str(d), 'f16', 'A')};")
                for total, column in zip(sums, columns, strict=True):
                    right = self.new("b")
                    self.add(f"let {right} = {self._loaded(s.right, str(d), column, 'f16', 'B')};")
                    self.add(f"{total} = coopMultiplyAdd({left}, {right}, {total});")
            for total, column in zip(sums, columns, strict=True):
                place, step, by_rows = self._place(s.target, row, column)
                assert by_rows, "sums lie along their rows"
                self.add(f"coopStoreT({total}, {place}, {step}u);")

    def _sum(self, s: Matmul, row: str, column: str) -> str:
        name = self.new("sum")
        zero = f"coop_mat{EDGE}x{EDGE}<f32, C>()"
        start = self._loaded(s.target, row, column, "f32", "C") if s.adds else zero
        self.add(f"var {name} = {start};")
        return name

    def _loaded(self, matrix: Matrix, row: str, column: str, type_: str, role: str) -> str:
        place, step, by_rows = self._place(matrix, row, column)
        load = "coopLoadT" if by_rows else "coopLoad"
        return f"{load}<coop_mat{EDGE}x{EDGE}<{type_}, {role}>>({place}, {step}u)"

    def _place(self, matrix: Matrix, row: str, column: str) -> tuple[str, int, bool]:
        """Where a matrix starts, how far its lines are apart, and whether those are its rows."""
        down, across = matrix.rows.stride, matrix.columns.stride
        assert 1 in (down, across)
        assert matrix.buffer in self.inside
        start = f"{self.index(matrix.index)} + {row} * {down} + {column} * {across}"
        step, name = max(down, across), self.inside[matrix.buffer]
        if matrix.buffer in self.packed:
            return f"&{name}[u32({start}) >> 2u]", step // 4, across == 1
        return f"&{name}[{start}]", step, across == 1
