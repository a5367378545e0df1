"""QR by Householder's reflections, and least squares."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from treadle.autodiff.transforms import Function, custom_vjp
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.trees import Tree
from treadle.frontend.coerce import broadcast_to
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import eq, sqrt, where
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import (
    arange,
    concat,
    eye,
    iota,
    slice_along,
    tril,
    triu,
    unsqueeze,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.linalg.matrices import (
    column,
    entry,
    mapped,
    matrices,
    outer,
    product,
    together,
    turned,
)
from treadle.linalg.triangular import solve_triangular, substituted


class QR(NamedTuple):
    """A = Q R, with orthonormal columns and an upper triangle."""

    Q: Tensor
    R: Tensor


def qr(a: Operand, mode: str = "reduced") -> QR:
    """A = Q R of (m, n) matrices; Q is (m, min(m, n)), or (m, m) in the mode "complete".

    Signs are LAPACK's. The gradient needs the first min(m, n) columns to be independent.

    Shapes: (…, m, n) → (…, m, min(m, n)) and (…, min(m, n), n).
    """
    given = matrices("qr", a)
    m, n = given.shape[-2:]
    if mode not in ("reduced", "complete"):
        raise ArgumentError("qr", f"mode = {mode!r}", 'It is "reduced" or "complete".')
    is_whole = mode == "complete" and m > n
    found = mapped(_reflected(m) if is_whole else _factors, given)
    assert isinstance(found, QR)
    return found


def _reflections(a: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """R below which nothing is left, and the reflections 1 − τ v vᵀ: (k, b, m) and (k, b, 1)."""
    _, m, n = a.shape

    def step(left: Tensor, k: Tensor) -> tuple[Tree, Tree]:
        rows, found = iota((m,)), column(left, k)
        head = entry(found, k)
        tail = where(rows > k, found, 0)
        rest = sum_over(tail * tail, 1, keepdims=True)
        # Nothing below the diagonal, nothing to reflect: LAPACK keeps the sign then.
        is_done = eq(rest, 0)
        length = sqrt(head * head + where(is_done, 1, rest))
        pivot = where(head > 0, -length, length)
        normal = tail + where(eq(rows, k), head - pivot, 0)
        tau = where(is_done, 0, (pivot - head) / pivot)
        scaled = normal / where(is_done, 1, head - pivot)
        return _reflect(left, scaled, tau), (scaled, tau)

    left, parts = scan(step, a, arange(min(m, n)))
    assert isinstance(left, Tensor)
    assert isinstance(parts, tuple)
    return left, parts


def _reflect(a: Tensor, v: Tensor, tau: Tensor) -> Tensor:
    """A − τ v (vᵀ A)."""
    return a - outer(v * tau, sum_over(unsqueeze(v, 2) * a, 1))


def householder(a: Tensor, width: int) -> QR:
    """`width` columns of Q, by the reflections in reverse."""
    b, m, _ = a.shape
    left, reflections = _reflections(a)

    def step(q: Tensor, reflection: tuple[Tensor, Tensor]) -> tuple[Tree, Tree]:
        return _reflect(q, *reflection), ()

    start = broadcast_to(eye(m, width, dtype=a.dtype), (b, m, width))
    q, _ = scan(step, start, reflections, reverse=True)
    assert isinstance(q, Tensor)
    return QR(q, triu(slice_along(left, 1, 0, width)))


@cache
def _reflected(width: int) -> Function:
    """All columns of Q: the gradient goes back through the reflections."""
    return lambda a: householder(a, width)


def _reduced(a: Tensor) -> QR:
    return householder(a, min(a.shape[1:]))


def _reduced_vjp(ct: QR, out: QR, a: Tensor) -> tuple[Tensor]:
    """dA = (dQ + Q copyltu(R dRᵀ − dQᵀ Q)) R⁻ᵀ; of wide matrices that is the first square.

    Columns after it are Qᵀ times them: they go by products.
    """
    n, k = a.shape[2], out.Q.shape[2]
    ct_q, ct_r, square = ct.Q, slice_along(ct.R, 2, 0, k), slice_along(out.R, 2, 0, k)
    extra = slice_along(ct.R, 2, k, n) if n > k else None
    if extra is not None:
        ct_q = ct_q + product(slice_along(a, 2, k, n), turned(extra))
    inner = product(square, turned(ct_r)) - product(turned(ct_q), out.Q)
    mirrored = tril(inner) + turned(tril(inner, -1))
    sides = turned(ct_q + product(out.Q, mirrored))
    first = turned(substituted(square, sides, upper=True))
    return (first if extra is None else concat([first, product(out.Q, extra)], 2),)


_factors = custom_vjp(_reduced, _reduced_vjp)


class LstSq(NamedTuple):
    """The X that makes |A X − B| smallest, and the sums of squares that are left, by column."""

    solution: Tensor
    residuals: Tensor


@takes_dim
def lstsq(a: Operand, b: Operand) -> LstSq:
    """X that makes |A X − B| smallest, by QR: A has full rank. If A is wide, the shortest such X.

    Shapes: (…, m, n), (…, m, k) → a solution (…, n, k).
    """
    first, second = together("lstsq", a, b)
    if first.shape[-2] != second.shape[-2]:
        raise ShapeError(
            "lstsq",
            f"{first.type} and {second.type} have different numbers of rows",
            "Give one right side for each row of A.",
        )
    m, n = first.shape[-2:]
    if m >= n:
        q, r = qr(first)
        x = solve_triangular(r, product(turned(q), second), upper=True)
    else:
        q, r = qr(turned(first))
        x = product(q, solve_triangular(turned(r), second, upper=False))
    rest = product(first, x) - second
    return LstSq(x, sum_over(rest * rest, -2))
