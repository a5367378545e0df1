"""Large matrices by blocks: iterations over columns stay inside a block, the rest are products."""

from __future__ import annotations

from collections.abc import Callable

from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import sqrt, where
from treadle.frontend.functions.dynamic import dynamic_slice, dynamic_update_slice
from treadle.frontend.functions.sequences import diagonal
from treadle.frontend.functions.shaping import arange, concat, iota, pad, permute, reshape
from treadle.frontend.tensor import Tensor
from treadle.linalg.matrices import column, entry, identity, outer, product, row, turned

BLOCK = 32  # rows and columns
LEAST = 65  # of a matrix, from which blocks pay: chosen

Substitution = Callable[[Tensor, Tensor, bool, bool], Tensor]  # A⁻¹ B of small triangles


def cholesky_by_blocks(a: Tensor) -> Tensor:
    """The lower factor of symmetric matrices: (b, n, n)."""
    b, n, _ = a.shape
    start = _whole(a)
    m = start.shape[1]

    def step(left: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        first = k * BLOCK
        panel = dynamic_slice(left, (0, 0, first), (b, m, BLOCK))
        lower, inverse = _factor_and_inverse(dynamic_slice(panel, (0, first, 0), (b, BLOCK, BLOCK)))
        is_below = iota((m, 1), 0) >= first + BLOCK
        below = where(is_below, product(panel, turned(inverse)), 0)
        columns = dynamic_update_slice(below, lower, (0, first, 0))
        return left - product(below, turned(below)), columns

    _, columns = scan(step, start, arange(m // BLOCK))
    assert isinstance(columns, Tensor)  # (blocks, b, m, BLOCK)
    return reshape(permute(columns, (1, 2, 0, 3)), (b, m, m))[:, :n, :n]


def _factor_and_inverse(a: Tensor) -> tuple[Tensor, Tensor]:
    """L with L Lᵀ = A, and L⁻¹: Gauss's elimination of A and the identity beside it."""
    n = a.shape[1]

    def step(left: Tensor, k: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found = column(left, k)
        root = sqrt(entry(found, k))
        scaled, own = found / root, row(left, k) / root
        rows = iota((n,))
        rest = left - outer(where(rows > k, scaled, 0), own)
        return rest, (where(rows >= k, scaled, 0), own[:, n:])

    _, found = scan(step, concat([a, identity(n, a)], 2), arange(n))
    assert isinstance(found, tuple)
    columns, rows = found
    return permute(columns, (1, 2, 0)), permute(rows, (1, 0, 2))


def substituted_by_blocks(
    small: Substitution, a: Tensor, b: Tensor, upper: bool, unit: bool
) -> Tensor:
    """A⁻¹ B of triangles (b, n, n) and (b, n, k): inverses of the blocks on the diagonal first."""
    count, n, k = b.shape
    whole = _whole(a)
    m = whole.shape[1]
    blocks = m // BLOCK
    parts = reshape(whole, (count, blocks, BLOCK, blocks, BLOCK))
    own = reshape(permute(diagonal(parts, 0, 1, 3), (3, 0, 1, 2)), (-1, BLOCK, BLOCK))
    inverses = reshape(small(own, identity(BLOCK, own), upper, unit), (blocks, count, BLOCK, BLOCK))

    def step(left: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        number, inverse = given
        first, rows = number * BLOCK, iota((m, 1), 0)
        x = product(inverse, dynamic_slice(left, (0, first, 0), (count, BLOCK, k)))
        others = dynamic_slice(whole, (0, 0, first), (count, m, BLOCK))
        is_left = rows < first if upper else rows >= first + BLOCK
        return left - product(where(is_left, others, 0), x), x

    start = pad(b, [(0, 0), (0, m - n), (0, 0)])
    _, found = scan(step, start, (arange(blocks), inverses), reverse=upper)
    assert isinstance(found, Tensor)  # (blocks, b, BLOCK, k)
    return reshape(permute(found, (1, 0, 2, 3)), (count, m, k))[:, :n]


def _whole(a: Tensor) -> Tensor:
    """Whole blocks: with ones on the diagonal behind a matrix."""
    n = a.shape[1]
    more = -n % BLOCK
    if not more:
        return a
    behind = pad(identity(more, a), [(0, 0), (n, 0), (n, 0)])
    return pad(a, [(0, 0), (0, more), (0, more)]) + behind
