"""Writes one LLVM function: values, blocks and loops, as text."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from treadle.base.dtypes import DType
from treadle.base.quick import quick

# LLVM's names of element types. bool is i1 in registers; memory holds it as i8. Narrow floats are
# bits in memory and float in registers.
ELEMENT = {
    "float64": "double",
    "float32": "float",
    "int64": "i64",
    "int32": "i32",
    "uint32": "i32",
    "int8": "i8",
    "uint8": "i8",
    "bool": "i1",
}
_SUFFIX = {"double": "f64", "float": "f32"}


@quick
@dataclass(frozen=True, slots=True)
class Reg:
    """A value of LLVM: its type and how it is written (a register or a constant)."""

    type: str
    text: str

    def __str__(self) -> str:
        return f"{self.type} {self.text}"


def vector(element: str, width: int) -> str:
    """A vector type; a width of 1 is the element itself."""
    return element if width == 1 else f"<{width} x {element}>"


def width_of(type_: str) -> int:
    return int(type_[1 : type_.index(" ")]) if type_.startswith("<") else 1


def element_of(type_: str) -> str:
    return type_[type_.index("x") + 2 : -1] if type_.startswith("<") else type_


def suffix(type_: str) -> str:
    """The part of an intrinsic's name that says its type: v8f32, f64, i32."""
    element, width = element_of(type_), width_of(type_)
    name = _SUFFIX.get(element, element)
    return name if width == 1 else f"v{width}{name}"


def number(value: float | int | bool, type_: str) -> Reg:
    """A constant of a type, spread over all lanes of a vector."""
    element, width = element_of(type_), width_of(type_)
    text = _scalar_text(value, element)
    if width == 1:
        return Reg(type_, text)
    return Reg(type_, "<" + ", ".join(f"{element} {text}" for _ in range(width)) + ">")


def like(a: Reg, b: Reg | float) -> Reg:
    """A Python number as a constant of another value's type."""
    return b if isinstance(b, Reg) else number(b, a.type)


def listed(values: Sequence[int], element: str) -> Reg:
    """A constant vector of integers, one for each lane."""
    lanes = ", ".join(f"{element} {value}" for value in values)
    return Reg(vector(element, len(values)), f"<{lanes}>")


def _scalar_text(value: float | int | bool, element: str) -> str:
    if element == "i1":
        return "true" if value else "false"
    if element.startswith("i"):
        return str(int(value))
    if element == "float":
        value = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


@dataclass
class Loop:
    """A counted loop in the making: its counter, and values carried from iteration to iteration."""

    counter: Reg
    carried: tuple[Reg, ...]
    next: tuple[Reg, ...] = ()  # set inside: the carried values of the next iteration
    results: tuple[Reg, ...] = ()  # set at the end: the last carried values


@dataclass
class Function:
    """One function. Instructions are appended to the current block."""

    name: str
    parameters: Sequence[Reg]
    result: str = "void"
    linkage: str = "internal"
    attributes: str = "nounwind"
    lines: list[str] = field(default_factory=lambda: ["entry:"])
    declarations: set[str] = field(default_factory=set)
    block: str = "entry"
    count: int = 0
    # What instructions without effects gave, by their text: those of the innermost loop or branch
    # last. A value is there while control can only have come through where it was computed.
    known: list[dict[str, Reg]] = field(default_factory=lambda: [{}])

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def value(self, type_: str, instruction: str) -> Reg:
        """An instruction with a result."""
        register = f"%{self.fresh()}"
        self.lines.append(f"  {register} = {instruction}")
        return Reg(type_, register)

    def pure(self, type_: str, instruction: str) -> Reg:
        """An instruction without effects: written where it is first asked for, and not again.

        LLVM would find most of those that are equal, and take longer than for not reading them.
        """
        for scope in self.known:
            if instruction in scope:
                return scope[instruction]
        found = self.known[-1][instruction] = self.value(type_, instruction)
        return found

    def do(self, instruction: str) -> None:
        """An instruction without a result."""
        self.lines.append(f"  {instruction}")

    def label(self, name: str) -> None:
        """A block that begins anywhere: what blocks before it computed may not be there."""
        self.known[-1].clear()
        self._begin(name)

    def _begin(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.block = name

    def jump(self, name: str) -> None:
        self.do(f"br label %{name}")

    def branch(self, condition: Reg, then: str, otherwise: str) -> None:
        self.do(f"br i1 {condition.text}, label %{then}, label %{otherwise}")

    def binary(self, op: str, a: Reg, b: Reg | float) -> Reg:
        return self.pure(a.type, f"{op} {a.type} {a.text}, {like(a, b).text}")

    def compare(self, op: str, a: Reg, b: Reg | float) -> Reg:
        """`op` is like "icmp slt" or "fcmp olt"."""
        bits = vector("i1", width_of(a.type))
        return self.value(bits, f"{op} {a.type} {a.text}, {like(a, b).text}")

    def select(self, condition: Reg, a: Reg, b: Reg | float) -> Reg:
        return self.value(a.type, f"select {condition}, {a}, {like(a, b)}")

    def convert(self, op: str, a: Reg, to: str) -> Reg:
        return self.pure(to, f"{op} {a} to {to}")

    def call(self, name: str, result: str, *arguments: Reg) -> Reg:
        return self.value(result, f"call {result} @{name}({', '.join(map(str, arguments))})")

    def intrinsic(self, name: str, first: Reg, *others: Reg | float) -> Reg:
        """llvm.NAME of one type: the result has the type of the first argument."""
        arguments = [first, *(like(first, other) for other in others)]
        full = f"llvm.{name}.{suffix(first.type)}"
        types = ", ".join(a.type for a in arguments)
        self.declarations.add(f"declare {first.type} @{full}({types})")
        return self.call(full, first.type, *arguments)

    def offset(self, base: Reg, by: Reg | int, element: str = "i8") -> Reg:
        """An address some elements further on."""
        distance = by if isinstance(by, Reg) else number(by, "i64")
        return self.pure("ptr", f"getelementptr inbounds {element}, {base}, {distance}")

    def load(self, type_: str, address: Reg, align: int) -> Reg:
        return self.value(type_, f"load {type_}, {address}, align {align}")

    def store(self, value: Reg, address: Reg, align: int) -> None:
        self.do(f"store {value}, {address}, align {align}")

    def splat(self, scalar: Reg, width: int) -> Reg:
        """A scalar in all lanes."""
        if width == 1:
            return scalar
        type_ = vector(scalar.type, width)
        first = self.pure(type_, f"insertelement {type_} poison, {scalar}, i64 0")
        lanes = f"<{width} x i32> zeroinitializer"
        return self.pure(type_, f"shufflevector {first}, {type_} poison, {lanes}")

    def extract(self, x: Reg, lane: int) -> Reg:
        return self.pure(element_of(x.type), f"extractelement {x}, i64 {lane}")

    def insert(self, x: Reg, scalar: Reg, lane: int) -> Reg:
        return self.value(x.type, f"insertelement {x}, {scalar}, i64 {lane}")

    def lanes_from(self, x: Reg, start: int, count: int) -> Reg:
        """So many lanes from one on; the last stands for those that there are not."""
        width = width_of(x.type)
        if width == count:
            return x
        if width == 1:
            return self.insert(Reg(vector(x.type, count), "poison"), x, 0)
        lanes = [min(start + i, width - 1) for i in range(count)]
        return self.shuffle(x, Reg(x.type, "poison"), lanes)

    def lanes_of(self, parts: Sequence[Reg], width: int) -> Reg:
        """The first so many lanes of vectors of one type, whose number is a power of two."""
        found = list(parts)
        while len(found) > 1:
            both = range(2 * width_of(found[0].type))
            found = [self.shuffle(a, b, both) for a, b in zip(found[::2], found[1::2], strict=True)]
        return self.extract(found[0], 0) if width == 1 else self.lanes_from(found[0], 0, width)

    def by_lane(self, type_: str, make: Callable[[int], Reg]) -> Reg:
        """A vector whose lanes are made one after the other."""
        result = Reg(type_, "poison")
        for lane in range(width_of(type_)):
            result = self.insert(result, make(lane), lane)
        return result

    def shuffle(self, a: Reg, b: Reg, lanes: Sequence[int]) -> Reg:
        """Lanes of two vectors by their numbers, those of the second counted on."""
        type_ = vector(element_of(a.type), len(lanes))
        return self.value(type_, f"shufflevector {a}, {b}, {listed(lanes, 'i32')}")

    def phi(self, *sources: tuple[Reg, str]) -> Reg:
        """The value of the block that control came from."""
        type_ = sources[0][0].type
        pairs = ", ".join(f"[ {value.text}, %{block} ]" for value, block in sources)
        return self.value(type_, f"phi {type_} {pairs}")

    def masked_load(self, address: Reg, mask: Reg, other: Reg, align: int) -> Reg:
        """Lanes outside the mask are not touched, and have the other value."""
        type_ = other.type
        name = f"llvm.masked.load.{suffix(type_)}.p0"
        self.declarations.add(f"declare {type_} @{name}(ptr, i32, {mask.type}, {type_})")
        return self.call(name, type_, address, Reg("i32", str(align)), mask, other)

    def gather(self, addresses: Reg, mask: Reg, other: Reg, align: int) -> Reg:
        """What lies at each lane's address; lanes outside the mask have the other value."""
        type_ = other.type
        name = f"llvm.masked.gather.{suffix(type_)}.v{width_of(type_)}p0"
        self.declarations.add(
            f"declare {type_} @{name}({addresses.type}, i32, {mask.type}, {type_})"
        )
        return self.call(name, type_, addresses, Reg("i32", str(align)), mask, other)

    def masked_store(self, value: Reg, address: Reg, mask: Reg, align: int) -> None:
        name = f"llvm.masked.store.{suffix(value.type)}.p0"
        self.declarations.add(f"declare void @{name}({value.type}, ptr, i32, {mask.type})")
        self.do(f"call void @{name}({value}, {address}, i32 {align}, {mask})")

    @contextmanager
    def when(self, condition: Reg) -> Iterator[None]:
        """Instructions for where a condition holds."""
        then, after = self.fresh("then"), self.fresh("join")
        self.branch(condition, then, after)
        self.known.append({})
        self._begin(then)
        yield
        self.jump(after)
        self.known.pop()
        self._begin(after)

    @contextmanager
    def loop(
        self, start: Reg | int, stop: Reg | int, step: Reg | int, carried: Sequence[Reg] = ()
    ) -> Iterator[Loop]:
        """start, start + step, … below stop; no iteration at all if start is not below stop."""
        before, head, body, after = (self.block, *map(self.fresh, ("head", "body", "after")))
        self.jump(head)
        self.known.append({})
        self._begin(head)
        at = len(self.lines)
        counter = Reg("i64", f"%{self.fresh('i')}")
        values = tuple(Reg(c.type, f"%{self.fresh('c')}") for c in carried)
        self.lines += [""] * (1 + len(values))  # the phis, written when the end is known
        self.branch(self.compare("icmp slt", counter, stop), body, after)
        self._begin(body)
        state = Loop(counter, values)
        yield state
        following = self.binary("add nsw", counter, step)
        end = self.block
        self.jump(head)
        pairs = [
            (counter, like(counter, start), following),
            *zip(values, carried, state.next, strict=True),
        ]
        for i, (phi, first, later) in enumerate(pairs):
            source = f"[ {first.text}, %{before} ], [ {later.text}, %{end} ]"
            self.lines[at + i] = f"  {phi.text} = phi {phi.type} {source}"
        self.known.pop()
        self._begin(after)
        state.results = values

    def declaration(self) -> str:
        """For a module that calls it and does not have it."""
        types = ", ".join(p.type for p in self.parameters)
        return f"declare {self.linkage} {self.result} @{self.name}({types})"

    def text(self) -> str:
        head = f"define {self.linkage} {self.result} @{self.name}"
        parameters = ", ".join(map(str, self.parameters))
        body = "\n".join(self.lines)
        return f"{head}({parameters}) {self.attributes} {{\n{body}\n}}\n"


def fetch(f: Function, address: Reg, level: int) -> None:
    """A line asked for: into the first-level cache by 3, into the second by 2."""
    f.declarations.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    f.do(f"call void @llvm.prefetch.p0({address}, i32 0, i32 {level}, i32 1)")


def multiply_add(f: Function, a: Reg, b: Reg, c: Reg, has_fma: bool) -> Reg:
    """a · b + c of a sum: rounded once where one instruction does that, else twice."""
    return f.intrinsic("fma", a, b, c) if has_fma else f.binary("fadd", f.binary("fmul", a, b), c)


def element_type(dtype: DType) -> str:
    return ELEMENT[dtype.name]
