"""Values and addresses as C++ text, one at a time or for all lanes that a thread takes at once.

A local that differs from lane to lane is an array; accesses that lie together are packs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.c_like.expressions import Expressions
from treadle.codegen.cuda import scalars
from treadle.kernel.access import changed_in, loads_in, locals_in, plain_loads
from treadle.kernel.index import (
    Atom,
    Bounded,
    Data,
    Index,
    Var,
    atom_range,
    data_locals,
    uses,
)
from treadle.kernel.nodes import (
    Apply,
    Convert,
    For,
    Guarded,
    Kernel,
    Load,
    Local,
    Position,
    Space,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.kernel.packs import is_pack
from treadle.kernel.scatter import guarded_sum
from treadle.kernel.traverse import subvalues, under_guards


class Lanes(Expressions):
    """Lines of a function, and what names stand for where they are written."""

    def __init__(self, kernel: Kernel, is_wide: bool):
        super().__init__(kernel, scalars)
        # Of what counts iterations; indices are as wide as each of them needs.
        self.index_type, self.unsigned = ("i64", "u64") if is_wide else ("int", "unsigned")
        self.pointers = {b.name: f"p{i}" for i, b in enumerate(kernel.buffers)}
        self.constant = {b.name for b in kernel.inputs}  # what the kernel does not write
        self.lane: Var | None = None
        self.width = 1
        self.spread: set[str] = set()  # locals that are arrays of lanes
        self.changing: set[str] = set()  # those that must be, whatever they start from
        self.unrolling = False
        self.narrow: set[str] = set()  # locals of lanes that come from narrow floats alone
        self.packs: dict[Load, str] = {}
        self.loaded: dict[Load, str] = {}  # loads that were made early, the same in every lane
        self.staged: set[str] = set()  # buffers of packs
        self.held: dict[str, str] = {}  # rows of sums in registers
        self.at_pack = ""  # which pack of a row the loop at hand is at

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        spread = set(self.spread)
        with super().block(head):
            yield
        self.spread = spread

    def sequential(self, loop: For) -> AbstractContextManager[None]:
        name = self.vars[loop.var] = self.new(_safe(loop.var.name))
        end = str(loop.var.extent) if loop.stop is None else self.index(loop.stop)
        if loop.unroll != 1:
            self.add(f"#pragma unroll {max(1, loop.unroll)}")
        return self.block(f"for (int {name} = 0; {name} < {end}; ++{name})")

    def written_out(self, name: str, count: object, start: int = 0) -> AbstractContextManager[None]:
        """Iterations of a known number, one after the other without a loop."""
        self.add("#pragma unroll")
        return self.block(f"for (int {name} = {start}; {name} < {count}; ++{name})")

    @contextmanager
    def decoded_block(self, head: str, flat: str, loops: Sequence[Var]) -> Iterator[None]:
        with self.block(head):
            self.decode(flat, loops)
            yield

    def named(self, var: Var) -> str:
        return self.new(_safe(var.name))

    def counted(self, name: str, number: str, sign: str = "", divisor: int = 1) -> str:
        if not sign:
            return f"const int {name} = (int){number};"
        type_ = "int" if sign == "%" else self.index_type
        found = f"({self.unsigned}){number} {sign} {divisor}u"
        return f"const {type_} {name} = ({type_})({found});"

    # Lanes

    @contextmanager
    def in_lanes(
        self, var: Var, width: int, body: Sequence[Statement], sums: Collection[str] = ()
    ) -> Iterator[None]:
        before = self.lane, self.width, self.spread, self.changing
        self.lane, self.width = var, width
        self.spread = self.spread.union(sums)
        self.changing = changed_in(body)
        yield
        self.lane, self.width, self.spread, self.changing = before

    def differs(self, value: Value) -> bool:
        """Whether a value is another one in each lane."""
        if self.lane is None:
            return False
        if locals_in(value) & self.spread:
            return True
        indexed = (v for v in subvalues(value) if isinstance(v, (Load, Position, Within)))
        return any(self.index_differs(v.index) for v in indexed)

    def index_differs(self, index: Index) -> bool:
        if self.lane is None:
            return False
        by_data = set(data_locals(index)) & self.spread
        return bool(by_data) or any(uses(atom, self.lane) for atom, _ in index.terms)

    def is_pack(self, index: Index) -> bool:
        """Whether the lanes' elements lie together, the first at a whole pack."""
        if self.lane is None or set(data_locals(index)) & self.spread:
            return False
        return is_pack(index, self.lane, self.width)

    @contextmanager
    def packed(self, value: Value) -> Iterator[None]:
        """Loads of a value that lie together, made at once before the lanes are walked."""
        before, ways = dict(self.packs), dict[Load, list[str]]()
        for part, guards in under_guards(value, self._is_shared):
            if isinstance(part, Load):
                texts = [f"{'' if holds else '!'}{self.value(guard)}" for guard, holds in guards]
                ways.setdefault(part, []).append(" && ".join(texts))
        ways |= {x: [""] for x in loads_in(value) if x.buffer in self.staged}
        for load, guarded in ways.items():
            if load in self.packs or load.buffer in self.held:
                continue
            if load.buffer not in self.staged and not self.is_pack(load.index):
                continue
            # One element may be read in several branches: it must be there for each of them.
            if "" not in guarded and len(guarded) < loads_in(value).count(load):
                continue
            held = "" if "" in guarded else f"if ({' || '.join(dict.fromkeys(guarded))}) "
            self.packs[load] = self._loaded_pack(load, held)
        yield
        self.packs = before

    def _loaded_pack(self, load: Load, held: str) -> str:
        name, type_ = self.new("pack"), scalars.register(load.dtype)
        self.add(f"{type_} {name}[{self.width}];")
        if load.buffer in self.staged:
            self.add(f"unpacked<{self.width}>({load.buffer}[{self.at_pack}], {name});")
            return name
        verb = "fetch" if load.buffer in self.constant else "load"
        self.add(f"{held}{verb}<{self.width}>({self._address(load.buffer, load.index)}, {name});")
        return name

    def _in_memory(self, buffer: str, index: Index) -> str:
        return f"{self.pointers[buffer]}[{self.index(index)}]"

    def _address(self, buffer: str, index: Index) -> str:
        return f"{self.pointers[buffer]} + {self.index(index)}"

    def early(self, body: Sequence[Statement], guard: str = "") -> None:
        """Loads of some statements made before all of them, where no store comes between.

        Where a guard is given they are made only if it holds, as the statements are.
        The compiler does not know that buffers lie apart: a load after a store waits for it.
        """
        written: set[str] = set()
        for s in body:
            if isinstance(s, For):
                return
            if not isinstance(s, Store) or s.guard is None:
                for load in plain_loads(s):
                    if load.buffer not in written:
                        self._hold(load, guard)
            if isinstance(s, (Store, Update)):
                written.add(s.buffer)

    def _hold(self, load: Load, guard: str) -> None:
        if load in self.packs or load in self.loaded or data_locals(load.index):
            return
        if not self.index_differs(load.index):
            name, type_ = self.new("held"), scalars.register(load.dtype)
            element = f"get({self._in_memory(load.buffer, load.index)})"
            found = f"{guard} ? {element} : ({type_})0" if guard else element
            self.add(f"const {type_} {name} = {found};")
            self.loaded[load] = name
        elif self.is_pack(load.index):
            self.packs[load] = self._loaded_pack(load, f"if ({guard}) " if guard else "")

    def _is_shared(self, value: Value) -> bool:
        """Whether all lanes of a pack compute a value, or none: they agree on its guard."""
        if not isinstance(value, Guarded):
            return True
        return isinstance(value.guard, Within) and self._agrees(value.guard)

    def _agrees(self, guard: Within) -> bool:
        if not self.index_differs(guard.index):
            return True
        is_even = guard.low % self.width == 0 and guard.high % self.width == 0
        return is_even and self.is_pack(guard.index)

    def unrolled(self, line: str, width: int | None = None, start: int = 0) -> None:
        self.add("#pragma unroll")
        self.add(f"for (int u = {start}; u < {width or self.width}; ++u) {line}")

    def each(self, line: Callable[[], str], value: Value | None = None) -> None:
        """A line for every lane; what a value loads together is loaded before."""
        with self.packed(value) if value is not None else nullcontext():
            self.unrolling = True
            text = line()
            self.unrolling = False
            self.unrolled(text)

    # Statements

    def let(self, local: str, value: Value) -> None:
        name, type_ = self.new(_safe(local)), scalars.register(value.dtype)
        is_array = self.lane is not None and (self.differs(value) or local in self.changing)
        exceeds = local in self.unrounded
        if not is_array:
            text = self.value(value, exceeds)
            self.names[local] = name
            self.spread.discard(local)
            self.add(f"{type_} {name} = {text};")
            return
        self.add(f"{type_} {name}[{self.width}];")
        self.each(lambda: f"{name}[u] = {self.value(value, exceeds)};", value)
        if self._is_of_narrow(value) and local not in self.changing:
            self.narrow.add(local)
        self.names[local] = name
        self.spread = self.spread | {local}

    def change(self, local: str, value: Value, to: Callable[[str], str]) -> None:
        """A local becomes what a function makes of it, by way of a value."""
        name = self.names[local]
        if local in self.spread:
            self.each(lambda: f"{name}[u] = {to(f'{name}[u]')};", value)
        else:
            self.add(f"{name} = {to(name)};")

    def store(self, buffer: str, index: Index, value: Value, guard: Within | None) -> None:
        if buffer in self.staged:
            self._stage(buffer, value)
            return
        is_same = not self.index_differs(index) and not self.differs(value)
        is_same = is_same and buffer not in self.held
        if self.lane is None or is_same:
            self.add(self._put(buffer, index, value, guard))
        elif isinstance(value, Load) and value.buffer in self.staged:
            type_ = f"Pack<{scalars.memory(self.types[buffer])}, {self.width}>"
            row = f"{value.buffer}[{self.at_pack}]"
            self.add(f"*({type_} *)({self._address(buffer, index)}) = {row};")
        else:
            self._store_lanes(buffer, index, value, guard)

    def _store_lanes(self, buffer: str, index: Index, value: Value, guard: Within | None) -> None:
        with self.packed(value):
            if buffer in self.held:
                self.each(lambda: f"{self._own(buffer)} = {self._typed(value)};")
            elif guard is None and self.is_pack(index):
                array, at = self.array(value), self._address(buffer, index)
                self.add(f"store<{self.width}>({at}, {array});")
            else:
                self.each(lambda: self._put(buffer, index, value, guard))

    def _put(self, buffer: str, index: Index, value: Value, guard: Within | None) -> str:
        text = f"put({self._in_memory(buffer, index)}, {self._typed(value)});"
        return text if guard is None else f"if ({self.value(guard)}) {text}"

    def _stage(self, buffer: str, value: Value) -> None:
        """A pack to where a row is staged: as it is in memory, or as it was computed."""
        row = f"{buffer}[{self.at_pack}]"
        if isinstance(value, Load) and value.buffer not in self.staged:
            address = self._address(value.buffer, value.index)
            read = f"*(const Pack<{scalars.memory(value.dtype)}, {self.width}> *)({address})"
            if value.buffer in self.constant:
                read = f"fetched<{self.width}>({address})"
            self.add(f"{row} = {read};")
            return
        with self.packed(value):
            self.add(f"packed<{self.width}>({row}, {self.array(value)});")

    def array(self, value: Value) -> str:
        """A value of all lanes as an array."""
        if isinstance(value, Local) and value.name in self.spread:
            return self.names[value.name]
        name = self.new("lane")
        self.add(f"{scalars.register(value.dtype)} {name}[{self.width}];")
        self.each(lambda: f"{name}[u] = {self.value(value, True)};")
        return name

    def _own(self, row: str) -> str:
        """The element of a row in registers that is the lane's at hand."""
        return f"{self.held[row]}[{self.at_pack}][u]"

    def _typed(self, value: Value) -> str:
        return f"({scalars.register(value.dtype)})({self.value(value, True)})"

    def update(self, buffer: str, index: Index, value: Value) -> None:
        dtype = self.types[buffer]
        if buffer in self.held:
            own = self._own(buffer)
            self.each(lambda: f"{own} = {own} + {self.value(value)};", value)
            return

        def line() -> str:
            at = self._in_memory(buffer, index)
            found = scalars.apply("add", [f"get({at})", self.value(value)], dtype, dtype)
            return f"put({at}, ({scalars.register(dtype)})({found}));"

        if self.lane is None:
            self.add(line())
        else:
            self.each(line, value)

    def add_together(self, buffer: str, index: Index, value: Value) -> None:
        """A sum in memory that other threads add to: a step for each element, or for a pack."""
        guard, added = guarded_sum(value)
        own = {b.name: b.space for b in self.kernel.scratch}
        if own.get(buffer) is Space.PRIVATE:
            self.update(buffer, index, value)
            return
        is_pack = self.types[buffer] is dtypes.float32 and self.is_pack(index)
        is_pack = is_pack and buffer not in own  # packs are added to in global memory alone
        if self.lane is not None and is_pack and (guard is None or not self.differs(guard)):
            with nullcontext() if guard is None else self.block(f"if ({self.value(guard)})"):
                found = self.array(added)
                self.add(f"add_pack<{self.width}>({self._address(buffer, index)}, {found});")
            return

        def line() -> str:
            held = "" if guard is None else f"if ({self.value(guard)}) "
            at, type_ = self._address(buffer, index), scalars.register(self.types[buffer])
            return f"{held}add_to({at}, ({type_})({self.value(added)}));"

        if self.lane is None:
            self.add(line())
        else:
            self.each(line, value)

    # Values

    def load(self, wanted: Load) -> str:
        if wanted.buffer in self.held:
            return self._own(wanted.buffer)
        if self.unrolling and wanted in self.packs:
            return f"{self.packs[wanted]}[u]"
        if wanted in self.loaded:
            return self.loaded[wanted]
        if wanted.buffer in self.constant:
            return f"fixed({self._address(wanted.buffer, wanted.index)})"
        return f"get({self._in_memory(wanted.buffer, wanted.index)})"

    def position_dtype(self, index: Index) -> DType:
        return dtypes.int32 if is_narrow(index) else dtypes.int64

    def applied(self, value: Apply, given: list[str], exceeds: bool) -> str:
        is_fast = value.op == "exp" and value.dtype is dtypes.float32 and self.differs(value)
        if is_fast and self._is_of_narrow(value):
            return self._fast_exp(value.operands[0], given[0])
        return super().applied(value, given, exceeds)

    def tested(self, guard: Within) -> str:
        """Where all lanes agree the first one tells, so that it is told once."""
        is_walked, self.unrolling = self.unrolling, not self._agrees(guard)
        self.unrolling = self.unrolling and is_walked
        at = self.index(guard.index)
        self.unrolling = is_walked
        return at

    def guarded(self, guard: Value, inner: Value, other: Value) -> str:
        return f"({self.value(guard)} ? {self.value(inner)} : {self.value(other)})"

    def _fast_exp(self, value: Value, text: str) -> str:
        """A fast exponential; what is taken off in all lanes alike is taken off in one go."""
        match value:
            case Apply("sub", (a, b)) if self.lane is not None and not self.differs(b):
                return f"n_exp({self.value(a)}, {self.value(b)})"
            case _:
                return f"n_exp({text})"

    def _is_of_narrow(self, value: Value) -> bool:
        """Whether what differs from lane to lane comes from narrow floats, which tell far less
        apart than a fast exponential does."""

        def is_narrow_part(part: Value) -> bool:
            if isinstance(part, Local):
                return part.name in self.narrow or part.dtype.is_narrow
            return part.dtype.is_narrow or isinstance(part, (Convert, Apply))

        def is_wide(part: Value) -> bool:
            return self.differs(part) and not part.dtype.is_narrow

        differing = filter(self.differs, subvalues(value, is_wide))
        return all(map(is_narrow_part, differing))

    def local(self, name: str) -> str:
        is_array = self.unrolling and name in self.spread
        return f"{self.names[name]}[u]" if is_array else self.names[name]

    # Indices: of the first lane, or of the lane at hand while lanes are walked

    def cast(self, index: Index) -> str:
        return "(int)" if is_narrow(index) else "(i64)"

    def variable(self, var: Var) -> str:
        name = self.vars[var]
        return f"({name} + u)" if self.unrolling and var == self.lane else name

    def data(self, atom: Data) -> str:
        return f"held<i64>({self.local(atom.local)}, {atom.extent})"

    def divided(self, inner: Index, sign: str, divisor: int) -> str:
        signed, unsigned = ("int", "unsigned") if is_narrow(inner) else ("i64", "u64")
        return f"({signed})(({unsigned})({self.index(inner)}) {sign} {divisor}u)"


def is_narrow(index: Index) -> bool:
    """Whether 32 bits hold an index and whatever it is the sum of."""
    reach = abs(index.offset)
    for atom, factor in index.terms:
        low, high = _reach(atom)
        reach += abs(factor) * max(abs(low), abs(high))
    return reach < 1 << 31


def _reach(atom: Atom) -> tuple[int, int]:
    """What an atom may be, also where no guard holds it."""
    return atom.index.range if isinstance(atom, Bounded) else atom_range(atom)


def _safe(name: str) -> str:
    return "v" + re.sub(r"\W", "_", name)
