"""What statements touch: loads, and the index of every access."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from treadle.base.quick import quick
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
    found: list[Load] = []
    pending = [value]
    while pending:  # as `subvalues`, which would be most of the time that is spent here
        value = pending.pop()
        if isinstance(value, Load):
            found.append(value)
        else:
            pending += operands_of(value)[::-1]
    return found


def loads_of(statement: Statement) -> list[Load]:
    """Every load of a statement that is not a loop."""
    values = values_of(statement)
    return loads_in(values[0]) if len(values) == 1 else [x for v in values for x in loads_in(v)]


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


@quick
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


def accesses(
    statements: Sequence[Statement], of: Collection[str] | None = None
) -> Iterator[Access]:
    """Every access of some statements, or those of some buffers.

    A statement writes before it reads here.
    """
    for statement in walk(statements):
        if isinstance(statement, (Store, Update)):
            if of is None or statement.buffer in of:
                index = statement.index
                yield Access(statement.buffer, index, 0, 0, True, index)
        elif isinstance(statement, Matmul):
            yield from _of_matmul(statement, of)
        elif isinstance(statement, LibraryCall):
            for view in (*statement.results, *statement.operands):
                if of is None or view.buffer in of:
                    low, high = view.range
                    yield _span(view.buffer, low, high, view in statement.results)
        for load in loads_of(statement):
            if of is None or load.buffer in of:
                yield Access(load.buffer, load.index, 0, 0, False, load.index)


def _of_matmul(matmul: Matmul, of: Collection[str] | None) -> Iterator[Access]:
    for i, m in enumerate(matmul.matrices):
        if of is not None and m.buffer not in of:
            continue
        rows, columns = m.rows.range, m.columns.range
        every = m.index + _block(m.rows, BLOCK[0]) + _block(m.columns, BLOCK[1])
        low, high = rows[0] + columns[0], rows[1] + columns[1]
        yield Access(m.buffer, m.index, low, high, i == 0, every)
    if matmul.bias is not None and (of is None or matmul.bias in of):
        yield _span(matmul.bias, 0, matmul.target.columns.count - 1, False)
    for buffer, at in matmul.scales:
        yield _span(buffer, at, at, False)


def written_in(body: Sequence[Statement]) -> set[str]:
    """Buffers that some statements write."""
    found: set[str] = set()
    for s in walk(body):
        if isinstance(s, (Store, Update)):
            found.add(s.buffer)
        elif isinstance(s, Matmul):
            found.add(s.target.buffer)
        elif isinstance(s, LibraryCall):
            found.update(view.buffer for view in s.results)
    return found


def read_in(body: Sequence[Statement]) -> set[str]:
    """Buffers that some statements read."""
    found: set[str] = set()
    for s in walk(body):
        if isinstance(s, Matmul):
            found.update((s.left.buffer, s.right.buffer))
            found.update(() if s.bias is None else (s.bias,))
        elif isinstance(s, LibraryCall):
            found.update(view.buffer for view in s.operands)
        found.update([load.buffer for load in loads_of(s)])
    return found


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
