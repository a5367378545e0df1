"""Cholesky's factor, and triangular systems: by columns of the matrix, or by blocks."""

from __future__ import annotations

from functools import cache

from treadle.autodiff.transforms import Function, custom_vjp
from treadle.base.errors import ShapeError
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import sqrt, where
from treadle.frontend.functions.shaping import arange, iota, permute, tril, triu
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.linalg.blocks import LEAST, cholesky_by_blocks, substituted_by_blocks
from treadle.linalg.matrices import (
    column,
    entry,
    even_part,
    mapped,
    matrices,
    outer,
    product,
    row,
    symmetric,
    together,
    turned,
)


@takes_dim
def cholesky(a: Operand, *, upper: bool = False) -> Tensor:
    """L with L Lᵀ = A, of symmetric positive definite matrices; only lower triangles are read.

    With `upper` it is Lᵀ. Where a matrix is not positive definite, the result has NaNs.

    Shapes: (…, n, n) → (…, n, n).
    """
    lower = mapped(_factor, matrices("cholesky", a, is_square=True))
    assert isinstance(lower, Tensor)
    return turned(lower) if upper else lower


def _cholesky(a: Tensor) -> Tensor:
    """The outer product of each column is taken from what is left: (b, n, n)."""
    if a.shape[1] >= LEAST:
        return cholesky_by_blocks(symmetric(a))

    def step(left: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        found = column(left, k)
        scaled = found / sqrt(entry(found, k))
        below = where(iota((a.shape[1],)) >= k, scaled, 0)
        return left - outer(below, below), below

    _, columns = scan(step, symmetric(a), arange(a.shape[1]))
    assert isinstance(columns, Tensor)
    return permute(columns, (1, 2, 0))


def _cholesky_vjp(ct: Tensor, lower: Tensor, a: Tensor) -> tuple[Tensor]:
    """dA = L⁻ᵀ Φ(Lᵀ dL) L⁻¹, made symmetric; Φ takes the lower triangle and half the diagonal."""
    inner = _half_lower(product(turned(lower), ct))
    solved = substituted(turned(lower), inner, upper=True)
    return (even_part(substituted(turned(lower), turned(solved), upper=True)),)


def _half_lower(a: Tensor) -> Tensor:
    return (tril(a) + tril(a, -1)) * 0.5


_factor = custom_vjp(_cholesky, _cholesky_vjp)


@takes_dim
def solve_triangular(
    a: Operand, b: Operand, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """X with A X = B, or X A = B if not `left`; A is triangular, and what is beyond is not read.

    Shapes: (…, n, n), (…, n, k) → (…, n, k).
    """
    both = together("solve_triangular", a, b)
    if not left:
        x = solve_triangular(
            turned(both[0]), turned(both[1]), upper=not upper, unitriangular=unitriangular
        )
        return turned(x)
    check_fit("solve_triangular", *both)
    return solved_together(_solver(upper, unitriangular), *both)


def check_fit(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != a.shape[-2] or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            name,
            f"{a.type} and {b.type}: the matrix is (n, n) and the right sides are (n, k)",
            "Give a vector as a matrix of one column.",
        )


def solved_together(solver: Function, a: Tensor, b: Tensor) -> Tensor:
    """A solver of (batch, n, n) and (batch, n, k), of any stacks."""
    found = mapped(lambda flat: solver(flat, _like(b, flat)), a)
    assert isinstance(found, Tensor)
    return found


def _like(b: Tensor, flat: Tensor) -> Tensor:
    return b.astype(flat.dtype).reshape(flat.shape[0], *b.shape[-2:])


def substituted(a: Tensor, b: Tensor, upper: bool, unit: bool = False) -> Tensor:
    """A⁻¹ B of (b, n, n) and (b, n, k). Gradients of gradients go back through the iterations."""
    if a.shape[1] >= LEAST:
        return substituted_by_blocks(substituted, a, b, upper, unit)

    def step(left: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        own, found = column(a, k), row(left, k)
        x = found if unit else found / entry(own, k)
        rows = iota((a.shape[1],))
        others = where(rows < k if upper else rows > k, own, 0)
        return left - outer(others, x), x

    _, rows = scan(step, b, arange(a.shape[1]), reverse=upper)
    assert isinstance(rows, Tensor)
    return permute(rows, (1, 0, 2))


@cache
def _solver(upper: bool, unit: bool) -> Function:
    """`substituted` with its gradient."""

    def solve(a: Tensor, b: Tensor) -> Tensor:
        return substituted(a, b, upper, unit)

    def solve_vjp(ct: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """dB = A⁻ᵀ ct; dA = −dB Xᵀ, where A is read."""
        right = substituted(turned(a), ct, not upper, unit)
        whole = -product(right, turned(x))
        return (triu if upper else tril)(whole, (1 if upper else -1) if unit else 0), right

    return custom_vjp(solve, solve_vjp)
