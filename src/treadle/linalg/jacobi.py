"""Jacobi's rotations, half as many at once as there are columns: eigenvalues, singular values.

Columns are turned until they are orthogonal (Hestenes). In each round column i is turned against
column i + n/2, and then the columns move on as players of a tournament do: after n − 1 rounds, a
sweep, each has met every other and is back where it was. All indices are fixed, so that a round is
one formula for all pairs and the loop's body is small.
"""

from __future__ import annotations

import math

from treadle.base.dtypes import float64
from treadle.base.trees import Tree
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import abs, eq, rsqrt, sqrt, where
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import concat, pad, slice_along, unsqueeze
from treadle.frontend.tensor import Tensor
from treadle.linalg.matrices import identity, turned

LANES = 16  # float32s in the widest vectors


def sweeps_for(n: int, is_double: bool) -> int:
    """Sweeps until rounding is all that is left: measured up to n = 64, and some to spare."""
    return math.ceil(math.log2(max(2, n))) + (6 if is_double else 3)


def orthogonalized(a: Tensor) -> tuple[Tensor, Tensor]:
    """Of (b, m, n): orthogonal rows Vᵀ Aᵀ, the (b, n, m), and Vᵀ, in no order.

    What is turned are rows, so that all of a row's elements are neighbours in memory.
    """
    _, m, n = a.shape
    more = n % 2  # a row of zeros stays one
    rows = pad(turned(a), [(0, 0), (0, more), (0, _filled(m) - m)])
    start = pad(identity(n + more, a), [(0, 0), (0, 0), (0, _filled(n + more) - n - more)])
    both, width = concat([rows, start], 2), _filled(m)

    def step(left: Tensor, _: Tree) -> tuple[Tree, Tree]:
        half = (n + more) // 2
        low, high = slice_along(left, 1, 0, half), slice_along(left, 1, half, 2 * half)
        p, q = slice_along(low, 2, 0, width), slice_along(high, 2, 0, width)
        cosine, sine = _angles(sum_over(q * q - p * p, 2), sum_over(p * q, 2))
        return _moved_on(cosine * low - sine * high, sine * low + cosine * high), ()

    left, _ = scan(step, both, length=_rounds(n, a.dtype is float64))
    assert isinstance(left, Tensor)
    cut = slice_along(left, 1, 0, n)
    vectors = slice_along(cut, 2, width, width + n)
    # Hundreds of rotations, each with cos² + sin² = 1 but for rounding, have made them longer.
    length = rsqrt(sum_over(vectors * vectors, 2, keepdims=True))
    return slice_along(cut, 2, 0, m) * length, vectors * length


def _filled(n: int) -> int:
    """Whole vectors: zeros cost less than the elements that a vector leaves over."""
    return n if n <= LANES // 2 else -(-n // LANES) * LANES


def _rounds(n: int, is_double: bool) -> int:
    return sweeps_for(n, is_double) * (n + n % 2 - 1)


def _angles(difference: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the smaller rotations that make ((p, o), (o, q)) diagonal: (b, h, 1)."""
    is_done = eq(off, 0)
    cotangent = difference / (where(is_done, 1, off) * 2)  # of twice the angle
    size = 1 / (abs(cotangent) + sqrt(cotangent * cotangent + 1))
    tangent = where(is_done, 0, where(cotangent < 0, -size, size))
    cosine = rsqrt(tangent * tangent + 1)
    return unsqueeze(cosine, 2), unsqueeze(cosine * tangent, 2)


def _moved_on(low: Tensor, high: Tensor) -> Tensor:
    """The rows in their places of the next round: the first stays, all others go round it."""
    half = low.shape[1]
    if half == 1:
        return concat([low, high], 1)
    parts = [
        slice_along(low, 1, 0, 1),
        slice_along(high, 1, 0, 1),
        slice_along(low, 1, 1, half - 1),
        slice_along(high, 1, 1, half),
        slice_along(low, 1, half - 1, half),
    ]
    return concat([part for part in parts if part.shape[1]], 1)
