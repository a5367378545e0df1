"""Norms of rows, distances and similarities between them."""

from __future__ import annotations

from treadle.base.errors import ShapeError
from treadle.frontend.coerce import align, as_tensor
from treadle.frontend.functions.arithmetic import as_real, maximum
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.reductions import norm_over
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import axis_of, number_of, transpose, unsqueeze
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor


@takes_dim
def vector_norm(x: Operand, p: float = 2.0, axis: int = -1, keepdims: bool = False) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) along an axis; the greatest |x| for p = inf. Its slope at 0 is 0.

    p may be −inf (the least |x|), negative, or 0 (how many are not 0).
    """
    x = as_tensor(x)
    return norm_over(as_real(x), p, axis_of("vector_norm", axis, x), keepdims)


@takes_dim
def normalize(x: Operand, p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> Tensor:
    """x / max(|x|, eps) along an axis: rows of length 1, as F.normalize. The shape stays."""
    x = as_tensor(x)
    length = vector_norm(x, p, axis, keepdims=True)
    return x / maximum(length, number_of("normalize", "eps", eps))


@takes_dim
def cosine_similarity(x1: Operand, x2: Operand, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """x₁ · x₂ / (max(|x₁|, eps) · max(|x₂|, eps)) along an axis: (N, D), (N, D) → (N,)."""
    a, b = align("cosine_similarity", x1, x2)
    at = axis_of("cosine_similarity", axis, a)
    least = number_of("cosine_similarity", "eps", eps)
    lengths = (maximum(vector_norm(t, 2.0, at, keepdims=True), least) for t in (a, b))
    first, second = lengths
    return sum_of((a / first) * (b / second), at)


@takes_dim
def pairwise_distance(
    x1: Operand, x2: Operand, p: float = 2.0, eps: float = 1e-6, keepdims: bool = False
) -> Tensor:
    """The p-norm of x₁ − x₂ + eps along the last axis: (N, D), (N, D) → (N,), as in PyTorch."""
    a, b = align("pairwise_distance", x1, x2)
    return vector_norm(a - b + number_of("pairwise_distance", "eps", eps), p, -1, keepdims)


@takes_dim
def cdist(x1: Operand, x2: Operand, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Distances of all pairs of rows: (…, P, M), (…, R, M) → (…, P, R).

    Differences are always computed; `compute_mode` is there because PyTorch has it.
    """
    a, b = as_tensor(x1), as_tensor(x2)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ShapeError("cdist", f"{a.type} and {b.type}", "Both are rows of one width.")
    return vector_norm(unsqueeze(a, -2) - unsqueeze(b, -3), p, -1)


def squared_distances(x1: Operand, x2: Operand) -> Tensor:
    """|x₁ − x₂|² of all pairs of rows by one matmul: (…, P, M), (…, R, M) → (…, P, R).

    Where rounding would leave a small negative number there is 0.
    """
    a, b = as_tensor(x1), as_tensor(x2)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ShapeError("squared_distances", f"{a.type} and {b.type}", "Rows of one width.")
    squares = unsqueeze(sum_of(a * a, -1), -1) + unsqueeze(sum_of(b * b, -1), -2)
    return maximum(squares - matmul(a, transpose(b, -1, -2)) * 2, 0)
