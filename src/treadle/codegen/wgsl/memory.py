"""Memory of one WGSL function: arenas, the workgroup's, and packs of four."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.codegen.c_like.expressions import Expressions
from treadle.codegen.wgsl import scalars
from treadle.kernel.index import Index
from treadle.kernel.nodes import Kernel, Load


class Memory(Expressions):
    """`memory3` and `p3` are the arena of the kernel's fourth buffer, and where it starts there."""

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        super().__init__(kernel, scalars)
        self.halves = halves  # buffers of float16 that take two bytes
        self.packed: frozenset[str] = frozenset()  # those of them that are bound in packs of four
        self.floats: frozenset[str] = frozenset()  # of float32 that are bound as such
        self.shared: list[str] = []  # declarations of a workgroup's memory
        self.outside = {b.name: i for i, b in enumerate(kernel.buffers)}
        self.inside: dict[str, str] = {}  # names of scratch
        self.starts: dict[str, str] = {}  # where a group's part of it starts
        self.guard = ""  # what must hold for loads to be where they say; "" for nothing

    def share(self, stem: str, type_: str, count: int) -> str:
        """Memory of a workgroup."""
        name = self.new(stem)
        self.shared.append(f"var<workgroup> {name}: array<{type_}, {max(1, count)}>;")
        return name

    def element(self, buffer: str, index: Index) -> str:
        if buffer in self.packed:
            return self._of_pack(buffer, index)
        at = self._guarded_index(index)
        if buffer in self.inside:
            start = f"{self.starts[buffer]} + " if buffer in self.starts else ""
            return f"{self.inside[buffer]}[{start}{at}]"
        number = self.outside[buffer]
        return f"memory{number}[p{number} + u32({at})]"

    def _guarded_index(self, index: Index) -> str:
        at = self.index(index)
        return f"select(0, {at}, {self.guard})" if self.guard else at

    def _of_pack(self, buffer: str, index: Index) -> str:
        """An element of a pack: the same of every one, where it is known which."""
        if all(factor % 4 == 0 for _, factor in index.terms):
            number = index.offset % 4
            return f"{self.whole_pack(buffer, index - number)}[{number}]"
        return f"{self.pack(buffer, index)}[u32({self._guarded_index(index)}) & 3u]"

    def whole_pack(self, buffer: str, index: Index) -> str:
        """A pack of which one element is wanted now, maybe others later."""
        return self.pack(buffer, index)

    def pack(self, buffer: str, index: Index, number: int = 0) -> str:
        """Four elements of a packed buffer from where an index says, or so many packs after."""
        at, more = self._guarded_index(index), f" + {number}u" if number else ""
        if buffer in self.inside:
            return f"{self.inside[buffer]}[(u32({at}) >> 2u){more}]"
        memory = self.outside[buffer]
        return f"memory{memory}[p{memory} + (u32({at}) >> 2u){more}]"

    def load(self, wanted: Load) -> str:
        return self.read(wanted.buffer, wanted.index)

    def read(self, buffer: str, index: Index) -> str:
        dtype, element = self.types[buffer], self.element(buffer, index)
        if buffer in self.halves:
            return f"f32({element})"
        if buffer in self.inside:
            return f"({element} != 0u)" if dtype is dtypes.bool_ else element
        return scalars.loaded(element, dtype)

    def put(self, buffer: str, index: Index, text: str) -> str:
        dtype, element = self.types[buffer], self.element(buffer, index)
        if buffer in self.halves:
            return f"{element} = f16({text});"  # which it is exactly: it was rounded
        is_plain = buffer in self.inside and dtype is not dtypes.bool_
        return f"{element} = {text if is_plain else scalars.stored(text, dtype)};"
