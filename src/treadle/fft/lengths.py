"""Transforms along the middle of (batch, n, columns) complex or real numbers, of any length."""

from __future__ import annotations

import numpy as np

from treadle.base.dtypes import DType
from treadle.fft.factors import (
    Array,
    best_factor,
    chirp,
    interleaved,
    lowest,
    needs_chirp,
    pairs,
    roots,
    smooth_length,
)
from treadle.fft.pairs import conj, multiply, real
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.linear import contract
from treadle.frontend.functions.shaping import (
    concat,
    flip,
    pad,
    permute,
    reshape,
    slice_along,
    stack,
)
from treadle.frontend.tensor import Tensor


def _constant(values: Array, dtype: DType) -> Tensor:
    return as_tensor(np.ascontiguousarray(values).astype(dtype.numpy))


def _complex_matrix(z: Tensor, matrix: Array) -> Tensor:
    """(b, n, c, 2) times (n, k) along n: (b, k, c, 2)."""
    b, n, c, _ = z.shape
    k = matrix.shape[1]
    if c == 1:
        weights = _constant(interleaved(matrix), z.dtype)
        product = contract(reshape(z, (b, 2 * n)), weights, ("bn", "nk", "bk"))
        return reshape(product, (b, k, 1, 2))
    # Both parts of the matrix times all columns: parts of numbers are columns too.
    product = reshape(_both_parts(reshape(z, (b, n, 2 * c)), matrix), (b, 2, k, c, 2))
    by_real, by_imag = (reshape(_at(product, 1, i), (b, k, c, 2)) for i in (0, 1))
    parts = [_at(by_real, 3, 0) - _at(by_imag, 3, 1), _at(by_real, 3, 1) + _at(by_imag, 3, 0)]
    return concat(parts, 3)


def _at(x: Tensor, axis: int, index: int) -> Tensor:
    return slice_along(x, axis, index, index + 1)


def _both_parts(x: Tensor, matrix: Array) -> Tensor:
    """(b, n, c) real times (n, k) along n: (b, 2k, c), the real parts before the imaginary ones."""
    both = np.concatenate([matrix.real.T, matrix.imag.T])
    return contract(_constant(both, x.dtype), x, ("kn", "bnc", "bkc"))


def _from_real(x: Tensor, matrix: Array) -> Tensor:
    """(b, n, c) real times (n, k) along n: (b, k, c, 2)."""
    b, n, c = x.shape
    k = matrix.shape[1]
    if c == 1:
        weights = _constant(pairs(matrix).reshape(n, 2 * k), x.dtype)
        return reshape(contract(reshape(x, (b, n)), weights, ("bn", "nk", "bk")), (b, k, 1, 2))
    product = reshape(_both_parts(x, matrix), (b, 2, k, c))
    return permute(product, (0, 2, 3, 1))


def _to_real(z: Tensor, matrix: Array) -> Tensor:
    """The real part of (b, n, c, 2) times (n, k) along n: (b, k, c)."""
    b, n, c, _ = z.shape
    k = matrix.shape[1]
    weights = np.stack([matrix.real, -matrix.imag], 1).reshape(2 * n, k)
    if c == 1:
        product = contract(reshape(z, (b, 2 * n)), _constant(weights, z.dtype), ("bn", "nk", "bk"))
        return reshape(product, (b, k, 1))
    rows = reshape(permute(z, (0, 1, 3, 2)), (b, 2 * n, c))
    return contract(_constant(weights.T, z.dtype), rows, ("kn", "bnc", "bkc"))


def _twiddled(z: Tensor, factors: Array) -> Tensor:
    """(b, n, m · c, 2) times (n, m)."""
    b, n, columns, _ = z.shape
    m = factors.shape[1]
    split = reshape(z, (b, n, m, columns // m, 2))
    return multiply(split, _constant(pairs(factors)[:, :, None], z.dtype))


def spectrum(x: Tensor, n: int, used: int, sign: int, scale: float) -> Tensor:
    """The first `used` frequencies of (b, n, c) real or (b, n, c, 2) complex: (b, used, c, 2)."""
    is_real = x.ndim == 3
    first = _from_real if is_real else _complex_matrix
    if needs_chirp(n, used):
        return _by_chirp(x, n, used, sign, scale)
    n1 = best_factor(n, used)
    if n1 is None:
        return first(x, roots((0, n), (0, used), n, sign) * scale)
    b, _, c = x.shape[:3]
    n2, last = n // n1, () if is_real else (2,)
    # j = j₁ n₂ + j₂ and k = k₁ + n₁ k₂: over j₁ first, then over j₂.
    columns = reshape(x, (b, n1, n2 * c, *last))
    inner = first(columns, roots((0, n1), (0, n1), n1, sign) * scale)
    turned = _twiddled(inner, roots((0, n1), (0, n2), n, sign))
    rows = -(-used // n1)
    outer = spectrum(reshape(turned, (b * n1, n2, c, 2)), n2, rows, sign, 1.0)
    ordered = permute(reshape(outer, (b, n1, rows, c, 2)), (0, 2, 1, 3, 4))
    return slice_along(reshape(ordered, (b, rows * n1, c, 2)), 1, 0, used)


def _by_chirp(x: Tensor, n: int, used: int, sign: int, scale: float) -> Tensor:
    """A length without factors as a convolution, of a length that has some (Bluestein)."""
    bent, length = chirp(n, sign), smooth_length(2 * n - 1)
    numbers = stack([x, x * 0], -1) if x.ndim == 3 else x
    ends = [(0, 0), (0, length - n), (0, 0), (0, 0)]
    padded = pad(multiply(numbers, _constant(pairs(bent)[:, None], x.dtype)), ends)
    kernel = np.zeros(length, np.complex128)
    kernel[:n] = bent.conj()
    kernel[length - n + 1 :] = bent[:0:-1].conj()
    response = np.fft.fft(kernel) / length
    product = multiply(
        spectrum(padded, length, length, -1, 1.0), _constant(pairs(response)[:, None], x.dtype)
    )
    summed = spectrum(product, length, used, 1, 1.0)
    return multiply(summed, _constant(pairs(bent[:used] * scale)[:, None], x.dtype))


def real_signal(z: Tensor, n: int, scale: float) -> Tensor:
    """n real numbers of their first frequencies: (b, m, c, 2) to (b, n, c), m ≤ n // 2 + 1."""
    b, m, c, _ = z.shape
    # Each frequency stands for its negative too, but for 0 and for the middle one.
    weights = np.where((np.arange(m) == 0) | (2 * np.arange(m) == n), 1.0, 2.0) * scale
    if needs_chirp(n, m):
        return _hermitian(z, n, scale)
    n1 = best_factor(n, m)
    if n1 is None:
        return _to_real(z, roots((0, m), (0, n), n, 1) * weights[:, None])
    n2, rows = n // n1, -(-m // n1)
    weighted = z * _constant(weights[:, None, None], z.dtype)
    padded = pad(weighted, [(0, 0), (0, rows * n1 - m), (0, 0), (0, 0)])
    # k = k₂ n₁ + k₁ and j = j₁ n₂ + j₂: over k₂ first, then over k₁.
    inner = _few_rows(reshape(padded, (b, rows, n1 * c, 2)), n2)
    turned = _twiddled(inner, roots((0, n2), (0, n1), n, 1))
    outer = _to_real(reshape(turned, (b * n2, n1, c, 2)), roots((0, n1), (0, n1), n1, 1))
    return reshape(permute(reshape(outer, (b, n2, n1, c)), (0, 2, 1, 3)), (b, n, c))


def _few_rows(z: Tensor, n: int) -> Tensor:
    """The inverse transform to n elements of the first frequencies, all others being 0."""
    rows = z.shape[1]
    if not needs_chirp(n, n) and best_factor(n, rows) is None:
        return _complex_matrix(z, roots((0, rows), (0, n), n, 1))
    padded = pad(z, [(0, 0), (0, n - rows), (0, 0), (0, 0)])
    return spectrum(padded, n, n, 1, 1.0)


def _hermitian(z: Tensor, n: int, scale: float) -> Tensor:
    """By all frequencies: the negative ones are conjugates of the positive ones."""
    whole = n // 2 + 1
    every = pad(z, [(0, 0), (0, whole - z.shape[1]), (0, 0), (0, 0)])
    tail = conj(flip(slice_along(every, 1, 1, n - whole + 1), 1))
    return real(spectrum(concat([every, tail], 1), n, n, 1, scale))


def lowest_frequencies(z: Tensor, n: int, modes: int, scale: float) -> Tensor:
    """The `modes` frequencies nearest to 0 of (b, n, c, 2)."""
    if modes == n or best_factor(n, modes) is not None or needs_chirp(n, modes):
        every = spectrum(z, n, n, -1, scale)
        if modes == n:
            return every
        ends = [(0, (modes + 1) // 2), (n - modes // 2, n)]
        return concat([slice_along(every, 1, *end) for end in ends], 1)
    return _complex_matrix(z, roots((0, n), (0, n), n, -1)[:, lowest(n, modes)] * scale)


def of_lowest_frequencies(z: Tensor, n: int, scale: float) -> Tensor:
    """n complex numbers of the frequencies nearest to 0, all others being 0."""
    modes = z.shape[1]
    if modes == n:
        return spectrum(z, n, n, 1, scale)
    if best_factor(n, modes) is None and not needs_chirp(n, modes):
        return _complex_matrix(z, roots((0, n), (0, n), n, 1)[lowest(n, modes)] * scale)
    positive = (modes + 1) // 2
    gap = pad(slice_along(z, 1, 0, positive), [(0, 0), (0, n - modes), (0, 0), (0, 0)])
    spread = concat([gap, slice_along(z, 1, positive, modes)], 1)
    return spectrum(spread, n, n, 1, scale)
