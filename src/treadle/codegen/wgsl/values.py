"""Values and indices of one WGSL function."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.memory import Memory
from treadle.kernel.access import changed_in
from treadle.kernel.index import Data, Index, Var
from treadle.kernel.nodes import Apply, Kernel, Literal, Load, Value
from treadle.kernel.traverse import subvalues

# Of many operations.
LONG = frozenset(["exp", "log", "tanh", "pow", "erf", "sin", "cos", "div", "sqrt", "rsqrt"])


class Values(Memory):
    """Locals, values and indices of a thread."""

    def __init__(self, kernel: Kernel, halves: frozenset[str] = frozenset()):
        super().__init__(kernel, halves)
        self.dtypes: dict[str, DType] = {}  # of locals
        self.known: dict[str, str] = {}  # names of what was computed, by its text
        self.settled: frozenset[str] = frozenset()  # buffers that do not change meanwhile

    def named(self, var: Var) -> str:
        return self.new(f"i_{_safe(var.name)}")

    def counted(self, name: str, number: str, sign: str = "", divisor: int = 1) -> str:
        found = f"i32(u32({number}) {sign} {divisor}u)" if sign else number
        return f"let {name} = {found};"

    # Values

    def let(self, local: str, value: Value) -> None:
        """A local as a variable of the function: no compiler takes it for a constant."""
        name, text = self.new(f"v_{_safe(local)}"), self.value(value, local in self.unrounded)
        self.names[local], self.dtypes[local] = name, value.dtype
        self.add(f"var {name}: {scalars.register(value.dtype)} = {text};")

    def change(self, local: str, value: Value, to: Callable[[str], str]) -> None:
        name = self.names[local]
        self.add(f"{name} = {to(name)};")

    def local(self, name: str) -> str:
        return self.names[name]

    def stored_value(self, value: Value) -> str:
        """A value on its way to memory: rounded here where nothing inside was."""
        if not (self.exceeds and value.dtype.is_narrow) or isinstance(value, (Load, Literal)):
            return self.value(value)
        return scalars.rounded(self.value(value, True), value.dtype)

    def value(self, value: Value, exceeds: bool = False) -> str:
        match value:
            case Apply("where", (guard, chosen, Literal() as other)) if _is_long(chosen):
                return self._where(guard, chosen, other, exceeds)
            case Apply(op) if op in LONG:
                return self._named(super().value(value, exceeds), value.dtype)
            case _:
                return super().value(value, exceeds)

    def _named(self, text: str, dtype: DType) -> str:
        """What takes long as a local; the one that there is, where equal numbers were computed.

        Numbers that may have changed since have no name that lasts: locals that are set, and
        what lies in memory that the kernel writes.
        """
        if self._changes.search(text):
            return text
        if text not in self.known:
            self.known[text] = self.new("long")
            self.add(f"var {self.known[text]}: {scalars.register(dtype)} = {text};")
        return self.known[text]

    def whole_pack(self, buffer: str, index: Index) -> str:
        """It is loaded once, where nothing changes it before the rest is wanted."""
        text = self.pack(buffer, index)
        if buffer not in self.settled:
            return text
        if text not in self.known:
            self.known[text] = self.new("pack")
            self.add(f"let {self.known[text]} = {text};")
        return self.known[text]

    @functools.cached_property
    def _changes(self) -> re.Pattern[str]:
        """What stands in the text of numbers that may change."""
        made = [f"memory{self.outside[b.name]}" for b in self.kernel.outputs]
        names = [f"v_{_safe(local)}_\\d+" for local in sorted(changed_in(self.kernel.body))]
        words = [*made, *names, r"part_\d+", r"total", r"sums", r"shared_\d+", r"own_\d+"]
        return re.compile(rf"\b(?:{'|'.join(words)})\b")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        before = dict(self.known)
        with super().block(head):
            yield
        self.known = before

    def _where(self, guard: Value, chosen: Value, other: Value, exceeds: bool) -> str:
        """A long computation is made only where it is wanted: threads beside it want the same."""
        name, test = self.new("chosen"), self.value(guard)
        type_ = scalars.register(chosen.dtype)
        self.add(f"var {name}: {type_} = {self.value(other, exceeds)};")
        with self.block(f"if ({test})"):
            self.add(f"{name} = {self.value(chosen, exceeds)};")
        return name

    def applied(self, value: Apply, given: list[str], exceeds: bool) -> str:
        if all(isinstance(o, Literal) for o in value.operands):
            # Compilers refuse constant expressions that overflow or divide by 0.
            given[0] = f"runtime_{scalars.register(value.operands[0].dtype)}({given[0]})"
        return super().applied(value, given, exceeds)

    def guarded(self, guard: Value, inner: Value, other: Value) -> str:
        """Both are computed: where the guard says no, loads are of a buffer's first element."""
        name = self.new("guard")
        self.add(f"let {name} = {self.value(guard)};")
        before, self.guard = self.guard, name if not self.guard else f"({self.guard} && {name})"
        found = self.value(inner)
        self.guard = before
        return f"select({self.value(other)}, {found}, {name})"

    # Indices

    def position_dtype(self, index: Index) -> DType:
        return dtypes.int32

    def data(self, atom: Data) -> str:
        type_ = scalars.register(self.dtypes[atom.local])
        return f"held_{type_}({self.names[atom.local]}, {max(1, atom.extent)})"

    def divided(self, inner: Index, sign: str, divisor: int) -> str:
        return f"i32(u32({self.index(inner)}) {sign} {divisor}u)"


def _is_long(value: Value) -> bool:
    return any(isinstance(v, Apply) and v.op in LONG for v in subvalues(value))


def _safe(name: str) -> str:
    return re.sub(r"[^0-9a-zA-Z]", "_", name)
