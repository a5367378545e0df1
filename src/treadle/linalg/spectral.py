"""Eigenvalues of symmetric matrices, singular values, and what is made of them."""

from __future__ import annotations

from typing import NamedTuple

from treadle.autodiff.transforms import custom_vjp
from treadle.base.dtypes import float64
from treadle.base.errors import ArgumentError
from treadle.frontend.functions.arithmetic import abs, where
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.reductions import argsort, sort
from treadle.frontend.functions.reductions import max as max_over
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.sequences import diag_embed, diagonal
from treadle.frontend.functions.shaping import expand, eye, slice_along, unsqueeze
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.linalg.jacobi import orthogonalized
from treadle.linalg.matrices import (
    even_part,
    identity,
    mapped,
    matrices,
    product,
    symmetric,
    turned,
)
from treadle.linalg.orthogonal import householder


class Eigh(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class SVD(NamedTuple):
    """A = U diag(S) Vh, singular values in descending order."""

    U: Tensor
    S: Tensor
    Vh: Tensor


@takes_dim
def eigh(a: Operand, UPLO: str = "L") -> Eigh:  # noqa: N803  PyTorch's name
    """Eigenvalues and eigenvectors of symmetric matrices; only one triangle is read.

    The gradient takes eigenvalues that are equal but for rounding as one: what mixes their
    eigenvectors gets none.

    Shapes: (…, n, n) → (…, n) and (…, n, n).
    """
    given = matrices("eigh", a, is_square=True)
    if UPLO not in ("L", "U"):
        raise ArgumentError("eigh", f"UPLO = {UPLO!r}", 'The triangle that is read: "L" or "U".')
    found = mapped(_decomposed, given if UPLO == "L" else turned(given))
    assert isinstance(found, Eigh)
    return found


def eigvalsh(a: Operand, UPLO: str = "L") -> Tensor:  # noqa: N803
    """The eigenvalues of symmetric matrices, in ascending order.

    Shapes: (…, n, n) → (…, n).
    """
    return eigh(a, UPLO).eigenvalues


def _eigh(a: Tensor) -> Eigh:
    """Of a multiple of the identity added, all eigenvalues are positive, and singular values too.

    They are taken of A itself again, as lengths along its eigenvectors.
    """
    whole = symmetric(a)
    bound = max_over(sum_over(abs(whole), 2, keepdims=True), 1, keepdims=True)
    _, vectors = orthogonalized(whole + 2 * bound * eye(a.shape[1], dtype=a.dtype))
    values = sum_over(product(vectors, whole) * vectors, 2)
    ordered, order = sort(values, 1)
    return Eigh(ordered, turned(_rows(vectors, order)))


def _rows(a: Tensor, order: Tensor) -> Tensor:
    """Rows in another order for each matrix."""
    return take_along_axis(a, expand(unsqueeze(order, 2), a.shape), 1)


def _eigh_vjp(ct: Eigh, out: Eigh, a: Tensor) -> tuple[Tensor]:
    """dA = V (diag(dλ) + (Vᵀ dV) ∘ F) Vᵀ, made symmetric; F = 1 / (λⱼ − λᵢ)."""
    values, vectors = out
    turns = product(turned(vectors), ct.eigenvectors) * _inverse_gaps(values)
    inner = diag_embed(ct.eigenvalues) + turns
    return (even_part(product(vectors, inner, turned(vectors))),)


def _inverse_gaps(x: Tensor) -> Tensor:
    """1 / (xⱼ − xᵢ), and 0 where the two are the same but for rounding."""
    gaps = unsqueeze(x, 1) - unsqueeze(x, 2)
    scale = max_over(abs(x), 1, keepdims=True) * (epsilon(x) * x.shape[1])
    is_same = abs(gaps) <= unsqueeze(scale, 2)
    return where(is_same, 0, 1 / where(is_same, 1, gaps))


def epsilon(x: Tensor) -> float:
    """The precision that is computed in: narrow floats are float32 by then."""
    return 2.0**-52 if x.dtype is float64 else 2.0**-23


_decomposed = custom_vjp(_eigh, _eigh_vjp)


@takes_dim
def svd(a: Operand, full_matrices: bool = True) -> SVD:
    """A = U diag(S) Vh; U and Vh are square, or as large as they must be if not `full_matrices`.

    The gradient takes singular values that are equal but for rounding as one, and does not reach
    the columns of U and rows of Vh that have no singular value.

    Shapes: (…, m, n) → (…, m, m), (…, min(m, n)) and (…, n, n).
    """
    given = matrices("svd", a)
    m, n = given.shape[-2:]
    if m < n:
        u, s, vh = svd(turned(given), full_matrices)
        return SVD(turned(vh), s, turned(u))
    found = mapped(_full if full_matrices and m > n else _thin, given)
    assert isinstance(found, SVD)
    return found


def svdvals(a: Operand) -> Tensor:
    """The singular values, in descending order.

    Shapes: (…, m, n) → (…, min(m, n)).
    """
    return svd(a, full_matrices=False).S


def _svd(a: Tensor, width: int) -> SVD:
    """Of (b, m, n) with m ≥ n. The left vectors come by reflections: orthonormal at any rank."""
    scaled, vectors = orthogonalized(a)
    order = argsort(sum_over(scaled * scaled, 2), 1, descending=True)
    q, r = householder(turned(_rows(scaled, order)), width)
    pivots = diagonal(r, axis1=1, axis2=2)
    right = _rows(vectors, order)
    return SVD(q, abs(pivots), where(unsqueeze(pivots < 0, 2), -right, right))


def _thin_svd(a: Tensor) -> SVD:
    return _svd(a, a.shape[2])


def _full_svd(a: Tensor) -> SVD:
    return _svd(a, a.shape[1])


def _svd_vjp(ct: SVD, out: SVD, a: Tensor) -> tuple[Tensor]:
    """dA = U (skew(Uᵀ dU) ∘ F Σ + Σ skew(Vᵀ dV) ∘ F + diag(dS)) Vᵀ, and what is beyond U.

    F = 1 / (Sⱼ² − Sᵢ²).
    """
    m, k = a.shape[1], out.S.shape[1]
    u, ct_u = slice_along(out.U, 2, 0, k), slice_along(ct.U, 2, 0, k)
    vh, s = out.Vh, out.S
    gaps = _inverse_gaps(s * s)
    inside = product(turned(u), ct_u)
    left = _skew(inside) * gaps * unsqueeze(s, 1)
    right = _skew(product(vh, turned(ct.Vh))) * gaps * unsqueeze(s, 2)
    found = product(u, left + right + diag_embed(ct.S), vh)
    if m > k:
        beyond = ct_u - product(u, inside)
        found = found + product(beyond * unsqueeze(_inverse(s), 1), vh)
    return (found,)


def _skew(a: Tensor) -> Tensor:
    return a - turned(a)


def _inverse(s: Tensor, tolerance: float | None = None) -> Tensor:
    """1 / s, and 0 where s is 0 but for rounding."""
    share = epsilon(s) * s.shape[1] if tolerance is None else tolerance
    is_none = s <= max_over(s, 1, keepdims=True) * share
    return where(is_none, 0, 1 / where(is_none, 1, s))


_thin = custom_vjp(_thin_svd, _svd_vjp)
_full = custom_vjp(_full_svd, _svd_vjp)


@takes_dim
def matrix_rank(a: Operand, *, rtol: float | None = None) -> Tensor:
    """How many singular values are above `rtol` times the largest one.

    Shapes: (…, m, n) → (…).
    """
    given = matrices("matrix_rank", a)
    s = svdvals(given)
    share = default_tolerance(given) if rtol is None else rtol
    above = s > max_over(s, -1, keepdims=True) * share
    return sum_over(above, -1)


def default_tolerance(a: Tensor) -> float:
    """The larger size times the precision, as in PyTorch."""
    return epsilon(a) * max(a.shape[-2:])


@takes_dim
def pinv(a: Operand, *, rtol: float | None = None) -> Tensor:
    """The pseudo-inverse: singular values up to `rtol` times the largest count as 0.

    Shapes: (…, m, n) → (…, n, m).
    """
    given = matrices("pinv", a)
    m, n = given.shape[-2:]
    if m < n:
        return turned(pinv(turned(given), rtol=rtol))
    share = default_tolerance(given) if rtol is None else rtol

    def forward(a: Tensor) -> Tensor:
        u, s, vh = _thin_svd(a)
        return product(turned(vh) * unsqueeze(_inverse(s, share), 1), turned(u))

    found = mapped(custom_vjp(forward, _pinv_vjp), given)
    assert isinstance(found, Tensor)
    return found


def _pinv_vjp(ct: Tensor, p: Tensor, a: Tensor) -> tuple[Tensor]:
    """dA = −Pᵀ ct Pᵀ + (1 − A P) ctᵀ P Pᵀ + Pᵀ P ctᵀ (1 − P A), the rank being constant."""
    m, n = a.shape[1:]
    back, over = turned(p), turned(ct)
    left = identity(m, a) - product(a, p)
    right = identity(n, a) - product(p, a)
    straight = product(back, ct, back)
    return (product(left, over, p, back) + product(back, p, over, right) - straight,)
