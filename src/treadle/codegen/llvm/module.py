"""The functions of a program, gathered as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from treadle.base import dtypes
from treadle.codegen.llvm import mathematics
from treadle.codegen.llvm.emitter import Function
from treadle.codegen.llvm.multiply import Tile, tile_function
from treadle.kernel.machine import Machine

_NAMED = re.compile(r"@([\w.]+)")


@dataclass
class Module:
    """Functions of a program as text: kernels, and what they call."""

    machine: Machine
    functions: list[Function] = field(default_factory=list)
    declarations: set[str] = field(default_factory=set)
    _defined: set[str] = field(default_factory=set)
    _tiles: dict[Tile, str] = field(default_factory=dict)
    _tables: dict[tuple[int, ...], str] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.machine.width

    def add(self, function: Function) -> None:
        self.functions.append(function)
        self.declarations |= function.declarations

    def elementary(self, name: str, width: int, element: str) -> str:
        """The name of an elementary function, defined when first asked for."""
        dtype = dtypes.float64 if element == "double" else dtypes.float32
        full = mathematics.function_name(name, width, dtype)
        if full not in self._defined:
            self._defined.add(full)
            self.add(mathematics.define(name, width, dtype, self.machine))
        return full

    def tile(self, tile: Tile) -> str:
        """The name of a matmul's tile function, defined when first asked for."""
        if tile not in self._tiles:
            self._tiles[tile] = f"tile.{len(self._tiles)}"
            self.add(tile_function(tile, self._tiles[tile]))
        return self._tiles[tile]

    def table(self, numbers: tuple[int, ...]) -> str:
        """The name of a table of 64-bit numbers."""
        return self._tables.setdefault(numbers, f"table.{len(self._tables)}")

    def text(self) -> str:
        return self._text(self.functions)

    def texts(self, size: int) -> list[str]:
        """Parts of some lines each, to be compiled side by side; they call one another."""
        parts: list[list[Function]] = [[]]
        lines = 0
        for function in self.functions:
            if lines >= size:
                parts.append([])
                lines = 0
            parts[-1].append(function)
            lines += len(function.lines)
        if len(parts) == 1:
            return [self.text()]
        for function in self.functions:
            function.linkage = ""
        return [self._text(part) for part in parts]

    def _text(self, part: list[Function]) -> str:
        """Some functions, with the tables that they read and the others that they call."""
        functions = [function.text() for function in part]
        named = {name for text in functions for name in _NAMED.findall(text)}
        tables = [
            f"@{name} = internal constant [{len(numbers)} x i64] "
            f"[{', '.join(f'i64 {n}' for n in numbers)}], align 64"
            for numbers, name in self._tables.items()
            if name in named
        ]
        called = named - {function.name for function in part}
        others = [f.declaration() for f in self.functions if f.name in called]
        return "\n".join([*sorted(self.declarations), *others, *tables, *functions])
