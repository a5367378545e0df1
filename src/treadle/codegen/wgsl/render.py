"""Mapped kernels as WGSL: loops that are shared out, sums that are combined, barriers.

Every thread of a group names the same values; stores outside loops are the first thread's. What is
decided is decided in the kernel: nothing here chooses. A thread takes one iteration at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from treadle.codegen.c_like import statements
from treadle.codegen.c_like.scalars import nothing
from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.values import Values
from treadle.kernel.access import accesses
from treadle.kernel.geometry import Combine
from treadle.kernel.mapped import Nest, geometry_of, grid_of, nest_of, shared_of, sums_of, width_of
from treadle.kernel.nodes import (
    Accumulate,
    For,
    Kernel,
    Matmul,
    Role,
    Statement,
    Store,
    Update,
)


class Writer(Values):
    """Writes a kernel's statements, a group's or a thread's."""

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        super().__init__(kernel, halves)
        self.geometry, self.grid = geometry_of(kernel), grid_of(kernel)
        self.warp = self.geometry.warp  # 1 where threads cannot exchange values
        made = {b.name for b in kernel.outputs}
        # Threads of a group meet in memory that they write and read.
        self.meets = any(a.buffer in made and not a.writes for a in accesses(kernel.body))

    def written(self) -> list[str]:
        return statements.written(self)

    def inside_grid(self, body: Sequence[Statement]) -> None:
        if self.geometry.combine is Combine.EXCHANGE:
            self.all(body, self.geometry.share > 1)
            return
        after = statements.columns(self, body)
        self.add("if (row != 0 || !is_in) { return; }")
        self.all(after)

    def begin_thread(self) -> None:
        for b in self.kernel.scratch:
            name = self.inside[b.name] = self.new("own")
            self.add(f"var {name}: array<{scalars.memory(b.dtype)}, {max(1, b.size)}>;")
        self.add(f"let iteration = i32(block) * {self.geometry.threads} + tid;")
        if self.grid.count % self.geometry.threads:
            self.add(f"if (iteration >= {self.grid.count}) {{ return; }}")

    def begin_group(self) -> None:
        share, groups = self.geometry.share, self.geometry.groups
        if groups == 1:
            self.add("let iteration = i32(block);")
        else:
            self.add(f"let iteration = i32(block) * {groups} + index / {share};")
        if self.grid.count % groups:
            self.add(f"if (iteration >= {self.grid.count}) {{ return; }}")
        for b, _ in shared_of(self.kernel):
            type_, size = "f16" if b.name in self.halves else scalars.memory(b.dtype), b.size
            if b.name in self.packed:
                type_, size = f"vec4<{type_}>", size // 4
            name = self.share("shared", type_, size * groups)
            self.inside[b.name] = name
            if groups > 1:
                self.starts[b.name] = f"index / {share} * {b.size}"

    # Sums of columns: threads beside each other have columns beside each other

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

    # Sums of groups

    def part(self, s: Accumulate, lanes: int) -> str:
        """What a thread sums by itself, from nothing."""
        name, dtype = self.new("part"), s.value.dtype
        none = nothing(scalars, s.op, dtype)
        self.add(f"var {name}: {scalars.register(dtype)} = {none};")
        return name

    def _of(self, s: Accumulate, a: str, b: str) -> str:
        return scalars.apply(s.op, [a, b], s.value.dtype, s.value.dtype)

    def shared_out(self, loop: For) -> None:
        statements.sum_up(self, loop)

    def iterations(self, nest: Nest, role: Role, sums: Collection[str]) -> None:
        """Iterations shared out among the threads of a group."""
        width, q = width_of(role, self.geometry), self.new("q")
        tid = f"tid % {width}" if width < self.geometry.share else "tid"
        with self.block(f"for (var {q} = {tid}; {q} < {nest.count}; {q} += {width})"):
            self.decode(q, nest.variables)
            self.all(nest.body)

    def combine(self, local: str, part: str, s: Accumulate, loop: For) -> None:
        whole = self._combined(part, s, width_of(loop.role, self.geometry))
        self.add(f"{local} = {self._of(s, local, whole)};")

    def _combined(self, part: str, s: Accumulate, width: int) -> str:
        """Parts of all threads, always in the same order; every thread has the same bits."""
        warp = min(self.warp, width)
        for far in (2**i for i in reversed(range(warp.bit_length() - 1))):
            other = f"subgroupShuffleXor({part}, {far}u)"
            self.add(f"{part} = {self._of(s, part, other)};")
        count = width // warp
        if count == 1:
            return part
        parts = self.share("parts", scalars.memory(s.value.dtype), count)
        first = self.block(f"if (tid % {warp} == 0)") if warp > 1 else nullcontext()
        with first:
            self.add(f"{parts}[tid / {warp}] = {part};" if warp > 1 else f"{parts}[tid] = {part};")
        self.add("workgroupBarrier();")
        with self.block(f"for (var h = {count // 2}; h > 0; h >>= 1u)"):
            with self.block("if (tid < h)"):
                combined = self._of(s, f"{parts}[tid]", f"{parts}[tid + h]")
                self.add(f"{parts}[tid] = {combined};")
            self.add("workgroupBarrier();")
        whole = self.new("whole")
        self.add(f"let {whole} = {parts}[0];")
        self.add("workgroupBarrier();")
        return whole

    # Statements

    def all(self, body: Sequence[Statement], is_group: bool = False) -> None:
        for s in body:
            statements.statement(self, s, is_group)

    def sequential(self, loop: For) -> AbstractContextManager[None]:
        name = self.vars[loop.var] = self.named(loop.var)
        end = str(loop.var.extent) if loop.stop is None else self.index(loop.stop)
        return self.block(f"for (var {name} = 0; {name} < {end}; {name}++)")

    def stored(self, s: Store, is_group: bool) -> None:
        text = self.put(s.buffer, s.index, self.stored_value(s.value))
        with self._first(is_group):
            self.add(text if s.guard is None else f"if {self.value(s.guard)} {{ {text} }}")

    def updated(self, s: Update, is_group: bool) -> None:
        dtype, old = self.types[s.buffer], self.read(s.buffer, s.index)
        text = scalars.apply("add", [old, self.value(s.value)], dtype, dtype)
        with self._first(is_group):
            self.add(self.put(s.buffer, s.index, text))

    def _first(self, is_group: bool) -> AbstractContextManager[None]:
        return self.block("if (tid == 0)") if is_group else nullcontext()

    def multiplied(self, s: Matmul) -> None:
        raise AssertionError("matmuls are kernels of their own")

    def barrier(self, scope: Role) -> None:
        if scope is Role.SUBGROUP:
            self.add("subgroupBarrier();")
            return
        self.add("workgroupBarrier();")
        if self.meets:
            self.add("storageBarrier();")
