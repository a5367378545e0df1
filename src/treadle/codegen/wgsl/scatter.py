"""Sums whose indices are data, in a fixed order and without atomics on floats.

A workgroup owns some rows of the result. Its threads look at as many indices as they are, and note
which are its own; then each adds what belongs to its columns, update after update. The sums have
the bits that one thread would give them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from treadle.base import dtypes
from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.values import Values
from treadle.kernel.access import locals_in
from treadle.kernel.geometry import Scattered
from treadle.kernel.index import Index
from treadle.kernel.mapped import geometry_of
from treadle.kernel.nodes import Kernel
from treadle.kernel.scatter import scatter_of


class Scatter(Values):
    """Writes such a kernel for one of its workgroups."""

    def __init__(self, kernel: Kernel, template: Scattered, halves: frozenset[str]):
        super().__init__(kernel, halves)
        found = scatter_of(kernel)
        assert found is not None
        self.found, self.rows = found, template.rows
        self.threads = geometry_of(kernel).threads
        self.dtype = self.types[found.update.buffer]

    def written(self) -> list[str]:
        found, threads = self.found, self.threads
        buffer, index = found.update.buffer, found.update.index
        self.sums = self.share("sums", scalars.memory(self.dtype), self.rows * found.width)
        self.near = self.share("near", "i32", threads)
        self.shared += ["var<workgroup> noted: atomic<u32>;", "var<workgroup> is_any: u32;"]
        self.add(f"let first = i32(block) * {self.rows};")
        self.add(f"let owned = min({self.rows}, {found.row.extent} - first) * {found.width};")
        with self._over_rows():
            none = f"{scalars.register(self.dtype)}(0)"
            self.add(f"{self.sums}[q] = {none if found.is_filled else self.read(buffer, index)};")
        with self.block(f"for (var start = 0; start < {found.count}; start += {threads})"):
            self.add("if (index == 0) { atomicStore(&noted, 0u); }")
            self.add("workgroupBarrier();")
            self._look()
            self.add("workgroupBarrier();")
            self.add("if (index == 0) { is_any = atomicLoad(&noted); }")
            with self.block("if (workgroupUniformLoad(&is_any) != 0u)"):
                self._add_up()
            self.add("workgroupBarrier();")
        with self._over_rows():
            self.add(self.put(buffer, index, f"{self.sums}[q]"))
        return self.lines

    @contextmanager
    def _over_rows(self) -> Iterator[None]:
        """Every element that the workgroup owns."""
        found = self.found
        with self.block(f"for (var q = index; q < owned; q += {self.threads})"):
            self.add(f"let row = first + q / {found.width};")
            self.add(f"let column = q % {found.width};")
            self.decode("column", found.columns)
            self.names[found.row.local], self.dtypes[found.row.local] = "row", dtypes.int32
            yield

    def _look(self) -> None:
        """Which of a chunk of updates are of the workgroup's rows."""
        found = self.found
        self.add("let update = start + index;")
        self.add("var at = -1;")
        with self.block(f"if (update < {found.count})"):
            self.decode("update", found.updates)
            for let in found.needed({found.row.local}):
                self.let(let.local, let.value)
            self.add(f"at = {self.index(Index(((found.row, 1),)))} - first;")
            held = "" if found.held is None else f" || !{self.value(found.held)}"
            self.add(f"if (at < 0 || at >= {self.rows}{held}) {{ at = -1; }}")
        self.add(f"{self.near}[index] = at;")
        self.add("if (at >= 0) { atomicStore(&noted, 1u); }")

    def _add_up(self) -> None:
        """What was noted, added in order by the threads that have the columns."""
        found = self.found
        with self.block(f"for (var c = index; c < {found.width}; c += {self.threads})"):
            self.decode("c", found.columns)
            with self.block(f"for (var h = 0; h < {self.threads}; h++)"):
                self.add(f"let own = {self.near}[h];")
                with self.block("if (own >= 0)"):
                    self.add("let update = start + h;")
                    self.decode("update", found.updates)
                    for let in found.needed(locals_in(found.added)):
                        self.let(let.local, let.value)
                    at = f"{self.sums}[own * {found.width} + c]"
                    given = [at, self.value(found.added)]
                    self.add(f"{at} = {scalars.apply('add', given, self.dtype, self.dtype)};")
