"""Sums of columns: threads beside each other have columns beside each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from treadle.base import dtypes
from treadle.codegen.c_like.scalars import nothing
from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.values import Values
from treadle.kernel.geometry import Combine
from treadle.kernel.mapped import geometry_of, grid_of, nest_of, sums_of
from treadle.kernel.nodes import Accumulate, For, Kernel, Statement, Value

# Extremes of float32 are kept as numbers in whose order NaN is above all else and 0 above -0.
ORDERED = {"max": ("ordered", "unordered"), "min": ("ordered_down", "unordered_down")}


class Columns(Values):
    """A workgroup has some columns, its threads some of their rows each."""

    has_ordered = True

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        super().__init__(kernel, halves)
        self.geometry, self.grid = geometry_of(kernel), grid_of(kernel)
        self.ordered: dict[str, tuple[str, str]] = {}  # parts that are numbers in order

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
            shared[local] = self.share("columns", self._part_type(s), rows * wide)
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
            self.add(f"{name} = {self._with(s, name, f'{whole}[beside]')};")
            if self.geometry.combine is Combine.IN_ORDER:
                with self.block(f"for (var y = 1; y < {rows}; y++)"):
                    self.add(f"{name} = {self._with(s, name, f'{whole}[y * {wide} + beside]')};")

    # Parts that threads have

    def _order(self, s: Accumulate) -> tuple[str, str] | None:
        """Functions to numbers in order and back, by which an extreme is found."""
        is_ordered = self.has_ordered and s.value.dtype is dtypes.float32
        return ORDERED.get(s.op) if is_ordered else None

    def _part_type(self, s: Accumulate) -> str:
        return "u32" if self._order(s) else scalars.memory(s.value.dtype)

    def part(self, s: Accumulate, lanes: int) -> str:
        """What a thread sums by itself, from nothing."""
        name, dtype = self.new("part"), s.value.dtype
        if order := self._order(s):
            self.ordered[name] = order
            self.add(f"var {name} = 0u;")
            return name
        none = nothing(scalars, s.op, dtype)
        self.add(f"var {name}: {scalars.register(dtype)} = {none};")
        return name

    def accumulated(self, op: str, value: Value, old: str) -> str:
        if old in self.ordered:
            return f"max({old}, {self.ordered[old][0]}({self.value(value)}))"
        return super().accumulated(op, value, old)

    def _of(self, s: Accumulate, a: str, b: str) -> str:
        """Two parts together."""
        if self._order(s):
            return f"max({a}, {b})"
        return scalars.apply(s.op, [a, b], s.value.dtype, s.value.dtype)

    def _with(self, s: Accumulate, total: str, part: str) -> str:
        """What there was before, and a part."""
        order = self._order(s)
        part = f"{order[1]}({part})" if order else part
        return scalars.apply(s.op, [total, part], s.value.dtype, s.value.dtype)
