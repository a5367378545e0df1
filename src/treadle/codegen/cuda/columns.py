"""Sums of columns: a warp's threads side by side along a row, the block's warps share the rows.

A thread sums some columns of every so manieth row; the warps' sums are then added in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.codegen.cuda.shape import WARP, Shape, lane_step, lanes_for, nested, peeled
from treadle.kernel import accumulate
from treadle.kernel.access import accesses, locals_in
from treadle.kernel.index import Index, Var, uses
from treadle.kernel.nodes import Accumulate, For, Kernel, Let, Literal, Role, Statement, Store

MOST_ROWS = 8  # warps of a block; where there are few blocks, as many as there can be
FEW_BLOCKS = 64
MOST_SHARED = 40 << 10  # bytes of the warps' sums
EACH = 2  # rows that a thread should have at least


def identity(s: Accumulate) -> float | int:
    """What a sum starts from."""
    return accumulate.identity(s.op, s.value.dtype)


def columns_of(kernel: Kernel) -> Shape | None:
    """The shape of a kernel that sums columns; None for any other."""
    lets, turns, body = peeled(kernel)
    inner = [s for s in body if isinstance(s, For)]
    if kernel.scratch or len(inner) != 1 or not turns:
        return None
    (loop,) = inner
    if loop.role is not Role.SEQUENTIAL or loop.stop is not None:
        return None
    loops, statements = nested(loop, Role.SEQUENTIAL)
    lanes = lanes_for(kernel, turns[-1], body)
    rows = math.prod(v.extent for v in loops)
    if lanes == 1 or rows < 2 * EACH or not _is_plain(body, loop, loops, statements):
        return None
    large = [a.index for a in accesses(statements) if any(_moves(a.index, v) for v in loops)]
    across = [lane_step(i, turns[-1], lanes) == (1, True) for i in large if _moves(i, turns[-1])]
    if not across or not all(across):
        return None
    blocks = math.prod(v.extent for v in turns) // lanes // WARP
    sums = [s for s in statements if isinstance(s, Accumulate)]
    row = WARP * lanes * sum(max(4, s.value.dtype.itemsize) for s in sums)
    most, count = min(MOST_ROWS if blocks >= FEW_BLOCKS else WARP, MOST_SHARED // row), 2
    while 2 * count <= min(most, rows // EACH):
        count *= 2
    return Shape(lets, turns, body, 1, WARP * count, lanes, count)


def _moves(index: Index, var: Var) -> bool:
    return any(uses(atom, var) for atom, _ in index.terms)


def _is_plain(
    body: Sequence[Statement], loop: For, loops: Sequence[Var], inner: Sequence[Statement]
) -> bool:
    """Whether rows of a sum can be summed in any order, apart from each other."""
    sums = {s.local: s for s in inner if isinstance(s, Accumulate)}
    others = [s for s in body if s is not loop]
    if not sums or not all(isinstance(s, (Let, Accumulate, Store)) for s in inner):
        return False
    if not all(isinstance(s, (Let, Store)) for s in others):
        return False
    starts = {s.local: s.value for s in others if isinstance(s, Let)}
    own = {s.local for s in inner if isinstance(s, Let)}
    if any(
        locals_in(s.value) & set(sums) for s in inner if isinstance(s, (Let, Accumulate, Store))
    ):
        return False  # sums so far, of the rows before
    for local, s in sums.items():
        start = starts.get(local)
        if not isinstance(start, Literal) or start.value != identity(s) or local in own:
            return False
    stores = [s for s in inner if isinstance(s, Store)]
    stored = {s.buffer for s in stores}
    if any(a.buffer in stored and not a.writes for a in accesses(list(body))):
        return False
    return all(s.guard is None and _is_apart(s.index, loops) for s in stores)


def _is_apart(index: Index, loops: Sequence[Var]) -> bool:
    """Whether places of two rows differ: each factor is beyond the reach of the smaller ones."""
    if not all(isinstance(atom, Var) for atom, _ in index.terms):
        return False
    known = {atom for atom, _ in index.terms}
    reach = 0
    for atom, factor in sorted(index.terms, key=lambda t: abs(t[1])):
        assert isinstance(atom, Var)
        if abs(factor) <= reach:
            return False
        reach += abs(factor) * (atom.extent - 1)
    return all(v in known for v in loops if v.extent > 1)
