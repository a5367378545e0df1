"""Fourier transforms by PyTorch's names. Complex numbers have a last axis of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError, AxisError, ShapeError
from treadle.base.shapes import Shape, normal_axis
from treadle.fft.lengths import lowest_frequencies, of_lowest_frequencies, real_signal, spectrum
from treadle.fft.pairs import checked
from treadle.frontend.coerce import cast
from treadle.frontend.functions.arithmetic import as_real
from treadle.frontend.functions.shaping import integer_of, pad, reshape, slice_along
from treadle.frontend.tensor import Operand, Tensor

Sizes = int | Sequence[int] | None
Counts = int | Sequence[int | None] | None


def rfft(
    x: Operand,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
    modes: int | None = None,
) -> Tensor:
    """The frequencies 0 … n // 2 of real numbers along an axis.

    x is cut or filled with zeros to n elements. With `modes` only that many frequencies, from 0 on,
    are computed.

    Shapes: (…, n) → (…, n // 2 + 1, 2).
    """
    real = as_real(x)
    at = _axis("rfft", dim, real.shape, real)
    fitted = _fitted(real, at, _length("rfft", n, real.shape[at]))
    size = fitted.shape[at]
    used = _modes("rfft", modes, size // 2 + 1)
    rows = _rows(fitted, at, 0)
    found = spectrum(_wide(rows), size, used, -1, _scale("rfft", norm, size, False))
    return _back(found, real, (*real.shape[:at], used, *real.shape[at + 1 :], 2))


def irfft(z: Operand, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """n real numbers of their frequencies 0 … n // 2; n is 2 (m − 1) for m of them by default.

    Frequencies that are missing count as zeros, and cost nothing.

    Shapes: (…, m, 2) → (…, n).
    """
    pair = checked("irfft", z)
    logical = pair.shape[:-1]
    at = _axis("irfft", dim, logical, pair)
    size = _length("irfft", n, 2 * (logical[at] - 1))
    present = slice_along(pair, at, 0, min(logical[at], size // 2 + 1))
    rows = _rows(present, at, 1)
    found = real_signal(_wide(rows), size, _scale("irfft", norm, size, True))
    return _back(found, pair, (*logical[:at], size, *logical[at + 1 :]))


def fft(
    z: Operand,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
    modes: int | None = None,
) -> Tensor:
    """The frequencies 0 … n − 1 of complex numbers along an axis.

    With `modes` only that many of the lowest, positive and negative, are given, in their order.

    Shapes: (…, n, 2) → (…, n, 2).
    """
    pair = checked("fft", z)
    at = _axis("fft", dim, pair.shape[:-1], pair)
    fitted = _fitted(pair, at, _length("fft", n, pair.shape[at]))
    size = fitted.shape[at]
    used = _modes("fft", modes, size)
    scale = _scale("fft", norm, size, False)
    found = lowest_frequencies(_wide(_rows(fitted, at, 1)), size, used, scale)
    return _back(found, pair, (*pair.shape[:at], used, *pair.shape[at + 1 :]))


def ifft(
    z: Operand,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
    modes: int | None = None,
) -> Tensor:
    """n complex numbers of their frequencies along an axis.

    With `modes` there are that many of the lowest, as `fft` gives them; all others are zeros.

    Shapes: (…, n, 2) → (…, n, 2).
    """
    pair = checked("ifft", z)
    at = _axis("ifft", dim, pair.shape[:-1], pair)
    size = _length("ifft", n, pair.shape[at])
    scale = _scale("ifft", norm, size, True)
    if modes is None:
        pair = _fitted(pair, at, size)
    elif _modes("ifft", modes, size) != pair.shape[at]:
        raise ShapeError(
            "ifft",
            f"modes = {modes}, and axis {dim} of {pair.type} has {pair.shape[at]} frequencies",
            "Give what td.fft.fft(x, modes=…) gave, and n.",
        )
    found = of_lowest_frequencies(_wide(_rows(pair, at, 1)), size, scale)
    return _back(found, pair, (*pair.shape[:at], size, *pair.shape[at + 1 :]))


def rfftn(
    x: Operand, s: Sizes = None, dim: Sizes = None, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`rfft` along the last of some axes, then `fft` along the others; all axes by default.

    Shapes: (n, …, m) → (n, …, m // 2 + 1, 2).
    """
    real = as_real(x)
    plan = _axes("rfftn", s, dim, modes, real.shape, real)
    *others, (axis, n, used) = plan
    found = rfft(real, n, axis, norm, used)
    for axis, n, used in reversed(others):
        found = fft(found, n, axis, norm, used)
    return found


def irfftn(
    z: Operand, s: Sizes = None, dim: Sizes = None, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`ifft` along some axes, then `irfft` along the last of them; all axes by default.

    Shapes: (n, …, m, 2) → (n, …, 2 (m − 1)).
    """
    pair = checked("irfftn", z)
    *others, (last, size, _) = _axes("irfftn", s, dim, modes, pair.shape[:-1], pair)
    for axis, n, used in others:
        pair = ifft(pair, n, axis, norm, used)
    return irfft(pair, size, last, norm)


def fftn(
    z: Operand, s: Sizes = None, dim: Sizes = None, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`fft` along some axes; all by default.

    Shapes: (n, …, 2) → (n, …, 2).
    """
    pair = checked("fftn", z)
    for axis, n, used in reversed(_axes("fftn", s, dim, modes, pair.shape[:-1], pair)):
        pair = fft(pair, n, axis, norm, used)
    return pair


def ifftn(
    z: Operand, s: Sizes = None, dim: Sizes = None, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`ifft` along some axes; all by default.

    Shapes: (n, …, 2) → (n, …, 2).
    """
    pair = checked("ifftn", z)
    for axis, n, used in _axes("ifftn", s, dim, modes, pair.shape[:-1], pair):
        pair = ifft(pair, n, axis, norm, used)
    return pair


TWO = (-2, -1)


def rfft2(
    x: Operand, s: Sizes = None, dim: Sizes = TWO, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`rfftn` along two axes.

    Shapes: (…, n, m) → (…, n, m // 2 + 1, 2).
    """
    return rfftn(x, s, dim, norm, modes)


def irfft2(
    z: Operand, s: Sizes = None, dim: Sizes = TWO, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`irfftn` along two axes.

    Shapes: (…, n, m, 2) → (…, n, 2 (m − 1)).
    """
    return irfftn(z, s, dim, norm, modes)


def fft2(
    z: Operand, s: Sizes = None, dim: Sizes = TWO, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`fftn` along two axes.

    Shapes: (…, n, m, 2) → (…, n, m, 2).
    """
    return fftn(z, s, dim, norm, modes)


def ifft2(
    z: Operand, s: Sizes = None, dim: Sizes = TWO, norm: str | None = None, modes: Counts = None
) -> Tensor:
    """`ifftn` along two axes.

    Shapes: (…, n, m, 2) → (…, n, m, 2).
    """
    return ifftn(z, s, dim, norm, modes)


def _axis(name: str, dim: int, shape: Shape, x: Tensor) -> int:
    """Counted from the front, without the axis of two."""
    found = normal_axis(integer_of(name, "dim", dim), len(shape))
    if found is None:
        raise AxisError(
            name,
            f"axis {dim} of {x.type} does not exist",
            "Axes are counted without the one of real and imaginary parts.",
        )
    return int(found)


def _axes(
    name: str, s: Sizes, dim: Sizes, modes: Counts, shape: Shape, x: Tensor
) -> list[tuple[int, int | None, int | None]]:
    """Axis, length and number of frequencies, of each axis that is transformed."""
    s, dim, modes = _listed(s), _listed(dim), _listed(modes)
    count = len(shape) if dim is None and s is None else len(dim if dim is not None else s or ())
    axes = [_axis(name, d, shape, x) for d in (range(-count, 0) if dim is None else dim)]
    none: list[int | None] = [None] * count
    sizes = none if s is None else [None if n == -1 else n for n in s]
    kept = none if modes is None else list(modes)
    if not len(axes) == len(sizes) == len(kept) > 0 or len(set(axes)) != count:
        raise ArgumentError(
            name,
            f"s = {s}, dim = {dim}, modes = {modes} for {x.type}",
            "Give one length and one number of modes for each axis, and each axis once.",
        )
    return list(zip(axes, sizes, kept, strict=True))


def _listed(given: int | Sequence[Any] | None) -> Sequence[Any] | None:
    """One axis, size or count as a list of one."""
    return (given,) if isinstance(given, (int, np.integer)) else given


def _length(name: str, n: int | None, default: int) -> int:
    found = default if n is None else integer_of(name, "n", n)
    if found < 1:
        raise ArgumentError(name, f"a transform of {found} elements", "Give a length from 1 on.")
    return found


def _modes(name: str, modes: int | None, most: int) -> int:
    found = most if modes is None else integer_of(name, "modes", modes)
    if not 1 <= found <= most:
        raise ArgumentError(
            name, f"modes = {modes} of {most} frequencies", f"Give a number from 1 to {most}."
        )
    return found


def _scale(name: str, norm: str | None, n: int, is_inverse: bool) -> float:
    """What a transform is multiplied with: by default only the inverse is, with 1 / n."""
    if norm not in (None, "backward", "ortho", "forward"):
        raise ArgumentError(
            name, f"norm = {norm!r}", 'It is "backward" (the default), "ortho" or "forward".'
        )
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if is_inverse == (norm != "forward") else 1.0


def _fitted(x: Tensor, axis: int, n: int) -> Tensor:
    """Cut, or filled with zeros, to n elements."""
    size = x.shape[axis]
    if n <= size:
        return slice_along(x, axis, 0, n)
    return pad(x, [(0, n - size if i == axis else 0) for i in range(x.ndim)])


def _rows(x: Tensor, axis: int, last: int) -> Tensor:
    """(before, n, after), and the axis of two if there is one."""
    stop = x.ndim - last
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 : stop])
    return reshape(x, (before, x.shape[axis], after, *x.shape[stop:]))


def _wide(x: Tensor) -> Tensor:
    """Narrow floats are transformed in float32 and rounded once."""
    return cast(x, float32) if x.dtype.is_narrow else x


def _back(found: Tensor, given: Tensor, shape: Shape) -> Tensor:
    return reshape(cast(found, given.dtype), shape)
