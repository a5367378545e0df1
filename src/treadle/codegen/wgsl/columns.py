"""Sums of columns: threads beside each other have columns beside each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from treadle.codegen.c_like.scalars import nothing
from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.values import Values
from treadle.kernel.geometry import Combine
from treadle.kernel.mapped import geometry_of, grid_of, nest_of, sums_of
from treadle.kernel.nodes import Accumulate, For, Kernel, Statement


class Columns(Values):
    """A workgroup has some columns, its threads some of their rows each."""

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        super().__init__(kernel, halves)
        self.geometry, self.grid = geometry_of(kernel), grid_of(kernel)

    @abstractmethod
    def all(self, body: Sequence[Statement], is_group: bool = False) -> None: ...

    def begin_columns(self) -> None:
        """Which column is this thread's, and which rows."""
        wide = self._across
        self.add(f"let beside = index % {wide};")
        self.add(f"let row = index / {wide};")
        self.add(f"let column = i32(block) * {wide} + beside;")
        self.add(f"let is_in = column < {self.grid.count};")
        self.add("let iteration = select(0, column, is_in);")

    @property
    def _across(self) -> int:
        """Columns of a workgroup."""
        return self.geometry.threads // self.geometry.share

    def column(self, loop: For, is_last: bool) -> None:
        """One of the sums; all threads of the column have it."""
        nest, sums, rows, wide = nest_of(loop), sums_of(loop), self.geometry.share, self._across
        parts = {local: self.part(s, 1) for local, s in sums.items()}
        before = dict(self.names)
        self.names |= parts
        q = self.new("q")
        start = f"select({nest.count}, row, is_in)"
        with self.block(f"for (var {q} = {start}; {q} < {nest.count}; {q} += {rows})"):
            self.decode(q, nest.variables)
            self.all(nest.body)
        self.names = before
        shared = {}
        for local, s in sums.items():
            type_ = scalars.memory(s.value.dtype)
            shared[local] = self.share("columns", type_, rows * wide)
            self.add(f"{shared[local]}[row * {wide} + beside] = {parts[local]};")
        self.add("workgroupBarrier();")
        if self.geometry.combine is Combine.TREE:
            with self.block(f"for (var h = {rows // 2}; h > 0; h >>= 1u)"):
                with self.block("if (row < h)"):
                    for local, s in sums.items():
                        own = f"{shared[local]}[row * {wide} + beside]"
                        other = f"{shared[local]}[(row + h) * {wide} + beside]"
                        self.add(f"{own} = {self._of(s, own, other)};")
                self.add("workgroupBarrier();")
        for local, s in sums.items():
            name, whole = self.names[local], shared[local]
            self.add(f"{name} = {self._of(s, name, f'{whole}[beside]')};")
            if self.geometry.combine is Combine.IN_ORDER:
                with self.block(f"for (var y = 1; y < {rows}; y++)"):
                    self.add(f"{name} = {self._of(s, name, f'{whole}[y * {wide} + beside]')};")

    def part(self, s: Accumulate, lanes: int) -> str:
        """What a thread sums by itself, from nothing."""
        name, dtype = self.new("part"), s.value.dtype
        none = nothing(scalars, s.op, dtype)
        self.add(f"var {name}: {scalars.register(dtype)} = {none};")
        return name

    def _of(self, s: Accumulate, a: str, b: str) -> str:
        return scalars.apply(s.op, [a, b], s.value.dtype, s.value.dtype)
