"""Kernels of a workgroup that multiply blocks in its memory, each warp a strip of them.

Products, copies to matrices that a warp holds and back, and loops that warps share. No matrix is
touched under a condition: a compiler must see that all threads of a warp do the same. Loops it
takes as they are, so that what is seldom done is a loop that ends before it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from treadle.base import dtypes
from treadle.codegen.wgsl.render import Writer
from treadle.kernel.access import written_in
from treadle.kernel.mapped import Nest, held_matrices, is_of_warps, nest_of
from treadle.kernel.nodes import (
    Apply,
    Barrier,
    For,
    Kernel,
    Load,
    Matmul,
    Matrix,
    Role,
    Store,
    Value,
)
from treadle.kernel.packs import copy_of, packed_stores
from treadle.kernel.traverse import walk

EDGE = 16  # of the matrices of a warp
COPIED = 8  # packs of a thread that are on their way at once
# What takes few operations of a device: numbers that are rounded to float16 next.
QUICK = {"exp": "exp", "max": "max"}


class Blocks(Writer):
    """A group's kernel that multiplies blocks in its memory, each warp a strip of them.

    Sums, and factors that are only multiplied, are matrices of the warps throughout.
    """

    has_ordered = False

    def __init__(self, kernel: Kernel, halves: frozenset[str]):
        narrow = {b.name for b in kernel.scratch if b.dtype is dtypes.float16}
        super().__init__(kernel, halves | narrow)
        products = [s for s in walk(kernel.body) if isinstance(s, Matmul)]
        held, shapes = held_matrices(kernel), dict[str, tuple[int, int]]()
        for m in (m for s in products for m in s.matrices if m.buffer in held):
            shapes[m.buffer] = m.rows.count // EDGE, m.columns.count // EDGE
        self.shapes = shapes  # of the matrices that a warp holds
        self.ahead: dict[int, list[str]] = {}  # by identity of loops that copy: what is under way
        self.following: list[tuple[Nest, Load]] = []  # those that are loaded after a barrier
        self.running: list[For] = []  # loops in order around a statement
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
        self.held = {name: self.new("held") for name in self.shapes}
        for name in self.shapes:
            for part in self._parts(name):
                self.add(f"var {part} = {self._kind(name)}();")

    def _kind(self, buffer: str) -> str:
        """The type of matrices that a warp holds: sums, or factors from the left."""
        is_factor = buffer in self.halves
        return f"coop_mat{EDGE}x{EDGE}<{'f16, A' if is_factor else 'f32, C'}>"

    def _parts(self, buffer: str, first: int = 0, count: int | None = None) -> list[str]:
        """Matrices that a warp holds, row by row, some columns of them."""
        down, across = self.shapes[buffer]
        end = across if count is None else first + count
        columns = range(first, end)
        return [f"{self.held[buffer]}_{i}_{j}" for i in range(down) for j in columns]

    def iterations(self, nest: Nest, role: Role, sums: Collection[str]) -> None:
        copy, stores = copy_of(nest.body), [s for s in nest.body if isinstance(s, Store)]
        into = stores[0].buffer if stores else ""
        if is_of_warps(nest.loops[0]):
            (strip,) = nest.variables
            self.vars[strip] = "warp"
            self.all(nest.body, True)
        elif copy is not None and (into in self.shapes or copy[1].buffer in self.shapes):
            self._moved(nest, *copy)
        elif into in self.shapes:
            for part in self._parts(into):
                self.add(f"{part} = {self._kind(into)}();")
        elif id(nest.loops[0]) in self.ahead and copy is not None:
            self._put_ahead(nest, *copy)
        elif nest.lanes > 1 and copy is not None:
            self._copied(nest, *copy)
        elif role is Role.SUBGROUP and nest.count % self.warp == 0:
            self._written_out(nest)
        else:
            super().iterations(nest, role, sums)

    def _written_out(self, nest: Nest) -> None:
        """Iterations of a warp one after the other, so that loads of several are under way."""
        for first in range(0, nest.count, self.warp):
            with self.block(""):
                self.decode(f"(tid % {self.warp} + {first})", nest.variables)
                self.all(nest.body)

    def _moved(self, nest: Nest, into: Store, out_of: Load) -> None:
        """Columns of a strip from memory to matrices that the warp holds, or back."""
        rows, columns = nest.variables
        is_taken = into.buffer in self.shapes
        held, memory = (into, out_of) if is_taken else (out_of, into)
        step = memory.index.factor_of(rows)
        assert step is not None
        self.vars[rows] = self.vars[columns] = "0"
        start, name = self.index(memory.index), self.inside[memory.buffer]
        first, count = held.index.offset // EDGE, columns.extent // EDGE
        for u, part in enumerate(self._parts(held.buffer, first, count)):
            at = f"{start} + {u // count * EDGE * step + u % count * EDGE}"
            place = f"&{name}[u32({at}) >> 2u], {step // 4}u"
            if is_taken:
                self.add(f"{part} = coopLoadT<{self._kind(held.buffer)}>({place});")
            else:
                self.add(f"coopStoreT({part}, {place});")

    # Copies to memory

    def _copied(self, nest: Nest, into: Store, out_of: Load) -> None:
        """Packs to memory; several loads of a thread are on their way at once."""
        every = self._packs_of(nest)
        for start in range(0, len(every), COPIED):
            with self.block(""):
                lines = []
                for q in every[start : start + COPIED]:
                    self.decode(q, nest.variables)
                    got = self.new("got")
                    self.add(f"let {got} = {self._element(nest, out_of)};")
                    lines.append(f"{self._element(nest, into)} = {got};")
                for line in lines:
                    self.add(line)

    def _packs_of(self, nest: Nest) -> list[str]:
        """First elements of a thread's packs; the last is some threads', where they are few."""
        width, packs = self.geometry.share, nest.count // nest.lanes
        found = []
        for first in range(0, packs, width):
            q = f"(tid + {first})" if first + width <= packs else f"min(tid + {first}, {packs - 1})"
            found.append(f"({q} * {nest.lanes})" if nest.lanes > 1 else q)
        return found

    def _element(self, nest: Nest, at: Store | Load) -> str:
        if nest.lanes > 1:
            return self.pack(at.buffer, at.index)
        is_load = isinstance(at, Load)
        return self.read(at.buffer, at.index) if is_load else self.element(at.buffer, at.index)

    @contextmanager
    def sequential(self, loop: For) -> Iterator[None]:
        """What an iteration copies is loaded while the one before is multiplied."""
        self.vars[loop.var] = "0"
        for nest, _, out_of in self._ahead(loop):
            names = self.ahead[id(nest.loops[0])] = []
            for q in self._packs_of(nest):
                self.decode(q, nest.variables)
                names.append(self.new("ahead"))
                self.add(f"var {names[-1]} = {self._element(nest, out_of)};")
        self.running.append(loop)
        with super().sequential(loop):
            yield
        self.running.pop()

    def _put_ahead(self, nest: Nest, into: Store, out_of: Load) -> None:
        """What was loaded before to memory; after the barrier the next is loaded."""
        names = self.ahead[id(nest.loops[0])]
        with self.block(""):
            for q, name in zip(self._packs_of(nest), names, strict=True):
                self.decode(q, nest.variables)
                self.add(f"{self._element(nest, into)} = {name};")
        self.following.append((nest, out_of))

    def barrier(self, scope: Role) -> None:
        super().barrier(scope)
        following, self.following = self.following, []
        for nest, out_of in following:
            var, names = self.running[-1].var, self.ahead[id(nest.loops[0])]
            now = self.vars[var]
            with self.block(""):
                after = self.new("after")
                self.add(f"let {after} = min({now} + 1, {var.extent - 1});")
                self.vars[var] = after
                for q, name in zip(self._packs_of(nest), names, strict=True):
                    self.decode(q, nest.variables)
                    self.add(f"{name} = {self._element(nest, out_of)};")
            self.vars[var] = now

    def _ahead(self, loop: For) -> list[tuple[Nest, Store, Load]]:
        """Copies of a loop from outside, before the first barrier."""
        found, outside = [], self.outside.keys() - written_in(self.kernel.body)
        for s in loop.body:
            if isinstance(s, Barrier):
                break
            nest = nest_of(s) if isinstance(s, For) and s.role is Role.GROUP else None
            copy = copy_of(nest.body) if nest is not None else None
            if nest is not None and copy is not None and copy[1].buffer in outside:
                found.append((nest, *copy))
        return found

    def applied(self, value: Apply, given: list[str], exceeds: bool) -> str:
        if value.op in QUICK and value.dtype is dtypes.float32:
            return f"{QUICK[value.op]}({', '.join(given)})"
        return super().applied(value, given, exceeds)

    def accumulated(self, op: str, value: Value, old: str) -> str:
        if op in QUICK:
            return f"{QUICK[op]}({old}, {self.value(value)})"
        return super().accumulated(op, value, old)

    def multiplied(self, s: Matmul) -> None:
        """A warp's product: matrices of the left are loaded once, unless it holds them."""
        down, across = (n.count // EDGE for n in (s.target.rows, s.target.columns))
        is_held = s.target.buffer in self.shapes
        with self.block(""):
            if is_held:
                sums = self._parts(s.target.buffer)
            else:
                sums = [self.new("sum") for _ in range(down * across)]
                for total in sums:
                    self.add(f"var {total} = coop_mat{EDGE}x{EDGE}<f32, C>();")
            for d in range(s.left.columns.count // EDGE):
                lefts = [self._left(s.left, i, d) for i in range(down)]
                for j in range(across):
                    right = self.new("b")
                    self.add(f"let {right} = {self._loaded(s.right, d, j, 'B')};")
                    for i, left in enumerate(lefts):
                        total = sums[i * across + j]
                        self.add(f"{total} = coopMultiplyAdd({left}, {right}, {total});")
            for u, total in enumerate(() if is_held else sums):
                place, step, by_rows = self._place(s.target, u // across, u % across)
                assert by_rows, "sums lie along their rows"
                self.add(f"coopStoreT({total}, {place}, {step}u);")

    def _left(self, matrix: Matrix, row: int, column: int) -> str:
        if matrix.buffer in self.shapes:
            return f"{self.held[matrix.buffer]}_{row}_{column}"
        name = self.new("a")
        self.add(f"let {name} = {self._loaded(matrix, row, column, 'A')};")
        return name

    def _loaded(self, matrix: Matrix, row: int, column: int, role: str) -> str:
        place, step, by_rows = self._place(matrix, row, column)
        load = "coopLoadT" if by_rows else "coopLoad"
        return f"{load}<coop_mat{EDGE}x{EDGE}<f16, {role}>>({place}, {step}u)"

    def _place(self, matrix: Matrix, row: int, column: int) -> tuple[str, int, bool]:
        """Where a matrix starts, how far its lines are apart, and whether those are its rows."""
        down, across = matrix.rows.stride, matrix.columns.stride
        assert 1 in (down, across)
        assert matrix.buffer in self.inside
        assert matrix.buffer in self.packed
        start = f"{self.index(matrix.index)} + {(row * down + column * across) * EDGE}"
        name, step = self.inside[matrix.buffer], max(down, across)
        return f"&{name}[u32({start}) >> 2u]", step // 4, across == 1
