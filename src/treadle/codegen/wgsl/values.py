"""Values, indices and lines of one WGSL function."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import assert_never

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.wgsl import scalars
from treadle.kernel.arithmetic import SMOOTH
from treadle.kernel.index import Atom, Bounded, Data, Index, Quotient, Remainder, Var
from treadle.kernel.nodes import (
    Apply,
    Convert,
    Guarded,
    Kernel,
    Literal,
    Load,
    Local,
    Position,
    Value,
    Within,
)


class Lines:
    """Lines of a function, and what names stand for where they are written.

    `memory3` and `p3` are the arena of the kernel's fourth buffer, and where it starts there.
    """

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        self.kernel, self.halves = kernel, halves  # buffers of float16 that take two bytes
        unrounded = None if kernel.geometry is None else kernel.geometry.unrounded
        self.exceeds = unrounded is not None  # narrow floats may have excess precision
        self.unrounded = unrounded or frozenset()
        self.lines: list[str] = []
        self.shared: list[str] = []  # declarations of a workgroup's memory
        self.depth, self.count = 1, 0
        self.types = {b.name: b.dtype for b in (*kernel.buffers, *kernel.scratch)}
        self.outside = {b.name: i for i, b in enumerate(kernel.buffers)}
        self.inside: dict[str, str] = {}  # names of scratch
        self.starts: dict[str, str] = {}  # where a group's part of it starts
        self.names: dict[str, str] = {}  # of locals
        self.dtypes: dict[str, DType] = {}
        self.vars: dict[Var, str] = {}
        self.guard = ""  # what must hold for loads to be where they say; "" for nothing

    def add(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def new(self, stem: str) -> str:
        self.count += 1
        return f"{re.sub(r'[^0-9a-zA-Z]', '_', stem)}_{self.count}"

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.add(f"{head} {{")
        self.depth += 1
        names = dict(self.names)
        yield
        self.names = names
        self.depth -= 1
        self.add("}")

    def share(self, stem: str, type_: str, count: int) -> str:
        """Memory of a workgroup."""
        name = self.new(stem)
        self.shared.append(f"var<workgroup> {name}: array<{type_}, {max(1, count)}>;")
        return name

    def decode(self, flat: str, loops: Sequence[Var]) -> None:
        """Variables from one number that counts them all, the last the fastest."""
        rest = flat
        for i, var in enumerate(reversed(loops)):
            name = self.vars[var] = self.new(f"i_{var.name}")
            if i == len(loops) - 1:
                self.add(f"let {name} = {rest};")
                break
            self.add(f"let {name} = i32(u32({rest}) % {var.extent}u);")
            after = self.new("rest")
            self.add(f"let {after} = i32(u32({rest}) / {var.extent}u);")
            rest = after

    # Memory

    def element(self, buffer: str, index: Index) -> str:
        at = self.index(index)
        if self.guard:
            at = f"select(0, {at}, {self.guard})"
        if buffer in self.inside:
            start = f"{self.starts[buffer]} + " if buffer in self.starts else ""
            return f"{self.inside[buffer]}[{start}{at}]"
        number = self.outside[buffer]
        return f"memory{number}[p{number} + u32({at})]"

    def load(self, buffer: str, index: Index) -> str:
        dtype, element = self.types[buffer], self.element(buffer, index)
        if buffer in self.inside:
            return f"({element} != 0u)" if dtype is dtypes.bool_ else element
        return f"f32({element})" if buffer in self.halves else scalars.loaded(element, dtype)

    def put(self, buffer: str, index: Index, text: str) -> str:
        dtype, element = self.types[buffer], self.element(buffer, index)
        if buffer in self.halves:
            return f"{element} = f16({text});"  # which it is exactly: it was rounded
        is_plain = buffer in self.inside and dtype is not dtypes.bool_
        return f"{element} = {text if is_plain else scalars.stored(text, dtype)};"

    def let(self, local: str, value: Value) -> None:
        """A local as a variable of the function: no compiler takes it for a constant."""
        name, text = self.new(f"v_{local}"), self.value(value, local in self.unrounded)
        self.names[local], self.dtypes[local] = name, value.dtype
        self.add(f"var {name}: {scalars.register(value.dtype)} = {text};")

    # Values

    def stored_value(self, value: Value) -> str:
        """A value on its way to memory: rounded here where nothing inside was."""
        if not (self.exceeds and value.dtype.is_narrow) or isinstance(value, (Load, Literal)):
            return self.value(value)
        return scalars.rounded(self.value(value, True), value.dtype)

    def value(self, value: Value, exceeds: bool = False) -> str:
        """A value; not rounded to its dtype where only smooth arithmetic uses it."""
        exceeds = exceeds and self.exceeds
        match value:
            case Literal():
                return scalars.literal(value)
            case Load(buffer, index):
                return self.load(buffer, index)
            case Local(name):
                return self.names[name]
            case Position(index, dtype):
                return scalars.convert(f"({self.index(index)})", dtypes.int32, dtype)
            case Apply(op, operands, dtype):
                inside = self.exceeds and op in SMOOTH
                given = [
                    self.value(o, inside or (exceeds and op == "where" and i > 0))
                    for i, o in enumerate(operands)
                ]
                if all(isinstance(o, Literal) for o in operands):
                    # Compilers refuse constant expressions that overflow or divide by 0.
                    type_ = scalars.register(operands[0].dtype)
                    given[0] = f"runtime_{type_}({given[0]})"
                return scalars.apply(op, given, operands[-1].dtype, dtype, exceeds)
            case Convert(inner, dtype):
                if exceeds and dtype.is_narrow and inner.dtype is dtypes.float32:
                    return self.value(inner)
                return scalars.convert(self.value(inner), inner.dtype, dtype)
            case Within(index, low, high):
                at, (least, most) = self.index(index), index.range
                bounds = [f"({at}) >= {low}"] if least < low else []
                bounds += [f"({at}) < {high}"] if most >= high else []
                return f"({' && '.join(bounds) or 'true'})"
            case Guarded(guard, inner, other):
                return self._guarded(guard, inner, other)
            case _:
                assert_never(value)

    def _guarded(self, guard: Value, inner: Value, other: Value) -> str:
        """Both are computed: where the guard says no, loads are of a buffer's first element."""
        name = self.new("guard")
        self.add(f"let {name} = {self.value(guard)};")
        before, self.guard = self.guard, name if not self.guard else f"({self.guard} && {name})"
        found = self.value(inner)
        self.guard = before
        return f"select({self.value(other)}, {found}, {name})"

    def index(self, index: Index) -> str:
        parts = [
            self._atom(atom) if factor == 1 else f"{self._atom(atom)} * {factor}"
            for atom, factor in index.terms
        ]
        if index.offset or not parts:
            parts.append(str(index.offset))
        return " + ".join(parts)

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var():
                return self.vars[atom]
            case Data(local, extent):
                type_ = scalars.register(self.dtypes[local])
                return f"held_{type_}({self.names[local]}, {max(1, extent)})"
            case Quotient(inner, divisor):
                return f"i32(u32({self.index(inner)}) / {divisor}u)"
            case Remainder(inner, divisor):
                return f"i32(u32({self.index(inner)}) % {divisor}u)"
            case Bounded(inner, _):
                return f"({self.index(inner)})"
