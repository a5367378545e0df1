"""What statements touch: loads, and the places of every access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from treadle.kernel.index import Index, Var, data_locals, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Guarded,
    Let,
    Library,
    Literal,
    Load,
    Local,
    Multiply,
    Position,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Walk,
    Within,
)


def map_loads(value: Value, replace: Callable[[Load], Value]) -> Value:
    """The value with every load replaced."""
    match value:
        case Load():
            return replace(value)
        case Convert(inner, dtype):
            return Convert(map_loads(inner, replace), dtype)
        case Apply(op, operands, dtype):
            return Apply(op, tuple(map_loads(o, replace) for o in operands), dtype)
        case Guarded(guard, inner, other, dtype):
            held, rest = map_loads(guard, replace), map_loads(other, replace)
            return Guarded(held, map_loads(inner, replace), rest, dtype)
        case Literal() | Local() | Position() | Within():
            return value


def loads_in(value: Value) -> list[Load]:
    """Every load of a value, as often as it is there."""
    found: list[Load] = []

    def note(load: Load) -> Load:
        found.append(load)
        return load

    map_loads(value, note)
    return found


def loads_of(statement: Statement) -> list[Load]:
    """Every load of a statement that is not a loop."""
    if isinstance(statement, (Let, Set, Accumulate, Store, Update)):
        return loads_in(statement.value)
    return []


def plain_loads(statement: Statement) -> Iterator[Load]:
    """Loads that a statement makes whatever it finds: none behind a guard."""
    pending = [statement.value] if isinstance(statement, (Let, Set, Accumulate, Store)) else []
    while pending:
        match pending.pop():
            case Load() as load:
                yield load
            case Convert(inner):
                pending.append(inner)
            case Apply(_, operands):
                pending += operands
            case _:
                pass


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
    for statement in statements:
        match statement:
            case For(_, _, body):
                yield from accesses(body)
                continue
            case Multiply():
                for i, m in enumerate(statement.matrices):
                    low = m.rows.range[0] + m.columns.range[0]
                    high = m.rows.range[1] + m.columns.range[1]
                    every = m.index + _block(m.rows, BLOCK[0]) + _block(m.columns, BLOCK[1])
                    yield Access(m.buffer, m.index, low, high, i == 0, every)
                if statement.bias is not None:
                    last = statement.target.columns.count - 1
                    yield _span(statement.bias, 0, last, False)
                continue
            case Library(_, results, operands):
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


def _block(axis: Walk, name: str) -> Index:
    """Along an axis of a matrix; elements that are listed, as everything between them."""
    if not axis.listed:
        return variable(Var(name, axis.count)) * axis.stride
    low, high = axis.range
    return variable(Var(name, high - low + 1)) + low


def _span(buffer: str, low: int, high: int, writes: bool) -> Access:
    every = variable(Var(BLOCK[2], high - low + 1)) + low
    return Access(buffer, Index(), low, high, writes, every)


def is_local(access: Access, turn: Index, size: int, turns: int) -> bool:
    """Whether a place lies in the part of its buffer that belongs to a turn."""
    if size % turns:
        return False
    part = size // turns
    whole = Index(
        tuple((a, f // part) for a, f in access.index.terms if f % part == 0),
        access.index.offset // part,
    )
    rest = access.index - whole * part
    low, high = rest.range
    return whole.same(turn) and low + access.low >= 0 and high + access.high < part


def changed_in(body: Sequence[Statement]) -> set[str]:
    """Locals that some statements accumulate into or set."""
    found: set[str] = set()
    for s in body:
        match s:
            case For(_, _, inner):
                found |= changed_in(inner)
            case Accumulate(local) | Set(local):
                found.add(local)
            case _:
                pass
    return found


def names_in(statements: Sequence[Statement]) -> set[str]:
    """Names of locals that some statements define."""
    found: set[str] = set()
    for statement in statements:
        match statement:
            case For(_, _, body):
                found |= names_in(body)
            case Let(local):
                found.add(local)
            case _:
                pass
    return found


def variables_in(body: Sequence[Statement]) -> set[Var]:
    """Variables of all loops in some statements."""
    found: set[Var] = set()
    for s in body:
        if isinstance(s, For):
            found |= {s.var} | variables_in(s.body)
    return found


def locals_in(value: Value) -> set[str]:
    """Locals that a value reads, those inside indices too."""
    match value:
        case Local(name):
            return {name}
        case Convert(inner):
            return locals_in(inner)
        case Apply(_, operands):
            return set().union(*map(locals_in, operands))
        case Guarded(guard, inner, other):
            return locals_in(guard) | locals_in(inner) | locals_in(other) | _data(value)
        case _:
            return _data(value)


def _data(value: Value) -> set[str]:
    match value:
        case Load(_, index) | Position(index) | Within(index):
            return set(data_locals(index))
        case _:
            return set()
