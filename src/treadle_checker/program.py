"""A program as records: kernels of loops over buffers, their calls, and what buffers hold.

A class is recorded as the list of its fields, in order; an alternative begins with its kind. What
the annotations and tables below do not know is refused. Loop variables and locals are names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

from treadle_checker import reading
from treadle_checker.field import DTYPES
from treadle_checker.index import Guard, Index, read_guard, read_index
from treadle_checker.reading import Reader, among, declared, integer, maybe, need, several

NO_INDEX = Index(0)
ITERATION = "iteration"  # a variable of what buffers hold in a repeat that is no scan's
SHARED_OUT = ("group", "subgroup")
SIDE_BY_SIDE = ("parallel", "grid", *SHARED_OUT, "vector")
SUMS = ("add", "mul", "max", "min")
_name, _signed = reading.text(), integer(-(2**60))


def size_of(dtype: str) -> int:
    return max(1, DTYPES[dtype] // 8)


# Values


def _number(given: Any) -> int | float | Fraction:
    """Whole, a fraction, a float's hexadecimal form, an infinity or nan."""
    if isinstance(given, (bool, int)):
        return given
    told = reading.text(400)(given)
    try:
        return Fraction(told) if "/" in told else float.fromhex(told)
    except (ValueError, OverflowError, ZeroDivisionError) as wrong:
        raise reading.Unreadable(f"{told[:50]!r} is no number") from wrong


@dataclass(frozen=True, slots=True)
class Value:
    """A scalar. `name` is that of the op, the buffer or the local.

    Kinds: literal, load, local, position (an index as a number), apply, convert, within
    (low ≤ index < high) and guarded: the second operand where the first holds, else the third.
    """

    kind: str
    dtype: str = "bool"
    name: str = ""
    index: Index = NO_INDEX
    low: int = 0
    high: int = 0
    number: int | float | Fraction = 0
    operands: tuple[Value, ...] = ()


_dtype = among(DTYPES)
_PARTS: dict[str, Reader] = {
    "dtype": _dtype, "name": _name, "index": read_index, "low": _signed, "high": _signed,
    "number": _number,
}  # fmt: skip
# What follows the kind, and how many operands follow that; −1 is any number of them.
VALUES = {
    "literal": ("dtype number", 0), "load": ("dtype name index", 0), "local": ("dtype name", 0),
    "position": ("dtype index", 0), "within": ("index low high", 0), "convert": ("dtype", 1),
    "guarded": ("dtype", 3), "apply": ("dtype name", -1),
}  # fmt: skip


def _value(given: Any) -> Value:
    need(isinstance(given, list) and given, given, "a value")
    fields, count = VALUES[among(VALUES)(given[0])]
    names = fields.split()
    own, operands = given[1 : len(names) + 1], given[len(names) + 1 :]
    fits = len(own) == len(names) and count in (-1, len(operands))
    need(fits, given, f"a value with {fields}")
    found = {name: _PARTS[name](part) for name, part in zip(names, own, strict=True)}
    return Value(given[0], operands=several(_value)(operands), **found)


Signed = Annotated[int, _signed]
Some = Annotated[int, integer(1)]
Dtype = Annotated[str, _dtype]
At = Annotated[Index, read_index]
Scalar = Annotated[Value, _value]
Names = Annotated[tuple[str, ...], several(_name)]
_named = reading.row(reading.pair, _name, integer())
Variables = Annotated[tuple[tuple[str, int], ...], several(_named)]


# Statements


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    dtype: Dtype
    size: int
    lanes: Some = 1
    space: Annotated[str, among(["global", "shared", "private"])] = "global"
    pack: Some = 1

    @property
    def nbytes(self) -> int:
        return self.size * size_of(self.dtype) * self.lanes


@dataclass(frozen=True, slots=True, eq=False)
class For:
    var: str
    extent: Annotated[int, integer(0, 2**40)]
    role: Annotated[str, among([*SIDE_BY_SIDE, "sequential"])]
    stop: Annotated[Index | None, maybe(read_index)]
    lanes: Annotated[int, integer(1, 1024)]
    body: Annotated[tuple[Statement, ...], _body]


@dataclass(frozen=True, slots=True, eq=False)
class Assign:
    """A local is named ("let"), changed ("set") or accumulated into by an op; "so far" where
    iterations read what those up to them gave."""

    kind: Annotated[str, among(["let", "set", *SUMS, *(f"{op} so far" for op in SUMS)])]
    local: str
    value: Scalar

    @property
    def op(self) -> str:
        return self.kind.split()[0]

    @property
    def scanned(self) -> bool:
        return self.kind != self.op


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Where the guard holds, if there is one; what "add"s is added to what is there.

    Iterations that stand side by side may "add together" to one element, in any order.
    """

    buffer: str
    index: At
    value: Scalar
    guard: Annotated[Value | None, maybe(_value)]
    how: Annotated[str, among(["set", "add", "add together"])]

    @property
    def adds(self) -> bool:
        return self.how != "set"


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    scope: Annotated[str, among(SHARED_OUT)]


@dataclass(frozen=True, slots=True)
class Axis:
    """Elements along a matrix: at multiples of a stride, or listed."""

    count: Some
    stride: Signed
    listed: Annotated[tuple[int, ...], several(_signed)]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of a buffer along some axes, from an index on: two of a matrix, none of a number."""

    buffer: str
    index: At
    axes: Annotated[tuple[Axis, ...], several(declared(Axis), 100)]


@dataclass(frozen=True, slots=True, eq=False)
class Matmul:
    """A product of matrices, to which a bias is added, with factors."""

    target: Annotated[Block, _matrix]
    left: Annotated[Block, _matrix]
    right: Annotated[Block, _matrix]
    adds: bool
    bias: Annotated[Block | None, maybe(_block)]
    scales: Blocks


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    name: str
    results: Blocks
    operands: Blocks


_block = declared(Block)
Blocks = Annotated[tuple[Block, ...], several(_block, 100)]


def _matrix(given: Any) -> Any:
    found = _block(given)
    need(len(found.axes) == 2, given, "a matrix")
    return found


Statement = For | Assign | Store | Barrier | Matmul | Library
_STATEMENTS = (For, Assign, Store, Barrier, Matmul, Library)
_KINDS = {kind.__name__.lower(): declared(kind) for kind in _STATEMENTS}
_body = several(reading.one_of_kinds(_KINDS))


# What buffers hold


@dataclass(frozen=True, slots=True)
class Layout:
    """At `address` the element at `element`, for all variables' values; zero outside guards.

    With an op it is a part of a sum: what the op gives of the elements over the variables `summed`.
    """

    variables: Variables
    address: At
    element: Annotated[tuple[Index, ...], several(read_index, 100)]
    guards: Annotated[tuple[Guard, ...], several(read_guard, 100)]
    summed: Variables = ()
    op: Annotated[str, among(["", *SUMS])] = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """All elements in order."""


@dataclass(frozen=True, slots=True)
class Work:
    purpose: str


Content = Whole | Layout | Work


def in_iteration(content: Content, number: int) -> Content:
    """What is held in an iteration of a repeat that is no scan's."""
    if not isinstance(content, Layout):
        return content
    address, *element = (i.fixed(ITERATION, number) for i in (content.address, *content.element))
    guards = tuple((i.fixed(ITERATION, number), low, high) for i, low, high in content.guards)
    return replace(content, address=address, element=tuple(element), guards=guards)


_CONTENTS = {kind.__name__.lower(): declared(kind) for kind in (Whole, Layout, Work)}

_pairs = several(reading.row(reading.pair, integer(), integer()))


@dataclass(frozen=True, slots=True)
class Binding:
    """What a buffer holds of a value of a graph, by the scope's name, node and output.

    A call that reads it is looked at with this value generic, or with those that it is made `of`:
    of a sort's result a search needs that it is in order.
    """

    buffer: str
    scope: str
    node: int
    output: int
    content: Annotated[Content, reading.one_of_kinds(_CONTENTS)]
    since: Annotated[int, integer(-1)]  # the number of a call; −1 is the start
    of: Annotated[tuple[tuple[int, int], ...], _pairs] = ()


_threads = integer(1, 2**16)
_buffers = several(declared(Buffer))
Buffers = Annotated[tuple[Buffer, ...], _buffers]


@dataclass(frozen=True, slots=True)
class Geometry:
    threads: Annotated[int, _threads]
    share: Annotated[int, _threads]
    warp: Annotated[int, _threads]
    combine: Annotated[str, among(["exchange", "in order", "tree"])]
    template: Annotated[tuple[Any, ...], several(lambda part: part, 100)]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    name: str
    inputs: Buffers
    outputs: Buffers
    scratch: Buffers
    geometry: Annotated[Geometry | None, maybe(declared(Geometry))]
    body: Annotated[tuple[Statement, ...], _body]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.inputs + self.outputs


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    kernel: int
    arguments: Variables  # buffers, and elements that an iteration moves on
    lines: Names  # of the model


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    calls: Annotated[tuple[Call, ...], several(declared(Call))]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    length: int
    reverse: bool
    scope: str  # of the scan whose iterations it makes, or the one that it stands in
    steps: Annotated[tuple[Step, ...], _steps]


Step = Phase | Repeat
_steps = several(reading.one_of_kinds({"phase": declared(Phase), "repeat": declared(Repeat)}))


def _by_name(given: Any) -> dict[str, Buffer]:
    found = {b.name: b for b in _buffers(given)}
    need(len(found) == len(given), given, "a list of buffers with different names")
    return found


_output = reading.row(reading.pair, _name, reading.row(reading.pair, integer(), integer()), _name)


def _offsets(given: Any) -> dict[str, int]:
    return dict(several(_named)(given))


@dataclass(frozen=True, eq=False)
class Program:
    kernels: Annotated[tuple[Kernel, ...], several(declared(Kernel, as_record=True))]
    buffers: Annotated[dict[str, Buffer], _by_name]
    leaves: Names
    constants: Names
    updated: Names
    outputs: Annotated[tuple[Any, ...], several(_output)]
    steps: Annotated[tuple[Step, ...], _steps]
    bindings: Annotated[tuple[Binding, ...], several(declared(Binding))]
    arena: int
    offsets: Annotated[dict[str, int], _offsets]


read_kernel, read_program = declared(Kernel, as_record=True), declared(Program, as_record=True)


# Walking


def phases_of(steps: tuple[Step, ...], times: int = 1) -> Iterator[tuple[Phase, int]]:
    """Every phase in order, and how often the repeat around it goes."""
    for step in steps:
        if isinstance(step, Phase):
            yield step, times
        else:
            yield from phases_of(step.steps, step.length)


def calls_of(steps: tuple[Step, ...]) -> Iterator[Call]:
    """Every call in order."""
    return (call for phase, _ in phases_of(steps) for call in phase.calls)


def walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement in order, a loop before what it contains."""
    for s in body:
        yield s
        if isinstance(s, For):
            yield from walk(s.body)


def assigned_in(loop: For) -> tuple[set[str], list[Assign]]:
    """Locals that a loop names, and assignments to others, which are around it."""
    every = [s for s in walk(loop.body) if isinstance(s, Assign)]
    named = {s.local for s in every if s.kind == "let"}
    return named, [s for s in every if s.local not in named]


def values_of(s: Statement) -> Iterator[Value]:
    """What a statement computes by itself, and all that this is made of."""
    pending = [s.value] if isinstance(s, (Store, Assign)) else []
    pending += [s.guard] if isinstance(s, Store) and s.guard is not None else []
    while pending:
        value = pending.pop()
        yield value
        pending += value.operands
