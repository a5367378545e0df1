"""Values and indices as expressions of a C-like language, and the lines of one function.

A dialect says how numbers are written (`scalars`) and how elements are read; what values mean, and
where narrow floats may be left unrounded, is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import assert_never

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.c_like.scalars import Scalars, unrounded
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


class Expressions(ABC):
    """Lines of a function, and what names stand for where they are written."""

    def __init__(self, kernel: Kernel, scalars: Scalars):
        self.kernel, self.scalars = kernel, scalars
        unrounded = None if kernel.geometry is None else kernel.geometry.unrounded
        self.exceeds = unrounded is not None  # narrow floats may have excess precision
        self.unrounded = unrounded or frozenset()
        self.lines: list[str] = []
        self.depth, self.count = 1, 0
        self.types = {b.name: b.dtype for b in (*kernel.buffers, *kernel.scratch)}
        self.names: dict[str, str] = {}  # of locals
        self.vars: dict[Var, str] = {}

    # Lines

    def add(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def new(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.add(f"{head} {{")
        self.depth += 1
        names = dict(self.names)
        yield
        self.names = names
        self.depth -= 1
        self.add("}")

    def decode(self, flat: str, loops: Sequence[Var]) -> None:
        """Variables from one number that counts them all, the last the fastest."""
        rest = flat
        for i, var in enumerate(reversed(loops)):
            name = self.vars[var] = self.named(var)
            if i == len(loops) - 1:
                self.add(self.counted(name, rest))
                break
            self.add(self.counted(name, rest, "%", var.extent))
            after = self.new("rest")
            self.add(self.counted(after, rest, "/", var.extent))
            rest = after

    @abstractmethod
    def named(self, var: Var) -> str:
        """A new name for a variable."""

    @abstractmethod
    def counted(self, name: str, number: str, sign: str = "", divisor: int = 1) -> str:
        """The declaration of a number of iterations, or of what is left of it by a division."""

    # Values

    def value(self, value: Value, exceeds: bool = False) -> str:
        """A value; not rounded to its dtype where only smooth arithmetic uses it."""
        exceeds = exceeds and self.exceeds
        match value:
            case Literal():
                return self.scalars.literal(unrounded(value) if exceeds else value)
            case Load():
                return self.load(value)
            case Local(name):
                return self.local(name)
            case Position(index, dtype):
                text = f"({self.index(index)})"
                return self.scalars.convert(text, self.position_dtype(index), dtype)
            case Apply(op, operands):
                inside = self.exceeds and op in SMOOTH
                given = [
                    # A cast rounds before arithmetic: it may be compared with what was rounded.
                    self.value(
                        o,
                        (inside and not isinstance(o, Convert))
                        or (exceeds and op == "where" and i > 0),
                    )
                    for i, o in enumerate(operands)
                ]
                return self.applied(value, given, exceeds)
            case Convert(inner, dtype):
                if exceeds and dtype.is_narrow and inner.dtype is dtypes.float32:
                    return self.value(inner)  # whoever stores it rounds it
                return self.scalars.convert(self.value(inner), inner.dtype, dtype)
            case Within(index, low, high):
                at, (least, most) = self.tested(value), index.range
                bounds = [f"({at}) >= {low}"] if least < low else []
                bounds += [f"({at}) < {high}"] if most >= high else []
                return f"({' && '.join(bounds) or 'true'})"
            case Guarded(guard, inner, other):
                return self.guarded(guard, inner, other)
            case _:
                assert_never(value)

    def applied(self, value: Apply, given: list[str], exceeds: bool) -> str:
        return self.scalars.apply(value.op, given, value.operands[-1].dtype, value.dtype, exceeds)

    def accumulated(self, op: str, value: Value, old: str) -> str:
        """What an accumulation becomes; a product that is added is rounded once."""
        dtype = value.dtype
        match value:
            case Apply("mul", (a, b)) if op == "add" and dtype.is_float and not dtype.is_narrow:
                return f"{self.scalars.FMA}({self.value(a)}, {self.value(b)}, {old})"
            case _:
                return self.scalars.apply(op, [old, self.value(value)], dtype, dtype)

    @abstractmethod
    def load(self, wanted: Load) -> str: ...

    @abstractmethod
    def local(self, name: str) -> str: ...

    @abstractmethod
    def position_dtype(self, index: Index) -> DType:
        """What an index is computed in."""

    def tested(self, guard: Within) -> str:
        """The index that a guard compares."""
        return self.index(guard.index)

    @abstractmethod
    def guarded(self, guard: Value, inner: Value, other: Value) -> str: ...

    # Indices

    def index(self, index: Index) -> str:
        cast = self.cast(index)
        parts = []
        for atom, factor in index.terms:
            text = f"{cast}{self._atom(atom)}"
            parts.append(text if factor == 1 else f"{text} * {factor}")
        if index.offset or not parts:
            parts.append(str(index.offset))
        return " + ".join(parts)

    def cast(self, index: Index) -> str:
        """What the terms of an index are converted by."""
        return ""

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var():
                return self.variable(atom)
            case Data():
                return self.data(atom)
            case Quotient(inner, divisor):
                return self.divided(inner, "/", divisor)
            case Remainder(inner, divisor):
                return self.divided(inner, "%", divisor)
            case Bounded(inner, _):
                return f"({self.index(inner)})"

    def variable(self, var: Var) -> str:
        return self.vars[var]

    @abstractmethod
    def data(self, atom: Data) -> str:
        """An index that is data, held to its axis."""

    @abstractmethod
    def divided(self, inner: Index, sign: str, divisor: int) -> str: ...
