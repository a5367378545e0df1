"""Gauss's elimination with the largest pivots: LU, linear systems, inverses, determinants."""

from __future__ import annotations

from typing import NamedTuple

from treadle.autodiff.transforms import custom_vjp
from treadle.base.trees import Tree
from treadle.frontend.coerce import cast
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import (
    abs,
    as_real,
    eq,
    log,
    remainder,
    sign,
    stop_gradient,
    where,
)
from treadle.frontend.functions.reductions import argmax, prod
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.sequences import diagonal
from treadle.frontend.functions.shaping import (
    arange,
    iota,
    ones_like,
    permute,
    reshape,
    squeeze,
    tril,
    triu,
    unsqueeze,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.linalg.matrices import (
    column,
    entry,
    identity,
    mapped,
    matrices,
    outer,
    product,
    together,
    turned,
)
from treadle.linalg.triangular import check_fit, solved_together, substituted


class LU(NamedTuple):
    """A = P L U: a permutation, a lower triangle with ones on its diagonal, an upper one."""

    P: Tensor
    L: Tensor
    U: Tensor


class SLogDet(NamedTuple):
    """The sign of a determinant, and the logarithm of its absolute value."""

    sign: Tensor
    logabsdet: Tensor


@takes_dim
def lu(a: Operand) -> LU:
    """A = P L U of square matrices, each column's pivot being its largest element.

    Shapes: (…, n, n) → three of (…, n, n).
    """
    found = mapped(_factors, matrices("lu", a, is_square=True))
    assert isinstance(found, LU)
    return found


def _lu(a: Tensor) -> LU:
    """Rows stay where they are until the end; `free` says which have been no pivot yet."""
    b, n, _ = a.shape

    def step(carry: tuple[Tensor, Tensor], k: Tensor) -> tuple[Tree, Tree]:
        left, free = carry
        found = column(left, k)
        chosen = argmax(where(free > 0, abs(found), -1), 1, keepdims=True)
        pick = cast(eq(iota((b, n), 1), chosen), a.dtype)
        pivots = sum_over(left * unsqueeze(pick, 2), 1)  # (b, n)
        free = free - pick
        pivot = entry(pivots, k)
        # A column of zeros is eliminated already; its pivot stays 0.
        factors = where(free > 0, found, 0) / where(eq(pivot, 0), 1, pivot)
        return (left - outer(factors, pivots), free), (pick, pivots, factors)

    start = (a, ones_like(squeeze(a[:, :, :1], 2)))
    _, rows = scan(step, start, arange(n))
    assert isinstance(rows, tuple)
    order, upper, lower = (permute(x, (1, 0, 2)) for x in rows)
    below = tril(product(order, turned(lower)), -1) + identity(n, a)
    return LU(turned(order), below, triu(upper))


def _lu_vjp(ct: LU, out: LU, a: Tensor) -> tuple[Tensor]:
    """dA = P L⁻ᵀ (tril₋₁(Lᵀ dL) + triu(dU Uᵀ)) U⁻ᵀ."""
    lower, upper = turned(out.L), turned(out.U)
    inner = tril(product(lower, ct.L), -1) + triu(product(ct.U, upper))
    left = substituted(lower, inner, upper=True, unit=True)
    right = substituted(out.U, turned(left), upper=True)
    return (product(out.P, turned(right)),)


_factors = custom_vjp(_lu, _lu_vjp)


@takes_dim
def solve(a: Operand, b: Operand, *, left: bool = True) -> Tensor:
    """X with A X = B, or X A = B if not `left`. B has columns, or is a vector as in PyTorch.

    Where a matrix is singular, the result is not finite.

    Shapes: (…, n, n), (…, n, k) → (…, n, k).
    """
    first, second = matrices("solve", a, is_square=True), as_real(b)
    is_vector = second.ndim == 1 or second.shape == first.shape[:-1]
    if is_vector:
        second = unsqueeze(second, -1)
    first, second = together("solve", first, second)
    if not left:
        return turned(solve(turned(first), turned(second)))
    check_fit("solve", first, second)
    found = solved_together(_solved, first, second)
    return squeeze(found, -1) if is_vector else found


def _solve(a: Tensor, b: Tensor) -> Tensor:
    order, lower, upper = _lu(a)
    middle = substituted(lower, product(turned(order), b), upper=False, unit=True)
    return substituted(upper, middle, upper=True)


def _solve_vjp(ct: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """dB = A⁻ᵀ ct, dA = −dB Xᵀ."""
    right = _solve(turned(a), ct)
    return -product(right, turned(x)), right


_solved = custom_vjp(_solve, _solve_vjp)


@takes_dim
def inv(a: Operand) -> Tensor:
    """The inverse of square matrices; `solve` is quicker and more exact if it is multiplied.

    Shapes: (…, n, n) → (…, n, n).
    """
    found = mapped(_inverted, matrices("inv", a, is_square=True))
    assert isinstance(found, Tensor)
    return found


def _inverse(a: Tensor) -> Tensor:
    return _solve(a, identity(a.shape[1], a))


def _inverse_vjp(ct: Tensor, out: Tensor, a: Tensor) -> tuple[Tensor]:
    """dA = −A⁻ᵀ ct A⁻ᵀ."""
    return (-product(turned(out), ct, turned(out)),)


_inverted = custom_vjp(_inverse, _inverse_vjp)


@takes_dim
def det(a: Operand) -> Tensor:
    """The determinant. Where it is 0 its gradient is not finite.

    Shapes: (…, n, n) → (…).
    """

    def found(flat: Tensor) -> Tensor:
        order, _, upper = _factors(flat)
        return _parity(order) * prod(diagonal(upper, axis1=1, axis2=2), 1)

    result = mapped(found, matrices("det", a, is_square=True))
    assert isinstance(result, Tensor)
    return result


def slogdet(a: Operand) -> SLogDet:
    """The sign of the determinant, and log|det A|, which neither overflows nor underflows.

    Shapes: (…, n, n) → two of (…).
    """

    def found(flat: Tensor) -> SLogDet:
        order, _, upper = _factors(flat)
        pivots = diagonal(upper, axis1=1, axis2=2)
        signs = _parity(order) * prod(sign(pivots), 1)
        return SLogDet(signs, sum_over(log(abs(pivots)), 1))

    result = mapped(found, matrices("slogdet", a, is_square=True))
    assert isinstance(result, SLogDet)
    return result


def _parity(order: Tensor) -> Tensor:
    """1 or −1: whether the pairs of rows that a permutation puts out of order are even."""
    n = order.shape[1]
    position = sum_over(stop_gradient(order) * cast(iota((n, n), 0), order.dtype), 1)  # (b, n)
    before, after = reshape(position, (-1, n, 1)), reshape(position, (-1, 1, n))
    crossed = where(before > after, triu(ones_like(order), 1), 0)
    return 1 - 2 * remainder(sum_over(crossed, (1, 2)), 2)
