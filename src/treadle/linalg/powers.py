"""Powers and exponentials of matrices, products of several, cross products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend.coerce import constant
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import abs, gt, stop_gradient, where
from treadle.frontend.functions.linear import aligned, matmul
from treadle.frontend.functions.linear import cross as cross_along
from treadle.frontend.functions.reductions import max as max_over
from treadle.frontend.functions.reductions import prod as prod_over
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import integer_of, reshape, unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.linalg.elimination import inv
from treadle.linalg.matrices import identity, matrices, product, stacked, unstacked

HALVINGS = 20  # of a matrix whose exponential is asked for: norms up to 2²⁰
DEGREE = {32: 12, 64: 18}  # of Taylor's series for norms up to 1, by bits: 1/13! and 1/19! are left


def matrix_power(a: Operand, n: int) -> Tensor:
    """The matrix multiplied with itself, n factors; the inverse's power for a negative n.

    Shapes: (…, m, m) → (…, m, m).
    """
    base = matrices("matrix_power", a, is_square=True)
    count = integer_of("matrix_power", "n", n)
    if count < 0:
        base, count = inv(base), -count
    if count == 0:
        one = identity(base.shape[-1], stacked(base))
        return unstacked(one, base.shape[:-2], base.dtype)
    found: Tensor | None = None
    while True:
        if count % 2:
            found = base if found is None else matmul(found, base)
        count //= 2
        if not count:
            assert found is not None
            return found
        base = matmul(base, base)


def matrix_exp(a: Operand) -> Tensor:
    """The exponential Σ Aᵏ / k! of matrices. NaN where the columns' norm is above 2²⁰.

    Shapes: (…, n, n) → (…, n, n).
    """
    given = matrices("matrix_exp", a, is_square=True)
    x = stacked(given)
    norm = stop_gradient(max_over(sum_over(abs(x), 1), 1))  # (batch,)
    powers = 2.0 ** np.arange(HALVINGS, dtype=x.dtype.numpy)
    is_large = gt(unsqueeze(norm, 1), powers)  # (batch, HALVINGS)
    scale = prod_over(where(is_large, constant(0.5, (), x.dtype), 1), 1)
    small = x * reshape(scale, (-1, 1, 1))

    def square(now: Tensor, is_halved: Tensor) -> tuple[Tensor, None]:
        return where(reshape(is_halved, (-1, 1, 1)), product(now, now), now), None

    found, _ = scan(square, _taylor(small, DEGREE[x.dtype.bits]), is_large.T)
    assert isinstance(found, Tensor)
    is_lost = reshape(gt(norm, 2.0**HALVINGS), (-1, 1, 1))
    return unstacked(where(is_lost, math.nan, found), given.shape[:-2], given.dtype)


def _taylor(x: Tensor, degree: int) -> Tensor:
    """Σ xᵏ / k! up to a degree, by blocks of four powers (Paterson and Stockmeyer)."""
    one = identity(x.shape[1], x)
    x2 = product(x, x)
    low = (one, x, x2, product(x2, x))
    x4 = product(x2, x2)
    found: Tensor | None = None
    for start in reversed(range(0, degree + 1, 4)):
        count = min(4, degree + 1 - start)
        block = low[0] * (1 / math.factorial(start))
        for i in range(1, count):
            block = block + low[i] * (1 / math.factorial(start + i))
        found = block if found is None else product(x4, found) + block
    assert found is not None
    return found


def multi_dot(tensors: Sequence[Operand]) -> Tensor:
    """The product of several matrices in the order that takes the fewest multiplications.

    The first and the last may be vectors, a row and a column.

    Shapes: (A, B), (B, C), … , (Y, Z) → (A, Z).
    """
    given = aligned(*tensors)
    if len(given) < 2:
        raise ArgumentError("multi_dot", f"{len(given)} tensors", "Pass at least two.")
    ends = (0, len(given) - 1)
    for i, x in enumerate(given):
        if x.ndim != 2 and not (x.ndim == 1 and i in ends):
            raise ShapeError(
                "multi_dot", f"tensor {i} is {x.type}", "Give matrices; the ends may be vectors."
            )
    factors = list(given)
    if given[0].ndim == 1:
        factors[0] = unsqueeze(given[0], 0)
    if given[-1].ndim == 1:
        factors[-1] = unsqueeze(given[-1], 1)
    for left, right in pairwise(factors):
        if left.shape[1] != right.shape[0]:
            raise ShapeError(
                "multi_dot", f"{left.type} and {right.type}", "Inner sizes must be equal."
            )
    found = _chained(factors)
    sizes = [n for n, x in zip(found.shape, (given[0], given[-1]), strict=True) if x.ndim == 2]
    return reshape(found, tuple(sizes))


def _chained(factors: list[Tensor]) -> Tensor:
    """The product, split where the table of costs says."""
    sizes = [factors[0].shape[0], *(f.shape[1] for f in factors)]
    n = len(factors)
    cost = {(i, i): (0, i) for i in range(n)}  # multiplications, and where the range is split
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            cost[i, j] = min(
                (cost[i, k][0] + cost[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k)
                for k in range(i, j)
            )

    def of(i: int, j: int) -> Tensor:
        if i == j:
            return factors[i]
        split = cost[i, j][1]
        return matmul(of(i, split), of(split + 1, j))

    return of(0, n - 1)


def cross(x: Operand, y: Operand, dim: int = -1) -> Tensor:
    """The cross product along an axis of three; the other axes broadcast.

    Shapes: (…, 3), (…, 3) → (…, 3).
    """
    return cross_along(x, y, dim)
