"""Complex numbers: a last axis of two, the real and the imaginary part, as torch.view_as_real."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend.functions.arithmetic import as_real, atan2, neg
from treadle.frontend.functions.elementary import hypot
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.shaping import (
    permute,
    reshape,
    slice_along,
    squeeze,
    stack,
    transpose,
)
from treadle.frontend.tensor import Operand, Tensor


def checked(name: str, z: Operand) -> Tensor:
    """A tensor of complex numbers."""
    found = as_real(z)
    if found.ndim == 0 or found.shape[-1] != 2:
        raise ShapeError(
            name,
            f"{found.type} has no last axis of two, for the real and the imaginary part",
            "Make complex numbers by td.fft.complex(real, imag).",
        )
    return found


def _part(z: Tensor, which: int) -> Tensor:
    return squeeze(slice_along(z, z.ndim - 1, which, which + 1), -1)


def complex(real: Operand, imag: Operand) -> Tensor:
    """Complex numbers of their parts, as torch.complex.

    Shapes: two of (…) → (…, 2).
    """
    return stack([as_real(real), as_real(imag)], -1)


def real(z: Operand) -> Tensor:
    """The real part.

    Shapes: (…, 2) → (…).
    """
    return _part(checked("real", z), 0)


def imag(z: Operand) -> Tensor:
    """The imaginary part.

    Shapes: (…, 2) → (…).
    """
    return _part(checked("imag", z), 1)


def conj(z: Operand) -> Tensor:
    """The conjugate: the imaginary part negated.

    Shapes: (…, 2) → (…, 2).
    """
    pair = checked("conj", z)
    return stack([_part(pair, 0), neg(_part(pair, 1))], -1)


def multiply(x: Operand, y: Operand) -> Tensor:
    """The products of complex numbers, with broadcasting.

    Shapes: two of (…, 2) → (…, 2).
    """
    a, b = checked("multiply", x), checked("multiply", y)
    ar, ai, br, bi = _part(a, 0), _part(a, 1), _part(b, 0), _part(b, 1)
    return stack([ar * br - ai * bi, ar * bi + ai * br], -1)


def abs(z: Operand) -> Tensor:
    """The absolute value; the gradient at 0 is 0.

    Shapes: (…, 2) → (…).
    """
    pair = checked("abs", z)
    return hypot(_part(pair, 0), _part(pair, 1))


def angle(z: Operand) -> Tensor:
    """The angle from the real axis, between −π and π; the gradient at 0 is 0.

    Shapes: (…, 2) → (…).
    """
    pair = checked("angle", z)
    return atan2(_part(pair, 1), _part(pair, 0))


def einsum(spec: str, x: Operand, y: Operand) -> Tensor:
    """Sums of products of two tensors of complex numbers by labels of their axes but the last.

    Shapes: labels are of all axes but the last: (I, J, 2), (J, K, 2) → (I, K, 2) for "ij,jk->ik".
    """
    a, b = checked("einsum", x), checked("einsum", y)
    left, right, result = _terms(spec, a, b)
    batch = [c for c in result if c in left and c in right]
    summed = [c for c in left if c in right and c not in result]
    rows, columns = ([c for c in t if c not in o] for t, o in ((left, right), (right, left)))
    sizes = {**dict(zip(left, a.shape, strict=False)), **dict(zip(right, b.shape, strict=False))}
    # A number as a matrix of two by two: one real product instead of four. Of the smaller operand.
    # The axis of the sum is +, that of the result is *.
    if math.prod(a.shape) < math.prod(b.shape):
        a, left, rows = _matrices(a), left + "*+", [*rows, "*"]
        right += "+"
    else:
        b, left, columns = transpose(_matrices(b), -2, -1), left + "+", [*columns, "*"]
        right += "+*"
    sizes |= {"+": 2, "*": 2}
    # A stack of matmuls, the batch in front: however axes are ordered, each is a plain one.
    count, depth = (math.prod(sizes[c] for c in axes) for axes in (batch, [*summed, "+"]))
    first = reshape(_ordered(a, left, [*batch, *rows, *summed, "+"]), (count, -1, depth))
    second = reshape(_ordered(b, right, [*batch, *summed, "+", *columns]), (count, depth, -1))
    axes = [*batch, *rows, *columns]
    found = reshape(matmul(first, second), [sizes[c] for c in axes])
    return _ordered(found, axes, [*result, "*"])


def _matrices(z: Tensor) -> Tensor:
    """(…, 2, 2): ((x, −y), (y, x)), which times (u, v) is the product with u + iv."""
    return stack([conj(z), stack([_part(z, 1), _part(z, 0)], -1)], -2)


def _terms(spec: str, a: Tensor, b: Tensor) -> tuple[str, str, str]:
    """The labels of both operands and of the result: each axis has one, and each is in two."""
    inputs, arrow, result = spec.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    every = left + right + result
    is_plain = all(
        every.count(c) == (3 if c in left and c in right and c in result else 2) for c in every
    )
    has_ranks = (len(left), len(right)) == (a.ndim - 1, b.ndim - 1)
    if not (arrow and every.isalpha() and is_plain and has_ranks):
        raise ArgumentError(
            "einsum",
            f"{spec!r} for {a.type} and {b.type}",
            "Write 'ab,bc->ac': a letter for each axis but the last, and each letter in two terms "
            "or in all three.",
        )
    return left, right, result


def _ordered(x: Tensor, labels: Sequence[str], order: Sequence[str]) -> Tensor:
    return permute(x, [labels.index(c) for c in order])
