"""Spectra with the frequency 0 in the middle, and back."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.errors import AxisError
from treadle.base.shapes import normal_axis
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.shaping import roll
from treadle.frontend.tensor import Operand, Tensor

Axes = int | Sequence[int] | None


def fftshift(z: Operand, dim: Axes = None, is_complex: bool | None = None) -> Tensor:
    """The frequency 0 moved to the middle of axes, all by default.

    A last axis of two holds real and imaginary parts, and is not counted; `is_complex` says so for
    certain.

    Shapes: any shape → the same.
    """
    return _shifted("fftshift", z, dim, is_complex, lambda n: n // 2)


def ifftshift(z: Operand, dim: Axes = None, is_complex: bool | None = None) -> Tensor:
    """`fftshift` undone, for odd lengths too.

    Shapes: any shape → the same.
    """
    return _shifted("ifftshift", z, dim, is_complex, lambda n: -(n // 2))


def _shifted(name: str, z: Operand, dim: Axes, is_complex: bool | None, places: object) -> Tensor:
    found = as_tensor(z)
    is_pair = found.ndim > 0 and found.shape[-1] == 2
    rank = found.ndim - int(is_pair if is_complex is None else is_complex)
    given = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    assert callable(places)
    for axis in given:
        at = normal_axis(axis, rank)
        if at is None:
            raise AxisError(
                name,
                f"axis {axis} of {found.type} does not exist",
                "Axes are counted without the one of real and imaginary parts.",
            )
        found = roll(found, places(found.shape[at]), int(at))
    return found
