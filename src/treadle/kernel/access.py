"""What statements touch: loads, and the index of every access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from treadle.kernel.index import Index, Var, data_locals, variable
from treadle.kernel.nodes import (
    Accumulate,
    Guarded,
    Let,
    LibraryCall,
    Load,
    Local,
    Matmul,
    Position,
    Set,
    Statement,
    Store,
    StridedAxis,
    Update,
    Value,
    Within,
)
from treadle.kernel.traverse import operands_of, replace_value, subvalues, values_of, walk


def map_loads(value: Value, change: Callable[[Load], Value]) -> Value:
    """The value with every load replaced."""
    return replace_value(value, lambda v: change(v) if isinstance(v, Load) else None)


def loads_in(value: Value) -> list[Load]:
    """Every load of a value, as often as it is there."""
    return [v for v in subvalues(value) if isinstance(v, Load)]


def loads_of(statement: Statement) -> list[Load]:
    """Every load of a statement that is not a loop."""
    return [load for value in values_of(statement) for load in loads_in(value)]


def plain_loads(statement: Statement) -> Iterator[Load]:
    """Loads that a statement makes whatever it finds: none behind a guard."""
    pending = [statement.value] if isinstance(statement, (Let, Set, Accumulate, Store)) else []
    while pending:
        value = pending.pop()
        if isinstance(value, Load):
            yield value
        elif not isinstance(value, Guarded):
            pending += operands_of(value)


BLOCK = ("row of a matrix", "column of a matrix", "element of a view")


@dataclass(frozen=True, slots=True)
class Access:
    """Elements that a statement touches: an index, and how far around it.

    `every` is an index whose variables `BLOCK` run over the elements of a matrix.
    """

    buffer: str
    index: Index
    low: int
    high: int
    writes: bool
    every: Index


def accesses(statements: Sequence[Statement]) -> Iterator[Access]:
    """Every access of some statements; a statement writes before it reads here."""
    for statement in walk(statements):
        match statement:
            case Matmul():
                for i, m in enumerate(statement.matrices):
                    low = m.rows.range[0] + m.columns.range[0]
                    high = m.rows.range[1] + m.columns.range[1]
                    every = m.index + _block(m.rows, BLOCK[0]) + _block(m.columns, BLOCK[1])
                    yield Access(m.buffer, m.index, low, high, i == 0, every)
                if statement.bias is not None:
                    last = statement.target.columns.count - 1
                    yield _span(statement.bias, 0, last, False)
                for buffer, at in statement.scales:
                    yield _span(buffer, at, at, False)
                continue
            case LibraryCall(_, results, operands):
                for view in (*results, *operands):
                    low, high = view.range
                    yield _span(view.buffer, low, high, view in results)
                continue
            case Store(buffer, index) | Update(buffer, index):
                yield Access(buffer, index, 0, 0, True, index)
            case _:
                pass
        for load in loads_of(statement):
            yield Access(load.buffer, load.index, 0, 0, False, load.index)


def _block(axis: StridedAxis, name: str) -> Index:
    """Along an axis of a matrix; elements that are listed, as everything between them."""
    if not axis.listed:
        return variable(Var(name, axis.count)) * axis.stride
    low, high = axis.range
    return variable(Var(name, high - low + 1)) + low


def _span(buffer: str, low: int, high: int, writes: bool) -> Access:
    every = variable(Var(BLOCK[2], high - low + 1)) + low
    return Access(buffer, Index(), low, high, writes, every)


def is_local(access: Access, iteration: Index, size: int, count: int) -> bool:
    """Whether an access stays in the part of its buffer that belongs to an iteration."""
    if size % count:
        return False
    part = size // count
    quotient = Index(
        tuple((a, f // part) for a, f in access.index.terms if f % part == 0),
        access.index.offset // part,
    )
    rest = access.index - quotient * part
    low, high = rest.range
    return quotient.same(iteration) and low + access.low >= 0 and high + access.high < part


def changed_in(body: Sequence[Statement]) -> set[str]:
    """Locals that some statements accumulate into or set."""
    return {s.local for s in walk(body) if isinstance(s, (Accumulate, Set))}


def names_in(body: Sequence[Statement]) -> set[str]:
    """Names of locals that some statements define."""
    return {s.local for s in walk(body) if isinstance(s, Let)}


def locals_in(value: Value) -> set[str]:
    """Locals that a value reads, those inside indices too."""
    found: set[str] = set()
    for part in subvalues(value):
        match part:
            case Local(name):
                found.add(name)
            case Load(_, index) | Position(index) | Within(index):
                found.update(data_locals(index))
            case _:
                pass
    return found
