"""Kernels that are products of two operands, whatever follows each element of the result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.base.dtypes import DType
from treadle.codegen.cuda.shape import is_sum, nested, peeled
from treadle.kernel.access import loads_of
from treadle.kernel.index import (
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    flatten,
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
    Role,
    Set,
    Statement,
    Store,
    Value,
)
from treadle.kernel.traverse import substituted

LEAST_DEPTH, LEAST_SIDE, LEAST_WORK = 16, 4, 1 << 14


@dataclass(frozen=True, slots=True)
class Contraction:
    """A kernel as a product: loops of both operands, of each alone, and of the depth."""

    lets: tuple[Statement, ...]
    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    depth: tuple[Var, ...]
    left: Value  # along the rows
    right: Value
    local: str
    wide: DType
    after: tuple[Statement, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        groups = self.batch, self.rows, self.columns, self.depth
        b, m, n, k = (math.prod(v.extent for v in g) for g in groups)
        return b, m, n, k


def contraction_of(kernel: Kernel) -> Contraction | None:
    """The product that a kernel is; None where it is none, or too small to hold in tiles."""
    if kernel.scratch:
        return None
    lets, turns, body = peeled(kernel)
    if len(turns) == 1:
        turns, body = _split(turns[0], body)
    loops = [i for i, s in enumerate(body) if isinstance(s, For)]
    if not turns or len(loops) != 1:
        return None
    loop = body[loops[0]]
    assert isinstance(loop, For)
    before, after = body[: loops[0]], body[loops[0] + 1 :]
    if not is_sum(loop) or not all(isinstance(s, (Let, Set, Store)) for s in after):
        return None
    depth, inner = nested(loop, Role.SEQUENTIAL)
    if len(inner) != 1 or not isinstance(inner[0], Accumulate) or loop.stop is not None:
        return None
    operands = _operands(inner[0], before)
    if operands is None:
        return None
    return _sorted_out(lets, turns, depth, operands, inner[0], after)


def _operands(step: Accumulate, before: tuple[Statement, ...]) -> tuple[Value, Value] | None:
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
    first, second = product.operands
    return (first, second) if _is_load(first) and _is_load(second) else None


def _sorted_out(
    lets: tuple[Statement, ...],
    turns: tuple[Var, ...],
    depth: list[Var],
    operands: tuple[Value, Value],
    step: Accumulate,
    after: tuple[Statement, ...],
) -> Contraction | None:
    used = [{v for v in turns if _walks(o, v)} for o in operands]
    is_second = turns[-1] in used[1]  # columns are along the last loop: results lie together
    left, right = (0, 1) if is_second else (1, 0)
    both = used[0] & used[1]
    if turns[-1] in both or not (used[left] - both):
        return None
    found = Contraction(
        lets,
        tuple(v for v in turns if v in both or v not in used[0] | used[1]),
        tuple(v for v in turns if v in used[left] - both),
        tuple(v for v in turns if v in used[right] - both),
        tuple(depth),
        operands[left],
        operands[right],
        step.local,
        step.value.dtype,
        after,
    )
    batch, m, n, k = found.sizes
    is_worth = k >= LEAST_DEPTH and min(m, n) >= LEAST_SIDE and batch * m * n * k >= LEAST_WORK
    return found if turns[-1] in found.columns and is_worth else None


def _split(turn: Var, body: tuple[Statement, ...]) -> tuple[tuple[Var, ...], tuple[Statement, ...]]:
    """One loop as the several that its quotients and remainders speak of."""
    divisors = sorted({d for i in _indices(body) for d in _divisors(i, turn)}, reverse=True)
    extents, left = list[int](), turn.extent
    for d in divisors:
        if left % d or turn.extent % d:
            return (turn,), body
        extents.append(left // d)
        left = d
    if not divisors:
        return (turn,), body
    parts = tuple(Var(f"{turn.name}.{i}", n) for i, n in enumerate([*extents, left]))
    whole = flatten([variable(v) for v in parts], [v.extent for v in parts])
    return parts, substituted(body, {turn: whole})


def _indices(body: tuple[Statement, ...]) -> Iterator[Index]:
    for s in body:
        if isinstance(s, For):
            yield from _indices(s.body)
            continue
        if isinstance(s, Store):
            yield s.index
        yield from (x.index for x in loads_of(s))


def _divisors(index: Index, turn: Var) -> Iterator[int]:
    for atom, _ in index.terms:
        if isinstance(atom, (Quotient, Remainder)):
            if atom.index == variable(turn):
                yield atom.divisor
            else:
                yield from _divisors(atom.index, turn)


def _is_load(value: Value) -> bool:
    inner = value.value if isinstance(value, Convert) else value
    return isinstance(inner, Load) and not any(isinstance(a, Data) for a, _ in inner.index.terms)


def load_of(value: Value) -> Load:
    """The load that an operand is, before it is converted."""
    inner = value.value if isinstance(value, Convert) else value
    assert isinstance(inner, Load)
    return inner


def _walks(value: Value, var: Var) -> bool:
    return any(uses(a, var) for a, _ in load_of(value).index.terms)
