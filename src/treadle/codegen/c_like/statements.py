"""Statements of mapped kernels, in the order in which every dialect writes them.

Every thread of a group names the same values; stores outside loops are the first thread's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, assert_never

from treadle.kernel.geometry import Combine, Geometry
from treadle.kernel.index import Var
from treadle.kernel.mapped import Nest, nest_of, sums_of
from treadle.kernel.nodes import (
    Accumulate,
    Barrier,
    For,
    Let,
    LibraryCall,
    Matmul,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
)


class Writer(Protocol):
    """What a dialect writes of a kernel."""

    geometry: Geometry
    grid: Nest
    lines: list[str]
    names: dict[str, str]

    def decode(self, flat: str, loops: Sequence[Var], /) -> None: ...
    def begin_thread(self) -> None: ...
    def begin_group(self) -> None: ...
    def begin_columns(self) -> None: ...
    def inside_grid(self, body: Sequence[Statement], /) -> None:
        """What an iteration of the grid does."""
        ...

    def all(self, body: Sequence[Statement], is_group: bool = False, /) -> None: ...
    def sequential(self, loop: For, /) -> AbstractContextManager[None]: ...
    def shared_out(self, loop: For, /) -> None: ...
    def let(self, local: str, value: Value, /) -> None: ...
    def change(self, local: str, value: Value, to: Callable[[str], str], /) -> None: ...
    def value(self, value: Value, exceeds: bool = False, /) -> str: ...
    def accumulated(self, op: str, value: Value, old: str, /) -> str: ...
    def stored(self, s: Store, is_group: bool, /) -> None: ...
    def updated(self, s: Update, is_group: bool, /) -> None: ...
    def barrier(self, scope: Role, /) -> None: ...
    def multiplied(self, s: Matmul, /) -> None:
        """A product of matrices in a group's memory, made by all of its warps."""
        ...

    def column(self, loop: For, is_last: bool, /) -> None: ...
    def scanned(self, nest: Nest, role: Role, /) -> None:
        """A loop whose iterations see sums of those before them."""
        ...

    def part(self, s: Accumulate, lanes: int, /) -> str: ...
    def iterations(self, nest: Nest, role: Role, sums: Collection[str], /) -> None: ...
    def combine(self, local: str, part: str, s: Accumulate, loop: For, /) -> None: ...


def written(w: Writer) -> list[str]:
    """The lines of one block: which iteration of the grid it is, its memory, and the body."""
    if w.geometry.combine is not Combine.EXCHANGE:
        w.begin_columns()
    elif w.geometry.share == 1:
        w.begin_thread()
    else:
        w.begin_group()
    w.decode("iteration", w.grid.variables)
    for s in w.grid.lets:
        statement(w, s)
    w.inside_grid(w.grid.body)
    return w.lines


def statement(w: Writer, s: Statement, is_group: bool = False) -> None:
    """A thread's statement, or one that is executed once for a group: one thread stores."""
    match s:
        case For(_, Role.SEQUENTIAL, body):
            with w.sequential(s):
                w.all(body, is_group)
        case For():
            w.shared_out(s)
        case Let(local, value):
            w.let(local, value)
        case Set(local, value):
            w.change(local, value, lambda _: w.value(value))
        case Accumulate(local, op, value):
            w.change(local, value, lambda old: w.accumulated(op, value, old))
        case Store():
            w.stored(s, is_group)
        case Update():
            w.updated(s, is_group)
        case Barrier(scope):
            w.barrier(scope)
        case Matmul():
            w.multiplied(s)
        case LibraryCall():
            raise AssertionError("library calls are kernels of their own")
        case _:
            assert_never(s)


def sum_up(w: Writer, loop: For) -> None:
    """Each thread sums some iterations, then all are combined: always in the same order."""
    nest, sums = nest_of(loop), sums_of(loop)
    if any(s.scanned for s in sums.values()):
        w.scanned(nest, loop.role)
        return
    parts = {local: w.part(s, nest.lanes) for local, s in sums.items()}
    before = dict(w.names)
    w.names |= parts
    w.iterations(nest, loop.role, sums)
    w.names = before
    for local, s in sums.items():
        w.combine(w.names[local], parts[local], s, loop)


def columns(w: Writer, body: Sequence[Statement]) -> Sequence[Statement]:
    """Threads of a column sum some of its rows; what follows, which the first of them has."""
    last = max(i for i, s in enumerate(body) if isinstance(s, For))
    for i, s in enumerate(body[: last + 1]):
        if isinstance(s, For):
            w.column(s, i == last)
        else:
            statement(w, s)
    return body[last + 1 :]
