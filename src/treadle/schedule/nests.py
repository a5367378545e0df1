"""Loop nests: variables for axes, loops that walk memory in order merged, roles chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treadle.kernel.index import Index, Var, substitute, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Position,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Within,
)


def axis_vars(stem: str, shape: Sequence[int]) -> tuple[Var, ...]:
    return tuple(Var(f"{stem}{i}", n) for i, n in enumerate(shape))


def nest(variables: Sequence[Var], role: Role, body: Sequence[Statement]) -> tuple[Statement, ...]:
    """The body inside a loop for each variable, the first outermost; loops of one turn vanish."""
    inner = tuple(body)
    for var in reversed(variables):
        if var.extent != 1:
            inner = (For(var, role, inner),)
    return inner


Move = Callable[[Index], Index]
Rename = Callable[[str], str]


def same_name(buffer: str) -> str:
    return buffer


def map_places(statement: Statement, move: Move, rename: Rename = same_name) -> Statement:
    """The statement with every index, and the name of every buffer, replaced."""
    match statement:
        case For(var, role, body):
            return For(var, role, tuple(map_places(s, move, rename) for s in body))
        case Let(local, value):
            return Let(local, map_value(value, move, rename))
        case Set(local, value):
            return Set(local, map_value(value, move, rename))
        case Accumulate(local, op, value):
            return Accumulate(local, op, map_value(value, move, rename))
        case Store(buffer, index, value, guard):
            held = None if guard is None else Within(move(guard.index), guard.low, guard.high)
            return Store(rename(buffer), move(index), map_value(value, move, rename), held)
        case Update(buffer, index, value):
            return Update(rename(buffer), move(index), map_value(value, move, rename))


def map_value(value: Value, move: Move, rename: Rename = same_name) -> Value:
    """The value with every index, and the name of every buffer, replaced."""
    match value:
        case Literal() | Local():
            return value
        case Load(buffer, index, dtype):
            return Load(rename(buffer), move(index), dtype)
        case Position(index, dtype):
            return Position(move(index), dtype)
        case Within(index, low, high):
            return Within(move(index), low, high)
        case Convert(inner, dtype):
            return Convert(map_value(inner, move, rename), dtype)
        case Apply(op, operands, dtype):
            return Apply(op, tuple(map_value(o, move, rename) for o in operands), dtype)
        case Guarded(guard, inner, other, dtype):
            held, rest = (map_value(v, move, rename) for v in (guard, other))
            return Guarded(held, map_value(inner, move, rename), rest, dtype)


def indices_of(statements: Sequence[Statement]) -> list[Index]:
    """Every index in some statements."""
    found: list[Index] = []

    def note(index: Index) -> Index:
        found.append(index)
        return index

    for statement in statements:
        map_places(statement, note)
    return found


def merge_loops(statement: Statement) -> Statement:
    """Two loops, one right inside the other, become one where every index walks both in order."""
    if not isinstance(statement, For):
        return statement
    body = tuple(merge_loops(s) for s in statement.body)
    outer = For(statement.var, statement.role, body)
    if len(body) != 1 or not isinstance(body[0], For):
        return outer
    inner = body[0]
    if inner.role is not outer.role or not _walks_together(outer.var, inner):
        return outer
    both = Var(f"{outer.var.name}{inner.var.name}", outer.var.extent * inner.var.extent)
    # Every index has the pair as factor · (outer · extent + inner): the inner one stands for both.
    values = {outer.var: Index(), inner.var: variable(both)}
    merged = tuple(map_places(s, lambda i: substitute(i, values)) for s in inner.body)
    return For(both, outer.role, merged)


def _walks_together(outer: Var, inner: For) -> bool:
    for index in indices_of(inner.body):
        far, near = index.factor_of(outer), index.factor_of(inner.var)
        if far is None or near is None or far != near * inner.var.extent:
            return False
    return True


def with_vector_loop(statement: Statement) -> Statement:
    """The innermost parallel loop as lanes of vectors; the ones around it stay parallel."""
    if not isinstance(statement, For) or statement.role is not Role.PARALLEL:
        return statement
    if len(statement.body) == 1 and _is_parallel(statement.body[0]):
        return For(statement.var, Role.PARALLEL, (with_vector_loop(statement.body[0]),))
    return For(statement.var, Role.VECTOR, statement.body)


def _is_parallel(statement: Statement) -> bool:
    return isinstance(statement, For) and statement.role is Role.PARALLEL


def anonymous(kernel: Kernel) -> Kernel:
    """The kernel with its buffers named by position."""
    names = {b.name: f"p{i}" for i, b in enumerate(kernel.buffers)}

    def renamed(buffer: Buffer) -> Buffer:
        return Buffer(names[buffer.name], buffer.dtype, buffer.size)

    return Kernel(
        kernel.name,
        tuple(map(renamed, kernel.inputs)),
        tuple(map(renamed, kernel.outputs)),
        tuple(map_places(s, lambda index: index, names.__getitem__) for s in kernel.body),
        kernel.origins,
    )
