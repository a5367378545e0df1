"""Loop nests: variables for axes, loops that walk memory in order merged, roles chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from treadle.kernel.access import map_loads
from treadle.kernel.access import names_in as names_in
from treadle.kernel.index import Index, Var, renamed_data, substitute, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Library,
    Load,
    Local,
    Matrix,
    Multiply,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
)
from treadle.kernel.places import Rename
from treadle.kernel.places import indices_of as indices_of
from treadle.kernel.places import map_places as map_places
from treadle.kernel.places import map_value as map_value


def axis_vars(stem: str, shape: Sequence[int]) -> tuple[Var, ...]:
    return tuple(Var(f"{stem}{i}", n) for i, n in enumerate(shape))


def nest(variables: Sequence[Var], role: Role, body: Sequence[Statement]) -> tuple[Statement, ...]:
    """The body inside a loop for each variable, the first outermost; loops of one turn vanish."""
    inner = tuple(body)
    for var in reversed(variables):
        if var.extent != 1:
            inner = (For(var, role, inner),)
    return inner


Replace = Callable[[str, Index], Index]


def map_buffers(statement: Statement, place: Replace) -> Statement:
    """The statement with the place of every access replaced, by buffer and index."""

    def inner(value: Value) -> Value:
        return map_loads(value, lambda x: Load(x.buffer, place(x.buffer, x.index), x.dtype))

    match statement:
        case For(var, role, body, stop):
            return For(var, role, tuple(map_buffers(s, place) for s in body), stop)
        case Let(local, value):
            return Let(local, inner(value))
        case Set(local, value):
            return Set(local, inner(value))
        case Accumulate(local, op, value):
            return Accumulate(local, op, inner(value))
        case Store(buffer, index, value, guard):
            return Store(buffer, place(buffer, index), inner(value), guard)
        case Update(buffer, index, value):
            return Update(buffer, place(buffer, index), inner(value))
        case Multiply(target, left, right, adds, bias):
            a, b, c = (
                Matrix(m.buffer, place(m.buffer, m.index), m.rows, m.columns)
                for m in (target, left, right)
            )
            return Multiply(a, b, c, adds, bias)
        case Library() | Barrier():
            return statement


def map_locals(statement: Statement, rename: Rename) -> Statement:
    """The statement with every local renamed, those inside indices too."""

    def at(index: Index) -> Index:
        return renamed_data(index, rename)

    def value(v: Value) -> Value:
        match v:
            case Local(name, dtype):
                return Local(rename(name), dtype)
            case Convert(inner, dtype):
                return Convert(value(inner), dtype)
            case Apply(op, operands, dtype):
                return Apply(op, tuple(map(value, operands)), dtype)
            case Guarded(guard, inner, other, dtype):
                return Guarded(value(guard), value(inner), value(other), dtype)
            case _:
                return v

    if isinstance(statement, For):  # inside it each name is replaced once, not again and again
        stop = None if statement.stop is None else at(statement.stop)
        body = tuple(map_locals(s, rename) for s in statement.body)
        return For(statement.var, statement.role, body, stop)
    moved = map_places(statement, at)
    match moved:
        case Let(local, v):
            return Let(rename(local), value(v))
        case Set(local, v):
            return Set(rename(local), value(v))
        case Accumulate(local, op, v):
            return Accumulate(rename(local), op, value(v))
        case Store(buffer, index, v, guard):
            return Store(buffer, index, value(v), guard)
        case Update(buffer, index, v):
            return Update(buffer, index, value(v))
        case For() | Multiply() | Library() | Barrier():
            return moved


def with_own_names(
    kernel: Kernel, body: tuple[Statement, ...], other: Kernel, others: tuple[Statement, ...]
) -> tuple[Kernel, tuple[Statement, ...]]:
    """A kernel and its statements with names of locals and scratch that another does not use."""
    taken = names_in(others)
    names = {n: fresh(n, taken) for n in sorted(names_in(body))}
    scratches = {b.name for b in other.scratch}
    own = {b.name: fresh(b.name, scratches) for b in kernel.scratch}
    moved = tuple(
        map_places(map_locals(s, lambda n: names.get(n, n)), lambda i: i, lambda b: own.get(b, b))
        for s in body
    )
    scratch = tuple(Buffer(own[b.name], b.dtype, b.size) for b in kernel.scratch)
    loops = loop_names(others)
    return replace(kernel, scratch=scratch), tuple(with_own_loops(s, loops) for s in moved)


def loop_names(body: Sequence[Statement]) -> set[str]:
    """Names of all loop variables in some statements."""
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, For):
            found |= {statement.var.name} | loop_names(statement.body)
    return found


def with_own_loops(statement: Statement, taken: set[str]) -> Statement:
    """The statement with loop variables whose names are not taken; siblings may share one."""
    if not isinstance(statement, For):
        return statement
    name = statement.var.name
    if name not in taken:  # it stays, so that no loop inside may be called the same
        body = tuple(with_own_loops(s, taken | {name}) for s in statement.body)
        return replace(statement, body=body)
    body = tuple(with_own_loops(s, taken) for s in statement.body)
    name = fresh(name, taken | loop_names(body))
    var = Var(name, statement.var.extent)
    values = {statement.var: variable(var)}
    return replace(
        statement, var=var, body=tuple(map_places(s, lambda i: substitute(i, values)) for s in body)
    )


def fresh(name: str, taken: set[str]) -> str:
    """A name that is not taken; it is taken now."""
    stem = name.split("~")[0]
    found, count = name, 1
    while found in taken:
        found, count = f"{stem}~{count}", count + 1
    taken.add(found)
    return found


def anonymous(kernel: Kernel) -> Kernel:
    """The kernel with its buffers named by position."""
    names = {b.name: f"p{i}" for i, b in enumerate(kernel.buffers)}
    names |= {b.name: f"s{i}" for i, b in enumerate(kernel.scratch)}

    def renamed(buffer: Buffer) -> Buffer:
        return Buffer(names[buffer.name], buffer.dtype, buffer.size)

    return Kernel(
        kernel.name,
        tuple(map(renamed, kernel.inputs)),
        tuple(map(renamed, kernel.outputs)),
        tuple(map_places(s, lambda index: index, names.__getitem__) for s in kernel.body),
        kernel.origins,
        tuple(map(renamed, kernel.scratch)),
        kernel.is_whole,
    )
