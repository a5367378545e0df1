"""Norms of vectors and matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import abs, as_real
from treadle.frontend.functions.distances import vector_norm as norm_along
from treadle.frontend.functions.reductions import length as frobenius
from treadle.frontend.functions.reductions import max as max_over
from treadle.frontend.functions.reductions import min as min_over
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import axes_of, axis_of, permute, reshape, unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.linalg.spectral import svdvals

ORDERS = ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)
TWO = (-2, -1)


def vector_norm(
    x: Operand,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) over axes, all by default; the greatest |x| for inf.

    Shapes: any shape → what is left without the axes of `dim`; with `keepdim` they stay, of size 1.
    """
    real = as_real(x)
    axes = axes_of("vector_norm", dim, real)
    others = [i for i in range(real.ndim) if i not in axes]
    flat = reshape(permute(real, [*others, *axes]), (*(real.shape[i] for i in others), -1))
    found = norm_along(flat, ord, -1)
    shape = [1 if i in axes else n for i, n in enumerate(real.shape)]
    return reshape(found, shape) if keepdim else found


def matrix_norm(
    a: Operand, ord: str | float = "fro", dim: Sequence[int] = TWO, keepdim: bool = False
) -> Tensor:
    """The norm of matrices: "fro", "nuc" (the sum of singular values), ±1, ±2 or ±inf.

    Shapes: (…, m, n) → (…).
    """
    real = as_real(a)
    if ord not in ORDERS or len(dim) != 2:
        raise ArgumentError(
            "matrix_norm",
            f"ord = {ord!r} over the axes {tuple(dim)} of {real.type}",
            f"Give two axes and one of {', '.join(map(repr, ORDERS))}.",
        )
    rows, columns = (axis_of("matrix_norm", axis, real) for axis in dim)
    others = [i for i in range(real.ndim) if i not in (rows, columns)]
    found = _norm(permute(real, [*others, rows, columns]), ord)
    for axis in sorted((rows, columns)) if keepdim else ():
        found = unsqueeze(found, axis)
    return found


def _norm(a: Tensor, ord: str | float) -> Tensor:
    """Over the last two axes."""
    if ord == "fro":
        return frobenius(a, (-2, -1))
    if ord == "nuc":
        return sum_over(svdvals(a), -1)
    assert not isinstance(ord, str)
    lengths = svdvals(a) if math.fabs(ord) == 2 else _sums(a, -2 if math.fabs(ord) == 1 else -1)
    return (max_over if ord > 0 else min_over)(lengths, -1)


def _sums(a: Tensor, axis: int) -> Tensor:
    return sum_over(abs(a), axis)


def norm(
    x: Operand,
    ord: str | float | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
) -> Tensor:
    """`vector_norm` over one axis, or over all if no `ord` is given; else `matrix_norm`.

    Shapes: any shape → what is left without the axes of `dim`; with `keepdim` they stay, of size 1.
    """
    real = as_tensor(x)
    is_pair = isinstance(dim, Sequence) and len(dim) == 2
    if ord is None or not (is_pair or (dim is None and real.ndim == 2)):
        if isinstance(ord, str):
            raise ArgumentError(
                "norm", f"ord = {ord!r} of {real.type} over {dim}", "It is a norm of matrices."
            )
        return vector_norm(x, 2 if ord is None else ord, dim, keepdim)
    return matrix_norm(x, ord, TWO if dim is None or isinstance(dim, int) else dim, keepdim)


def cond(a: Operand) -> Tensor:
    """The largest singular value over the smallest.

    Shapes: (…, m, n) → (…).
    """
    s = svdvals(a)
    return max_over(s, -1) / min_over(s, -1)
