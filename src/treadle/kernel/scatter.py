"""Kernels that are sums whose places are data: zeros, then updates in order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.kernel.access import locals_in
from treadle.kernel.index import Data, Index, Var, uses
from treadle.kernel.nodes import (
    For,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Statement,
    Store,
    Update,
    Value,
)

MOST_ROWS = 32  # of the result, that a block owns
MOST_BYTES = 76 << 10  # of shared memory for them
LEAST = 1 << 12  # updates times columns: fewer are one thread's each


@dataclass(frozen=True)
class Scatter:
    """The parts of such a kernel."""

    columns: tuple[Var, ...]
    updates: list[Var]
    lets: tuple[Let, ...]  # that give the place
    update: Update
    place: Data
    is_filled: bool  # with zeros first

    @property
    def held(self) -> Value | None:
        """A condition without which nothing is added, if it is the place's alone."""
        value = self.update.value
        if not isinstance(value, Guarded) or not isinstance(value.other, Literal):
            return None
        is_place = locals_in(value.guard) <= {self.place.local}
        return value.guard if is_place and value.other.value == 0 else None

    @property
    def value(self) -> Value:
        """What is added where the condition holds."""
        value = self.update.value
        return value.value if self.held is not None and isinstance(value, Guarded) else value

    @property
    def width(self) -> int:
        return math.prod(v.extent for v in self.columns)

    @property
    def count(self) -> int:
        return math.prod(v.extent for v in self.updates)

    def rows(self, itemsize: int) -> int:
        fitting = MOST_BYTES // (self.width * itemsize)
        return max(1, min(MOST_ROWS, fitting))


def is_scatter(kernel: Kernel) -> bool:
    return scatter_of(kernel) is not None


def scatter_of(kernel: Kernel) -> Scatter | None:
    columns, body = _peeled(kernel.body, Role.PARALLEL)
    only = body[-1] if 1 <= len(body) <= 2 else None
    if kernel.scratch or not isinstance(only, For) or only.role is not Role.SEQUENTIAL:
        return None
    updates, inner = _peeled((only,), Role.SEQUENTIAL)
    *named, last = inner
    if not isinstance(last, Update) or not all(isinstance(s, Let) for s in named):
        return None
    atoms = [a for a, _ in last.index.terms if isinstance(a, Data)]
    if len(atoms) != 1 or not columns:
        return None
    is_filled = len(body) == 2
    if is_filled and not _is_filling(body[0], last.index, last.buffer, atoms[0]):
        return None
    found = Scatter(tuple(columns), updates, _only_lets(inner), last, atoms[0], is_filled)
    size = _itemsize(kernel, last.buffer)
    is_small = found.width * size <= MOST_BYTES and found.count * found.width >= LEAST
    return found if is_small and not _by_column(found) else None


def _peeled(body: tuple[Statement, ...], role: Role) -> tuple[list[Var], tuple[Statement, ...]]:
    """Loops of a role, each around all that follows, and what is inside."""
    found: list[Var] = []
    while len(body) == 1 and isinstance(body[0], For) and body[0].role is role:
        if body[0].stop is not None:
            break
        found.append(body[0].var)
        body = body[0].body
    return found, body


def _is_filling(statement: Statement, index: Index, buffer: str, place: Data) -> bool:
    """Whether a statement sets every row to zero."""
    if not isinstance(statement, For) or statement.stop is not None:
        return False
    *named, store = statement.body
    if not isinstance(store, Store) or store.buffer != buffer or store.guard is not None:
        return False
    values = {s.local: s.value for s in named if isinstance(s, Let)}
    value = store.value
    if isinstance(value, Local):
        value = values.get(value.name, value)
    is_zero = isinstance(value, Literal) and value.value == 0 and len(values) == len(named)
    terms = tuple((statement.var if a == place else a, f) for a, f in index.terms)
    same = dict(terms) == dict(store.index.terms) and index.offset == store.index.offset
    return is_zero and same and statement.var.extent == place.extent


def _only_lets(body: tuple[Statement, ...]) -> tuple[Let, ...]:
    return tuple(s for s in body if isinstance(s, Let))


def _itemsize(kernel: Kernel, buffer: str) -> int:
    return next(b.dtype.itemsize for b in kernel.buffers if b.name == buffer)


def _by_column(found: Scatter) -> bool:
    """Whether the place depends on the column: then no block can own rows."""
    needed, depends = {found.place.local}, False
    for let in reversed(found.lets):
        if let.local in needed:
            needed |= locals_in(let.value)
            depends = depends or any(_uses(let.value, v) for v in found.columns)
    return depends


def _uses(value: Value, var: Var) -> bool:
    if isinstance(value, Load):
        return any(uses(a, var) for a, _ in value.index.terms)
    parts = [getattr(value, n) for n in ("value", "guard", "other") if hasattr(value, n)]
    parts += list(getattr(value, "operands", ()))
    index = getattr(value, "index", None)
    is_here = isinstance(index, Index) and any(uses(a, var) for a, _ in index.terms)
    return is_here or any(_uses(p, var) for p in parts if not isinstance(p, (int, float)))
