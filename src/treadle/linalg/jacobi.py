"""Jacobi's rotations, half as many at once as there are columns: eigenvalues, singular values.

In each round column i is turned against column i + n/2, and then the columns move on as players of
a tournament do: after n − 1 rounds, a sweep, each has met every other and is back where it was.
All indices are fixed, so that a round is one formula for all pairs and the loop's body is small.
"""

from __future__ import annotations

import math

from treadle.base.dtypes import float64
from treadle.base.trees import Tree
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import abs, eq, sqrt, where
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.sequences import diagonal
from treadle.frontend.functions.shaping import concat, pad, slice_along, unsqueeze
from treadle.frontend.tensor import Tensor
from treadle.linalg.matrices import identity

Angles = tuple[Tensor, Tensor]  # cosines and sines, (b, n / 2)


def sweeps_for(n: int, is_double: bool) -> int:
    """Sweeps until rounding is all that is left: measured up to n = 64, and some to spare."""
    return math.ceil(math.log2(max(2, n))) + (6 if is_double else 3)


def diagonalized(a: Tensor) -> tuple[Tensor, Tensor]:
    """Of symmetric (b, n, n): the diagonal that is left and the rotations, in no order."""
    n = a.shape[1]
    even = _even(a)

    def step(carry: tuple[Tensor, Tensor], _: Tree) -> tuple[Tree, Tree]:
        left, vectors = carry
        half = left.shape[1] // 2
        pivots = diagonal(left, axis1=1, axis2=2)
        off = diagonal(left, half, 1, 2)
        low, high = slice_along(pivots, 1, 0, half), slice_along(pivots, 1, half, 2 * half)
        angles = _angles(high - low, off)
        turned = _rotated(_rotated(left, angles, 1), angles, 2)
        return (turned, _rotated(vectors, angles, 2)), ()

    carry, _ = scan(step, (even, identity(even.shape[1], a)), length=_rounds(even, a))
    assert isinstance(carry, tuple)
    values, vectors = diagonal(carry[0], axis1=1, axis2=2), carry[1]
    return slice_along(values, 1, 0, n), slice_along(slice_along(vectors, 1, 0, n), 2, 0, n)


def orthogonalized(a: Tensor) -> tuple[Tensor, Tensor]:
    """Of (b, m, n): A V with orthogonal columns, and V, in no order."""
    m, n = a.shape[1:]
    even = pad(a, [(0, 0), (0, 0), (0, n % 2)])
    both = concat([even, identity(n + n % 2, a)], 1)

    def step(left: Tensor, _: Tree) -> tuple[Tree, Tree]:
        columns = slice_along(left, 1, 0, m)
        half = left.shape[2] // 2
        low, high = slice_along(columns, 2, 0, half), slice_along(columns, 2, half, 2 * half)
        angles = _angles(sum_over(high * high - low * low, 1), sum_over(low * high, 1))
        return _rotated(left, angles, 2), ()

    left, _ = scan(step, both, length=_rounds(even, a))
    assert isinstance(left, Tensor)
    cut = slice_along(left, 2, 0, n)
    return slice_along(cut, 1, 0, m), slice_along(cut, 1, m, m + n)


def _even(a: Tensor) -> Tensor:
    """With a row and a column of zeros more, where their number is odd: they stay zeros."""
    more = a.shape[1] % 2
    return pad(a, [(0, 0), (0, more), (0, more)])


def _rounds(even: Tensor, a: Tensor) -> int:
    n = a.shape[2]
    return 0 if n == 1 else sweeps_for(n, a.dtype is float64) * (even.shape[2] - 1)


def _angles(difference: Tensor, off: Tensor) -> Angles:
    """Of the smaller of the two rotations that make the symmetric ((p, o), (o, q)) diagonal."""
    is_done = eq(off, 0)
    cotangent = difference / (where(is_done, 1, off) * 2)  # of twice the angle
    size = 1 / (abs(cotangent) + sqrt(cotangent * cotangent + 1))
    tangent = where(is_done, 0, where(cotangent < 0, -size, size))
    cosine = 1 / sqrt(tangent * tangent + 1)
    return cosine, cosine * tangent


def _rotated(x: Tensor, angles: Angles, axis: int) -> Tensor:
    """The first half along an axis turned against the second, and all moved on."""
    half = x.shape[axis] // 2
    first, second = slice_along(x, axis, 0, half), slice_along(x, axis, half, 2 * half)
    cosine, sine = (unsqueeze(angle, 3 - axis) for angle in angles)
    low, high = cosine * first - sine * second, sine * first + cosine * second
    if half == 1:
        return concat([low, high], axis)
    parts = [
        slice_along(low, axis, 0, 1),
        slice_along(high, axis, 0, 1),
        slice_along(low, axis, 1, half - 1),
        slice_along(high, axis, 1, half),
        slice_along(low, axis, half - 1, half),
    ]
    return concat([part for part in parts if part.shape[axis]], axis)
