"""Kernels that are sums whose indices are data: zeros, then updates in order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.kernel.access import locals_in
from treadle.kernel.geometry import Scattered
from treadle.kernel.index import Data, Index, Var, uses
from treadle.kernel.nodes import (
    For,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Position,
    Role,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import peel, subvalues


@dataclass(frozen=True)
class Scatter:
    """The parts of such a kernel."""

    columns: tuple[Var, ...]
    updates: tuple[Var, ...]
    lets: tuple[Let, ...]  # that give the row
    update: Update
    row: Data  # of the result, that an update adds to
    is_filled: bool  # with zeros first

    @property
    def held(self) -> Value | None:
        """A condition without which nothing is added, if it is the row's alone."""
        value = self.update.value
        if not isinstance(value, Guarded) or not isinstance(value.other, Literal):
            return None
        is_of_row = locals_in(value.guard) <= {self.row.local}
        return value.guard if is_of_row and value.other.value == 0 else None

    @property
    def added(self) -> Value:
        """What is added where the condition holds."""
        value = self.update.value
        return value.value if self.held is not None and isinstance(value, Guarded) else value

    def needed(self, locals_: set[str]) -> list[Let]:
        """The values that some locals depend on, in order."""
        names, found = set(locals_), list[Let]()
        for let in reversed(self.lets):
            if let.local in names:
                names |= locals_in(let.value)
                found.insert(0, let)
        return found

    @property
    def width(self) -> int:
        return math.prod(v.extent for v in self.columns)

    @property
    def count(self) -> int:
        return math.prod(v.extent for v in self.updates)


def guarded_sum(value: Value) -> tuple[Value | None, Value]:
    """A condition without which nothing is added, if there is one, and what is added."""
    if isinstance(value, Guarded) and isinstance(value.other, Literal) and value.other.value == 0:
        return value.guard, value.value
    return None, value


def is_scatter(kernel: Kernel, mapping: Mapping | None) -> bool:
    """Whether blocks of a GPU can own rows of the sum, and it is worth it."""
    found = scatter_of(kernel)
    if found is None or mapping is None:
        return False
    fits = found.width * itemsize_of(kernel, found) <= scatter_room(mapping)
    return fits and found.count * found.width >= mapping.scatter_least


def scatter_room(mapping: Mapping) -> int:
    """Bytes of shared memory for a block's rows, beside what its warps note."""
    warps = mapping.scatter_threads // mapping.warp
    lists = _list_bytes(warps, mapping.scatter_noted)
    return min(mapping.scatter_bytes, mapping.shared_limit - lists)


def _list_bytes(warps: int, noted: int) -> int:
    """What each warp and all together have noted: an update's number, and its row."""
    return 5 * (warps + 1) * noted


def scatter_of(kernel: Kernel) -> Scatter | None:
    """The parts of a kernel whose rows do not depend on the column; None for any other."""
    loops, body = peel(kernel.body, Role.PARALLEL, Role.GRID)
    updates, inner = peel(body[-1:], Role.SEQUENTIAL)
    if kernel.scratch or not updates or len(body) > 2:
        return None
    lets, last = tuple(s for s in inner if isinstance(s, Let)), inner[-1]
    if not isinstance(last, Update) or len(lets) != len(inner) - 1:
        return None
    rows = [a for a, _ in last.index.terms if isinstance(a, Data)]
    is_filled = len(body) == 2
    if len(rows) != 1 or (is_filled and not _is_filling(body[0], last, rows[0])):
        return None
    columns, counted = (tuple(s.var for s in group) for group in (loops, updates))
    found = Scatter(columns, counted, lets, last, rows[0], is_filled)
    return None if _by_column(found) else found


def itemsize_of(kernel: Kernel, found: Scatter) -> int:
    return next(b.dtype.itemsize for b in kernel.buffers if b.name == found.update.buffer)


def sums_bytes(kernel: Kernel, scattered: Scattered) -> int:
    """Shared memory of a block's rows, up to a whole pack."""
    found = scatter_of(kernel)
    assert found is not None
    size = scattered.rows * found.width * itemsize_of(kernel, found)
    return size + -size % 16


def scatter_bytes(kernel: Kernel, scattered: Scattered, warps: int) -> int:
    """Shared memory of a block: its rows, and what its warps note."""
    return sums_bytes(kernel, scattered) + _list_bytes(warps, scattered.noted)


def _is_filling(statement: Statement, update: Update, row: Data) -> bool:
    """Whether a statement sets every row to zero."""
    match statement:
        case For(var, _, (*named, Store(update.buffer, at, value, None)), None):
            pass
        case _:
            return False
    values = {s.local: s.value for s in named if isinstance(s, Let)}
    if isinstance(value, Local):
        value = values.get(value.name, value)
    is_zero = isinstance(value, Literal) and value.value == 0 and len(values) == len(named)
    own = tuple((var if a == row else a, f) for a, f in update.index.terms)
    return is_zero and at.same(Index(own, update.index.offset)) and var.extent == row.extent


def _by_column(found: Scatter) -> bool:
    """Whether the row depends on the column: then no block can own rows."""
    lets = found.needed({found.row.local})
    return any(_uses(let.value, v) for let in lets for v in found.columns)


def _uses(value: Value, var: Var) -> bool:
    indices = (v.index for v in subvalues(value) if isinstance(v, (Load, Position, Within)))
    return any(uses(atom, var) for index in indices for atom, _ in index.terms)
