"""Mapped kernels as WGSL: loops that are shared out, sums that are combined, barriers.

Every thread of a group names the same values; stores outside loops are the first thread's. What is
decided is decided in the kernel: nothing here chooses. A thread takes one iteration at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from treadle.codegen.c_like import statements
from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.columns import Columns
from treadle.kernel.access import accesses
from treadle.kernel.geometry import Combine
from treadle.kernel.mapped import Nest, shared_of, width_of
from treadle.kernel.nodes import (
    Accumulate,
    For,
    Kernel,
    Let,
    Matmul,
    Role,
    Statement,
    Store,
    Update,
)
from treadle.kernel.packs import packed_stores

AHEAD, SHORT = 4, 8  # iterations that are written out one after the other, and their statements


def _together(nest: Nest, width: int) -> int:
    """Iterations of a sum that a thread makes at once, so that several loads are under way."""
    is_short = len(nest.body) <= SHORT and all(isinstance(s, Accumulate) for s in nest.body)
    return AHEAD if is_short and nest.count % (AHEAD * width) == 0 else 1


class Writer(Columns):
    """Writes a kernel's statements, a group's or a thread's."""

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        super().__init__(kernel, halves)
        self.packed = self.geometry.packs & halves
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

    # Sums of groups

    def shared_out(self, loop: For) -> None:
        statements.sum_up(self, loop)

    def iterations(self, nest: Nest, role: Role, sums: Collection[str]) -> None:
        """Iterations shared out among the threads of a group."""
        width, q = width_of(role, self.geometry), self.new("q")
        tid = f"tid % {width}" if width < self.geometry.share else "tid"
        every = width * _together(nest, width)
        with self.block(f"for (var {q} = {tid}; {q} < {nest.count}; {q} += {every})"):
            for first in range(0, every, width):
                self.decode(f"({q} + {first})" if first else q, nest.variables)
                self.all(nest.body)

    def combine(self, local: str, part: str, s: Accumulate, loop: For) -> None:
        whole = self._combined(part, s, width_of(loop.role, self.geometry))
        self.add(f"{local} = {self._with(s, local, whole)};")

    def _combined(self, part: str, s: Accumulate, width: int) -> str:
        """Parts of all threads, always in the same order; every thread has the same bits."""
        warp = min(self.warp, width)
        for far in (2**i for i in reversed(range(warp.bit_length() - 1))):
            other = f"subgroupShuffleXor({part}, {far}u)"
            self.add(f"{part} = {self._of(s, part, other)};")
        count = width // warp
        if count == 1:
            return part
        parts = self.share("parts", self._part_type(s), count)
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
        """Elements that fill a pack of a thread are stored together."""
        every = [] if is_group else packed_stores(body, 4)
        packs = [p for p in every if p[0].buffer in self.packed & self.halves]
        names: dict[int, str] = {}
        before = self.settled, dict(self.known)
        self.settled = self._settled(body, packs)
        for s in body:
            pack = next((p for p in packs if any(x is s for x in p)), None)
            if pack is None or not isinstance(s, Store):
                statements.statement(self, s, is_group)
                continue
            names[id(s)] = self.new("lane")
            self.add(f"let {names[id(s)]} = f16({self.stored_value(s.value)});")
            if all(id(x) in names for x in pack):
                four = ", ".join(names[id(x)] for x in pack)
                text = f"{self.pack(s.buffer, pack[0].index)} = vec4<f16>({four});"
                self.add(text if s.guard is None else f"if {self.value(s.guard)} {{ {text} }}")
        self.settled, self.known = before

    def _settled(self, body: Sequence[Statement], packs: list[tuple[Store, ...]]) -> frozenset[str]:
        """Buffers in packs that a thread's statements write after all else, if at all."""
        if not all(isinstance(s, Let | Store | Accumulate) for s in body):
            return frozenset()
        late = {id(x) for pack in packs for x in pack}
        early = {s.buffer for s in body if isinstance(s, Store) and id(s) not in late}
        return self.packed - early

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

    def scanned(self, nest: Nest, role: Role) -> None:
        raise AssertionError("the target shares no scans")

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
