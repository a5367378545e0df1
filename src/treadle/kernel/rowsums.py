"""Kernels that walk rows by parts, and sum columns of them in a part's own memory."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import For, Kernel, Role, Statement


@dataclass(frozen=True, slots=True)
class RowSums:
    """Parts of rows: what comes before the rows of a part, a row, and what comes after them."""

    part: Var
    row: Var
    before: tuple[Statement, ...]
    body: tuple[Statement, ...]
    after: tuple[Statement, ...]

    @property
    def index(self) -> Index:
        """The number of a row."""
        return variable(self.part) * self.row.extent + variable(self.row)

    @property
    def statements(self) -> tuple[Statement, ...]:
        rows = For(self.row, Role.SEQUENTIAL, self.body)
        return (For(self.part, Role.PARALLEL, (*self.before, rows, *self.after)),)


def row_sums_of(kernel: Kernel) -> RowSums | None:
    """The parts of such a kernel; None for any other."""
    only = kernel.body[0] if len(kernel.body) == 1 else None
    if not isinstance(only, For) or only.role is not Role.PARALLEL or only.stop is not None:
        return None
    inner = [i for i, s in enumerate(only.body) if isinstance(s, For) and s.role is Role.SEQUENTIAL]
    if len(inner) != 1 or not any(b.size > 1 for b in kernel.scratch):
        return None
    (at,) = inner
    rows = only.body[at]
    assert isinstance(rows, For)
    before, after = only.body[:at], only.body[at + 1 :]
    around = (*before, *after)
    is_plain = all(isinstance(s, For) and s.role is Role.PARALLEL for s in around)
    if not before or not after or not is_plain or rows.stop is not None:
        return None
    return RowSums(only.var, rows.var, before, rows.body, after)
