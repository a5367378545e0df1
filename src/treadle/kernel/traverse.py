"""The one way through the loop IR: statements and values in order, rebuilt, and loops taken off.

`walk` and `subvalues` yield, `rewrite` and `map_value` rebuild, `peel` takes loops off. A pass that
needs more than these is a closed `match` of its own; there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from treadle.kernel.index import Index, Var
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    Convert,
    For,
    Guarded,
    Let,
    Library,
    Load,
    Matrix,
    Multiply,
    Position,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Within,
)

# Statements


def walk(body: Sequence[Statement]) -> Iterator[Statement]:
    """Every statement in order, a loop before what it contains."""
    for statement in body:
        yield statement
        if isinstance(statement, For):
            yield from walk(statement.body)


def values_of(statement: Statement) -> tuple[Value, ...]:
    """The values that a statement computes by itself; a loop computes none."""
    match statement:
        case Let(_, value) | Set(_, value) | Accumulate(_, _, value) | Update(_, _, value):
            return (value,)
        case Store(_, _, value, guard):
            return (value,) if guard is None else (value, guard)
        case For() | Multiply() | Library() | Barrier():
            return ()


def peel(
    body: Sequence[Statement], *roles: Role, most: int | None = None
) -> tuple[list[For], tuple[Statement, ...]]:
    """Loops of some roles, each all that the one around it contains, and what is inside them.

    A loop with an end of its own (`stop`) is not taken off.
    """
    loops: list[For] = []
    inner = tuple(body)
    while len(inner) == 1 and (most is None or len(loops) < most):
        (only,) = inner
        if not isinstance(only, For) or only.role not in roles or only.stop is not None:
            break
        loops.append(only)
        inner = only.body
    return loops, inner


# Values


def operands_of(value: Value) -> tuple[Value, ...]:
    """The values that a value is computed from."""
    match value:
        case Convert(inner):
            return (inner,)
        case Apply(_, operands):
            return operands
        case Guarded(guard, inner, other):
            return guard, inner, other
        case _:
            return ()


def subvalues(value: Value) -> Iterator[Value]:
    """The value and everything it is computed from, in order."""
    yield value
    for operand in operands_of(value):
        yield from subvalues(operand)


def with_operands(value: Value, operands: tuple[Value, ...]) -> Value:
    """The value computed from others."""
    match value:
        case Convert(_, dtype):
            return Convert(operands[0], dtype)
        case Apply(op, _, dtype):
            return Apply(op, operands, dtype)
        case Guarded(_, _, _, dtype):
            guard, inner, other = operands
            return Guarded(guard, inner, other, dtype)
        case _:
            return value


ValueMap = Callable[[Value], Value]


def map_value(value: Value, change: ValueMap) -> Value:
    """The value with everything in it changed, what it is computed from first."""
    operands = operands_of(value)
    if not operands:
        return change(value)
    return change(with_operands(value, tuple(map_value(o, change) for o in operands)))


# Rebuilding


def map_values(statement: Statement, change: ValueMap) -> Statement:
    """The statement with each of its own values replaced; those inside a loop too."""
    match statement:
        case For(body=body):
            return replace(statement, body=tuple(map_values(s, change) for s in body))
        case Let(_, value) | Set(_, value) | Accumulate(_, _, value) | Update(_, _, value):
            return replace(statement, value=change(value))
        case Store(_, _, value, guard):
            held = None if guard is None else change(guard)
            assert held is None or isinstance(held, Within)
            return replace(statement, value=change(value), guard=held)
        case Multiply() | Library() | Barrier():
            return statement


IndexMap = Callable[[str, Index], Index]  # by the buffer that is accessed; "" where none is
NameMap = Callable[[str], str]


def rewrite(
    statement: Statement,
    index: IndexMap = lambda buffer, index: index,
    buffer: NameMap = lambda name: name,
) -> Statement:
    """The statement with every index and every buffer's name replaced."""

    def leaf(value: Value) -> Value:
        match value:
            case Load(name, at, dtype):
                return Load(buffer(name), index(name, at), dtype)
            case Position(at, dtype):
                return Position(index("", at), dtype)
            case Within(at, low, high):
                return Within(index("", at), low, high)
            case _:
                return value

    def matrix(m: Matrix) -> Matrix:
        return replace(m, buffer=buffer(m.buffer), index=index(m.buffer, m.index))

    match statement:
        case For(body=body, stop=stop):
            end = None if stop is None else index("", stop)
            return replace(statement, body=tuple(rewrite(s, index, buffer) for s in body), stop=end)
        case Multiply(target, left, right, adds, bias):
            named = None if bias is None else buffer(bias)
            return Multiply(matrix(target), matrix(left), matrix(right), adds, named)
        case Library(_, results, operands):
            made, given = (
                tuple(replace(v, buffer=buffer(v.buffer)) for v in views)
                for views in (results, operands)
            )
            return replace(statement, results=made, operands=given)
        case _:
            moved = map_values(statement, lambda value: map_value(value, leaf))
            if isinstance(moved, (Store, Update)):
                at = index(moved.buffer, moved.index)
                return replace(moved, buffer=buffer(moved.buffer), index=at)
            return moved


def loop_variables(body: Sequence[Statement]) -> set[Var]:
    """Variables of all loops in some statements."""
    return {s.var for s in walk(body) if isinstance(s, For)}
