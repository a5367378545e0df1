"""Mapped kernels as WGSL: loops that are shared out, sums that are combined, barriers.

Every thread of a group names the same values; stores outside loops are the first thread's. What is
decided is decided in the kernel: nothing here chooses. A thread takes one iteration at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import assert_never

from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.values import Lines
from treadle.kernel.access import accesses
from treadle.kernel.arithmetic import identity
from treadle.kernel.geometry import Combine
from treadle.kernel.mapped import (
    geometry_of,
    grid_of,
    nest_of,
    shared_of,
    sums_of,
    width_of,
)
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    For,
    Kernel,
    Let,
    LibraryCall,
    Literal,
    Matmul,
    Role,
    Set,
    Space,
    Statement,
    Store,
    Update,
    Value,
)


class Writer(Lines):
    """Writes a kernel's statements, a group's or a thread's."""

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        super().__init__(kernel, halves)
        self.geometry, self.grid = geometry_of(kernel), grid_of(kernel)
        self.warp = self.geometry.warp  # 1 where threads cannot exchange values
        made = {b.name for b in kernel.outputs}
        # Threads of a group meet in memory that they write and read.
        self.meets = any(a.buffer in made and not a.writes for a in accesses(kernel.body))

    def written(self) -> list[str]:
        """The lines of one workgroup: which iteration of the grid it is, its memory, the body."""
        if self.geometry.combine is not Combine.EXCHANGE:
            self._begin_columns()
        elif self.geometry.share == 1:
            self._begin_thread()
        else:
            self._begin_group()
        self.decode("iteration", self.grid.variables)
        for s in self.grid.lets:
            self.statement(s)
        if self.geometry.combine is not Combine.EXCHANGE:
            self._columns(self.grid.body)
        else:
            self.all(self.grid.body, self.geometry.share > 1)
        return self.lines

    def _begin_thread(self) -> None:
        for b in self.kernel.scratch:
            name = self.inside[b.name] = self.new("own")
            self.add(f"var {name}: array<{scalars.memory(b.dtype)}, {max(1, b.size)}>;")
        self.add(f"let iteration = i32(block) * {self.geometry.threads} + tid;")
        if self.grid.count % self.geometry.threads:
            self.add(f"if (iteration >= {self.grid.count}) {{ return; }}")

    def _begin_group(self) -> None:
        share, groups = self.geometry.share, self.geometry.groups
        if groups == 1:
            self.add("let iteration = i32(block);")
        else:
            self.add(f"let iteration = i32(block) * {groups} + index / {share};")
        if self.grid.count % groups:
            self.add(f"if (iteration >= {self.grid.count}) {{ return; }}")
        for b, _ in shared_of(self.kernel):
            name = self.share("shared", scalars.memory(b.dtype), b.size * groups)
            self.inside[b.name] = name
            if groups > 1:
                self.starts[b.name] = f"index / {share} * {b.size}"
        assert all(b.space is Space.SHARED for b in self.kernel.scratch)

    # Sums of columns: threads beside each other have columns beside each other

    def _begin_columns(self) -> None:
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

    def _columns(self, body: Sequence[Statement]) -> None:
        """Threads of a column sum some of its rows; then the first has what follows."""
        last = max(i for i, s in enumerate(body) if isinstance(s, For))
        for s in body[: last + 1]:
            if isinstance(s, For):
                self._column(s)
            else:
                self.statement(s)
        self.add("if (row != 0 || !is_in) { return; }")
        self.all(body[last + 1 :])

    def _column(self, loop: For) -> None:
        """One of the sums; all threads of the column have it."""
        nest, sums, rows, wide = nest_of(loop), sums_of(loop), self.geometry.share, self._across
        parts = {local: self._part(s) for local, s in sums.items()}
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

    def _part(self, s: Accumulate) -> str:
        """What a thread sums by itself, from nothing."""
        part, dtype = self.new("part"), s.value.dtype
        none = scalars.literal(Literal(identity(s.op, dtype), dtype))
        self.add(f"var {part}: {scalars.register(dtype)} = {none};")
        return part

    def _of(self, s: Accumulate, a: str, b: str) -> str:
        return scalars.apply(s.op, [a, b], s.value.dtype, s.value.dtype)

    def _shared(self, loop: For) -> None:
        """Iterations shared out among the threads of a group."""
        nest, sums = nest_of(loop), sums_of(loop)
        parts = {local: self._part(s) for local, s in sums.items()}
        before = dict(self.names)
        self.names |= parts
        width, q = width_of(loop.role, self.geometry), self.new("q")
        tid = f"tid % {width}" if width < self.geometry.share else "tid"
        with self.block(f"for (var {q} = {tid}; {q} < {nest.count}; {q} += {width})"):
            self.decode(q, nest.variables)
            self.all(nest.body)
        self.names = before
        for local, s in sums.items():
            whole = self._combined(parts[local], s, width)
            self.add(f"{self.names[local]} = {self._of(s, self.names[local], whole)};")

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
            self.statement(s, is_group)

    def statement(self, s: Statement, is_group: bool = False) -> None:
        """A thread's statement, or one that is executed once for a group: one thread stores."""
        first: AbstractContextManager[None] = nullcontext()
        if is_group and isinstance(s, (Store, Update)):
            first = self.block("if (tid == 0)")
        match s:
            case For(_, Role.SEQUENTIAL):
                self._sequential(s, is_group)
            case For():
                self._shared(s)
            case Let(local, value):
                self.let(local, value)
            case Set(local, value):
                self.add(f"{self.names[local]} = {self.value(value)};")
            case Accumulate(local, op, value):
                self.add(f"{self.names[local]} = {self._accumulated(local, op, value)};")
            case Store(buffer, index, value, guard):
                text = self.put(buffer, index, self.stored_value(value))
                with first:
                    self.add(text if guard is None else f"if {self.value(guard)} {{ {text} }}")
            case Update(buffer, index, value):
                dtype, old = self.types[buffer], self.load(buffer, index)
                text = scalars.apply("add", [old, self.value(value)], dtype, dtype)
                with first:
                    self.add(self.put(buffer, index, text))
            case Barrier(scope):
                if scope is Role.SUBGROUP:
                    self.add("subgroupBarrier();")
                else:
                    self.add("workgroupBarrier();")
                    if self.meets:
                        self.add("storageBarrier();")
            case Matmul() | LibraryCall():
                raise AssertionError("matmuls are kernels of their own")
            case _:
                assert_never(s)

    def _sequential(self, loop: For, is_group: bool) -> None:
        name = self.vars[loop.var] = self.new(f"i_{loop.var.name}")
        end = str(loop.var.extent) if loop.stop is None else self.index(loop.stop)
        with self.block(f"for (var {name} = 0; {name} < {end}; {name}++)"):
            self.all(loop.body, is_group)

    def _accumulated(self, local: str, op: str, value: Value) -> str:
        """A product that is added is rounded once."""
        name, dtype = self.names[local], value.dtype
        match value:
            case Apply("mul", (a, b)) if op == "add" and dtype.is_float and not dtype.is_narrow:
                return f"fma({self.value(a)}, {self.value(b)}, {name})"
            case _:
                return scalars.apply(op, [name, self.value(value)], dtype, dtype)
