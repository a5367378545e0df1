"""The functions of a program, gathered as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.base import dtypes
from treadle.codegen.llvm import mathematics
from treadle.codegen.llvm.emitter import Function


@dataclass
class Module:
    """Functions of a program as text: kernels, and what they call."""

    width: int
    functions: list[str] = field(default_factory=list)
    declarations: set[str] = field(default_factory=set)
    _defined: set[str] = field(default_factory=set)

    def add(self, function: Function) -> None:
        self.functions.append(function.text())
        self.declarations |= function.declarations

    def elementary(self, name: str, width: int, element: str) -> str:
        """The name of an elementary function, defined when first asked for."""
        dtype = dtypes.float64 if element == "double" else dtypes.float32
        full = mathematics.function_name(name, width, dtype)
        if full not in self._defined:
            self._defined.add(full)
            for other in mathematics.needs(name):
                self.elementary(other, width, element)
            self.add(mathematics.define(name, width, dtype))
        return full

    def text(self) -> str:
        return "\n".join([*sorted(self.declarations), *self.functions])
