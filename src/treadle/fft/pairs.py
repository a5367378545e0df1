"""Complex numbers: a last axis of two, the real and the imaginary part, as torch.view_as_real."""

from __future__ import annotations

from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend.functions.arithmetic import as_real, atan2, neg
from treadle.frontend.functions.elementary import hypot
from treadle.frontend.functions.linear import einsum as real_einsum
from treadle.frontend.functions.shaping import slice_along, squeeze, stack
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
    inputs, arrow, result = spec.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        raise ArgumentError(
            "einsum", f"{spec!r} is not of the form 'ab,bc->ac'", "Name two terms and the result."
        )
    left, right = _spare(spec, 2)
    # Multiplying by x + iy is a matrix of two by two: one real sum of products instead of four.
    turned = stack([b, stack([neg(_part(b, 1)), _part(b, 0)], -1)], -2)
    labels = f"{terms[0]}{left},{terms[1]}{left}{right}->{result}{right}"
    return real_einsum(labels, a, turned)


def _spare(spec: str, count: int) -> list[str]:
    """Letters that no axis has."""
    return [letter for letter in "zyxwvutsrqponmlkjihgfedcba" if letter not in spec][:count]
