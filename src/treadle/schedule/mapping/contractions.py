"""Kernels that contract two operands, whatever follows each element of the result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.base.dtypes import DType
from treadle.kernel.access import loads_of
from treadle.kernel.index import (
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    flatten,
    substitute,
    uses,
    variable,
)
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Set,
    Statement,
    Store,
    Value,
)
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import rewrite, walk
from treadle.schedule.mapping.shapes import is_sum, nested, peeled


@dataclass(frozen=True, slots=True)
class Contraction:
    """A kernel as a contraction: loops of both operands, of each alone, and of the depth."""

    lets: tuple[Statement, ...]
    grid: tuple[Var, ...]
    body: tuple[Statement, ...]  # of an iteration of the grid
    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    depth: tuple[Var, ...]
    left: Load  # along the rows
    right: Load
    is_swapped: bool  # the second factor is the left operand
    wide: DType

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        groups = self.batch, self.rows, self.columns, self.depth
        b, m, n, k = (math.prod(v.extent for v in g) for g in groups)
        return b, m, n, k


def contraction_of(kernel: Kernel, mapping: Mapping) -> Contraction | None:
    """The contraction that a kernel is; None where it is none, or too small to hold in tiles."""
    if kernel.scratch:
        return None
    lets, grid, body = peeled(kernel)
    if len(grid) == 1:
        grid, body = _split(grid[0], body)
    loops = [i for i, s in enumerate(body) if isinstance(s, For)]
    if not grid or len(loops) != 1:
        return None
    loop = body[loops[0]]
    assert isinstance(loop, For)
    before, after = body[: loops[0]], body[loops[0] + 1 :]
    if not is_sum(loop) or not all(isinstance(s, (Let, Set, Store)) for s in after):
        return None
    depth, inner = nested(loop)
    if len(inner) != 1 or not isinstance(inner[0], Accumulate):
        return None
    operands = _operands(inner[0], before)
    if operands is None:
        return None
    found = _sorted_out(lets, (grid, body), depth, operands, inner[0].value.dtype)
    return found if found is not None and _is_worth(found, mapping) else None


def _is_worth(found: Contraction, mapping: Mapping) -> bool:
    batch, m, n, k = found.sizes
    is_large = batch * m * n * k >= mapping.least_work
    return is_large and k >= mapping.least_depth and min(m, n) >= mapping.least_side


def _operands(step: Accumulate, before: tuple[Statement, ...]) -> tuple[Load, Load] | None:
    """The two factors that are summed up from nothing."""
    start = before[0] if len(before) == 1 else None
    if not isinstance(start, Let) or start.local != step.local:
        return None
    is_none = isinstance(start.value, Literal) and start.value.value == 0
    product = step.value
    if not is_none or step.op != "add" or not isinstance(product, Apply) or product.op != "mul":
        return None
    if not product.dtype.is_float or product.dtype.is_narrow:
        return None
    first, second = map(load_of, product.operands)
    return None if first is None or second is None else (first, second)


def _sorted_out(
    lets: tuple[Statement, ...],
    inside: tuple[tuple[Var, ...], tuple[Statement, ...]],
    depth: list[Var],
    operands: tuple[Load, Load],
    wide: DType,
) -> Contraction | None:
    grid, body = inside
    used = [{v for v in grid if _moves(o, v)} for o in operands]
    is_swapped = grid[-1] not in used[1]  # columns are along the last loop: results lie together
    left, right = (1, 0) if is_swapped else (0, 1)
    both = used[0] & used[1]
    if grid[-1] in both or not (used[left] - both) or grid[-1] not in used[right]:
        return None
    return Contraction(
        lets,
        grid,
        body,
        tuple(v for v in grid if v in both or v not in used[0] | used[1]),
        tuple(v for v in grid if v in used[left] - both),
        tuple(v for v in grid if v in used[right] - both),
        tuple(depth),
        operands[left],
        operands[right],
        is_swapped,
        wide,
    )


def _split(var: Var, body: tuple[Statement, ...]) -> tuple[tuple[Var, ...], tuple[Statement, ...]]:
    """One loop as the several that its quotients and remainders speak of."""
    divisors = sorted({d for i in _indices(body) for d in _divisors(i, var)}, reverse=True)
    extents, left = list[int](), var.extent
    for d in divisors:
        if left % d or var.extent % d:
            return (var,), body
        extents.append(left // d)
        left = d
    if not divisors:
        return (var,), body
    parts = tuple(Var(f"{var.name}.{i}", n) for i, n in enumerate([*extents, left]))
    whole = flatten([variable(v) for v in parts], [v.extent for v in parts])
    return parts, tuple(rewrite(s, lambda _, i: substitute(i, {var: whole})) for s in body)


def _indices(body: tuple[Statement, ...]) -> Iterator[Index]:
    for s in walk(body):
        if isinstance(s, Store):
            yield s.index
        yield from (x.index for x in loads_of(s))


def _divisors(index: Index, var: Var) -> Iterator[int]:
    for atom, _ in index.terms:
        if isinstance(atom, (Quotient, Remainder)):
            if atom.index == variable(var):
                yield atom.divisor
            else:
                yield from _divisors(atom.index, var)


def load_of(value: Value) -> Load | None:
    """The load that an operand is, before it is converted; None where it is something else."""
    inner = value.value if isinstance(value, Convert) else value
    is_load = isinstance(inner, Load) and not any(isinstance(a, Data) for a, _ in inner.index.terms)
    return inner if isinstance(inner, Load) and is_load else None


def _moves(load: Load, var: Var) -> bool:
    return any(uses(a, var) for a, _ in load.index.terms)
