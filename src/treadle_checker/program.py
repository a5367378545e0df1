"""A program as records: kernels of loops over buffers, their calls, and what buffers hold.

Every node is a list whose first element is its kind; the tables below say what follows, and
whatever they do not know is rejected. Loop variables and locals are names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from treadle_checker.reading import (
    Unreadable,
    boolean,
    integer,
    items,
    one_of,
    record,
    row,
    string,
)

BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "uint32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
ROLES = ("parallel", "grid", "group", "subgroup", "vector", "sequential")
SHARED_OUT = ("group", "subgroup")
ACCUMULATING = ("add", "mul", "max", "min")


@dataclass(frozen=True, slots=True)
class Index:
    """offset + Σ factor · atom. An atom that is text is a loop's variable."""

    offset: int
    terms: tuple[tuple[int, str | Atom], ...] = ()


@dataclass(frozen=True, slots=True)
class Atom:
    """What is no variable: a "quotient" or "remainder" by `size`; an index that a guard holds below
    it ("bounded"), a local that is clamped below it ("data"), or any number below it ("block")."""

    kind: str
    of: Index | str
    size: int


@dataclass(frozen=True, slots=True)
class Value:
    """A scalar. `name` is that of the op, the buffer or the local.

    Kinds: literal, load, local, position (an index as a number), apply, convert, within
    (low ≤ index < high) and guarded: the second operand where the first holds, else the third.
    """

    kind: str
    dtype: str
    operands: tuple[Value, ...] = ()
    name: str = ""
    index: Index = Index(0)
    low: int = 0
    high: int = 0
    number: int | float | Fraction = 0


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    dtype: str
    size: int
    lanes: int = 1
    space: str = "global"
    pack: int = 1

    @property
    def nbytes(self) -> int:
        return self.size * BYTES[self.dtype] * self.lanes


@dataclass(frozen=True, slots=True, eq=False)
class For:
    var: str
    extent: int
    role: str
    stop: Index | None
    lanes: int
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Assign:
    """A local is named ("let"), changed ("set") or accumulated into by an op."""

    kind: str
    local: str
    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """An update, if it adds."""

    buffer: str
    index: Index
    value: Value
    guard: Value | None = None
    adds: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    scope: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Elements along a matrix: at multiples of a stride, or listed."""

    count: int
    stride: int
    listed: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        every = self.listed or (0, (self.count - 1) * self.stride)
        return min(every), max(every)


@dataclass(frozen=True, slots=True)
class Matrix:
    buffer: str
    index: Index
    rows: Axis
    columns: Axis


@dataclass(frozen=True, slots=True, eq=False)
class Matmul:
    target: Matrix
    left: Matrix
    right: Matrix
    adds: bool
    bias: str | None
    scales: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class View:
    buffer: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    name: str
    results: tuple[View, ...]
    operands: tuple[View, ...]
    numbers: Any


Statement = For | Assign | Store | Barrier | Matmul | Library


@dataclass(frozen=True, slots=True)
class Geometry:
    threads: int
    share: int
    warp: int
    combine: str
    template: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    geometry: Geometry | None
    body: tuple[Statement, ...]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.inputs + self.outputs


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    kernel: int
    arguments: tuple[tuple[str, int], ...]  # buffers, and elements that an iteration moves on
    lines: tuple[str, ...]  # of the model


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    length: int
    reverse: bool
    steps: tuple[Step, ...]


Step = Phase | Repeat
Variables = tuple[tuple[str, int], ...]  # names and extents


@dataclass(frozen=True, slots=True)
class Elements:
    """At `address` the element at `element`, for all variables' values; zero outside guards."""

    variables: Variables
    address: Index
    element: tuple[Index, ...]
    guards: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    order: tuple[int, ...] = ()
    pitch: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    elements: Elements


@dataclass(frozen=True, slots=True)
class Partial:
    elements: Elements
    summed: Variables
    op: str


@dataclass(frozen=True, slots=True)
class Work:
    purpose: str


@dataclass(frozen=True, slots=True)
class Binding:
    """What a buffer holds of a value of a graph, by the scope's name, node and output."""

    buffer: str
    scope: str
    node: int
    output: int
    content: Whole | Copy | Partial | Work


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    kernels: tuple[Kernel, ...]
    buffers: dict[str, Buffer]
    leaves: tuple[str, ...]
    constants: tuple[str, ...]
    updated: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[int, int], str], ...]  # name, value and buffer
    steps: tuple[Step, ...]
    bindings: tuple[Binding, ...]
    arena: int
    offsets: dict[str, int]


# Reading: what is made of one part of the data, or Rejected.

Reader = Callable[[Any], Any]


def _number(low: int, high: int = 2**60) -> Reader:
    return lambda given: integer(given, low, high)


def _among(*known: str) -> Reader:
    return lambda given: one_of(given, {name: name for name in known})


def _several(reader: Reader, most: int = 100_000) -> Reader:
    return lambda given: tuple([reader(x) for x in items(given, most)])


def _maybe(reader: Reader) -> Reader:
    return lambda given: None if given is None else reader(given)


def _row(make: Callable[..., Any], *readers: Reader) -> Reader:
    """A list of parts, each with its reader."""

    def read(given: Any) -> Any:
        parts = row(given, len(readers))
        return make(*[reader(part) for reader, part in zip(readers, parts, strict=True)])

    return read


def _kind(table: Callable[[], dict[str, Reader]], most: int = 200) -> Reader:
    """A node, by its first element; `most` inside each other."""
    depth = 0

    def read(given: Any) -> Any:
        nonlocal depth
        kind, *parts = items(given, 20, "a node") or [None]
        reader, depth = one_of(kind, table(), "the kind of a node"), depth + 1
        try:
            integer(depth, 0, most, "the depth of nodes")
            return reader(parts)
        finally:
            depth -= 1

    return read


def _tuple(*parts: Any) -> tuple[Any, ...]:
    return parts


def _exact(given: Any) -> int | float | Fraction:
    """A number: whole, a fraction, a float's hexadecimal form, an infinity or nan."""
    if isinstance(given, (bool, int)):
        return given
    told = string(given, 400, "a number")
    try:
        found = Fraction(told) if "/" in told else float.fromhex(told)
    except (ValueError, OverflowError, ZeroDivisionError) as wrong:
        raise Unreadable(f"{told[:50]!r} is no number") from wrong
    return found


_some, _count, _integer = _number(1), _number(0), _number(-(2**60))
_dtype = _among(*BYTES)
_variables = _several(_row(_tuple, string, _count), 100)


def _index(given: Any) -> Index:
    offset, *terms = items(given, 100, "an index") or [None]
    return Index(_integer(offset), tuple([_term(t) for t in terms]))


def _atom(given: Any) -> Any:
    return string(given) if isinstance(given, str) else _other_atom(given)


_term = _row(_tuple, _integer, _atom)
_other_atom = _kind(
    lambda: {
        "data": _row(lambda local, size: Atom("data", local, size), string, _some),
        "bounded": _row(lambda index, size: Atom("bounded", index, size), _index, _count),
        "quotient": _row(lambda index, size: Atom("quotient", index, size), _index, _some),
        "remainder": _row(lambda index, size: Atom("remainder", index, size), _index, _some),
    },
    30,
)
VALUES: dict[str, Reader] = {
    "literal": _row(lambda x, d: Value("literal", d, number=x), _exact, _dtype),
    "load": _row(lambda b, i, d: Value("load", d, (), b, i), string, _index, _dtype),
    "local": _row(lambda n, d: Value("local", d, (), n), string, _dtype),
    "position": _row(lambda i, d: Value("position", d, index=i), _index, _dtype),
    "within": _row(
        lambda i, a, b: Value("within", "bool", (), "", i, a, b), _index, _integer, _integer
    ),
}
_value = _kind(lambda: VALUES)


def _apply(parts: list[Any]) -> Value:
    """Operands are not in a list of their own: values are deep enough as they are."""
    op, dtype = row(parts[:2], 2)
    return Value("apply", _dtype(dtype), _several(_value)(parts[2:]), string(op))


VALUES |= {
    "apply": _apply,
    "convert": _row(lambda x, d: Value("convert", d, (x,)), _value, _dtype),
    "guarded": _row(
        lambda g, x, y, d: Value("guarded", d, (g, x, y)), _value, _value, _value, _dtype
    ),
}
_axis = _row(Axis, _some, _integer, _several(_integer))
_matrix = _row(Matrix, string, _index, _axis, _axis)
_view = _row(View, string, _integer, _several(_count, 100), _several(_integer, 100))
STATEMENTS: dict[str, Reader] = {
    "let": _row(lambda n, x: Assign("let", n, x), string, _value),
    "set": _row(lambda n, x: Assign("set", n, x), string, _value),
    "accumulate": _row(lambda n, op, x: Assign(op, n, x), string, _among(*ACCUMULATING), _value),
    "store": _row(Store, string, _index, _value, _maybe(_value)),
    "update": _row(lambda b, i, x: Store(b, i, x, None, True), string, _index, _value),
    "barrier": _row(Barrier, _among(*SHARED_OUT)),
    "matmul": _row(
        Matmul, _matrix, _matrix, _matrix, boolean, _maybe(string),
        _several(_row(_tuple, string, _count), 2),
    ),
    "library": _row(
        Library, string, _several(_view, 100), _several(_view, 100),
        _several(_row(_tuple, string, _exact), 100),
    ),
}  # fmt: skip
_body = _several(_kind(lambda: STATEMENTS, 50))
STATEMENTS["for"] = _row(
    For, string, _number(0, 2**40), _among(*ROLES), _maybe(_index), _number(1, 1024), _body
)
_elements = _row(Elements, _variables, _index, _several(_index, 100), _several(_value, 100))
_content = _kind(
    lambda: {
        "whole": _row(Whole, _several(_number(0, 99), 100), _count),
        "copy": _row(Copy, _elements),
        "partial": _row(Partial, _elements, _variables, _among(*ACCUMULATING)),
        "work": _row(Work, string),
    }
)
_buffer = _row(Buffer, string, _dtype, _count, _some, _among("global", "shared", "private"), _some)
_template = _several(lambda given: given if isinstance(given, (str, int, list)) else string(given))
_geometry = _row(
    Geometry, _number(1, 2**16), _number(1, 2**16), _number(1, 2**16),
    _among("exchange", "in order", "tree"), lambda given: () if given is None else _template(given),
)  # fmt: skip
_call = _row(Call, _count, _several(_row(_tuple, string, _count)), _several(string))
STEPS: dict[str, Reader] = {"phase": _row(Phase, _several(_call))}
_steps = _several(_kind(lambda: STEPS, 10))
STEPS["repeat"] = _row(Repeat, _count, boolean, _steps)


def _record(make: Callable[..., Any], **readers: Reader) -> Reader:
    """A record with exactly these parts."""

    def read(given: Any) -> Any:
        found = record(given, *readers)
        return make(*[reader(found[name]) for name, reader in readers.items()])

    return read


read_kernel = _record(
    Kernel, name=string, inputs=_several(_buffer), outputs=_several(_buffer),
    scratch=_several(_buffer), geometry=_maybe(_geometry), body=_body,
)  # fmt: skip


def _named(given: Any) -> dict[str, Buffer]:
    found = {b.name: b for b in _several(_buffer)(given)}
    if len(found) != len(given):
        raise Unreadable("two buffers have one name")
    return found


read_program = _record(
    Program, kernels=_several(read_kernel), buffers=_named, leaves=_several(string),
    constants=_several(string), updated=_several(string),
    outputs=_several(_row(_tuple, string, _row(_tuple, _count, _count), string)), steps=_steps,
    bindings=_several(_row(Binding, string, string, _count, _count, _content)), arena=_count,
    offsets=lambda given: dict(_several(_row(_tuple, string, _count))(given)),
)  # fmt: skip


# Walking


def calls_of(steps: tuple[Step, ...]) -> Iterator[Call]:
    for step in steps:
        yield from step.calls if isinstance(step, Phase) else calls_of(step.steps)


def walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement in order, a loop before what it contains."""
    for s in body:
        yield s
        if isinstance(s, For):
            yield from walk(s.body)


def values_of(s: Statement) -> tuple[Value, ...]:
    """What a statement computes by itself."""
    if isinstance(s, Store):
        return (s.value,) if s.guard is None else (s.guard, s.value)
    return (s.value,) if isinstance(s, Assign) else ()


def subvalues(value: Value) -> Iterator[Value]:
    yield value
    for operand in value.operands:
        yield from subvalues(operand)
