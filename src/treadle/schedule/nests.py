"""Loop nests: variables for axes, loops that walk memory in order merged, roles chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.access import names_in
from treadle.kernel.index import Var, variable
from treadle.kernel.nodes import Buffer, For, Kernel, Role, Statement
from treadle.kernel.traverse import loop_names, substituted, with_buffers, with_locals


def axis_vars(stem: str, shape: Sequence[int]) -> tuple[Var, ...]:
    return tuple(Var(f"{stem}{i}", n) for i, n in enumerate(shape))


def nest(variables: Sequence[Var], role: Role, body: Sequence[Statement]) -> tuple[Statement, ...]:
    """The body inside a loop for each variable, the first outermost; loops of one turn vanish."""
    inner = tuple(body)
    for var in reversed(variables):
        if var.extent != 1:
            inner = (For(var, role, inner),)
    return inner


def with_own_names(
    kernel: Kernel, body: tuple[Statement, ...], other: Kernel, others: tuple[Statement, ...]
) -> tuple[Kernel, tuple[Statement, ...]]:
    """A kernel and its statements with names of locals and scratch that another does not use."""
    taken = names_in(others)
    names = {n: fresh(n, taken) for n in sorted(names_in(body))}
    scratches = {b.name for b in other.scratch}
    own = {b.name: fresh(b.name, scratches) for b in kernel.scratch}
    moved = with_buffers(with_locals(body, names), lambda b: own.get(b, b))
    scratch = tuple(Buffer(own[b.name], b.dtype, b.size) for b in kernel.scratch)
    loops = loop_names(others)
    return replace(kernel, scratch=scratch), tuple(with_own_loops(s, loops) for s in moved)


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
    return replace(statement, var=var, body=substituted(body, {statement.var: variable(var)}))


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
        with_buffers(kernel.body, names.__getitem__),
        kernel.origins,
        tuple(map(renamed, kernel.scratch)),
        kernel.is_whole,
    )
