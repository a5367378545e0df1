"""Windows for spectra: vectors that fall off towards both ends."""

from __future__ import annotations

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.shaping import integer_of, number_of
from treadle.frontend.tensor import Tensor
from treadle.ir.types import as_dtype


def hann_window(
    window_length: int, periodic: bool = True, dtype: object = dtypes.float32
) -> Tensor:
    """sin² of half a turn: → (window_length,)."""
    return _cosines("hann_window", window_length, periodic, (0.5, 0.5), dtype)


def hamming_window(
    window_length: int,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    dtype: object = dtypes.float32,
) -> Tensor:
    """alpha − beta · cos of a turn: → (window_length,)."""
    factors = (
        number_of("hamming_window", "alpha", alpha),
        number_of("hamming_window", "beta", beta),
    )
    return _cosines("hamming_window", window_length, periodic, factors, dtype)


def blackman_window(
    window_length: int, periodic: bool = True, dtype: object = dtypes.float32
) -> Tensor:
    """0.42 − 0.5 · cos of a turn + 0.08 · cos of two turns: → (window_length,)."""
    return _cosines("blackman_window", window_length, periodic, (0.42, 0.5, 0.08), dtype)


def bartlett_window(
    window_length: int, periodic: bool = True, dtype: object = dtypes.float32
) -> Tensor:
    """A triangle from 0 to 1 and back: → (window_length,)."""
    turns = _turns("bartlett_window", window_length, periodic)
    return _window(1 - np.abs(2 * turns - 1), dtype)


def kaiser_window(
    window_length: int, periodic: bool = True, beta: float = 12.0, dtype: object = dtypes.float32
) -> Tensor:
    """Bessel's I₀(beta · √(1 − t²)) / I₀(beta), t from −1 to 1: → (window_length,)."""
    turns = _turns("kaiser_window", window_length, periodic)
    steep = number_of("kaiser_window", "beta", beta)
    root = np.sqrt(np.maximum(0, 1 - (2 * turns - 1) ** 2))
    return _window(np.i0(steep * root) / np.i0(steep), dtype)


def _cosines(
    name: str, length: int, periodic: bool, factors: tuple[float, ...], dtype: object
) -> Tensor:
    angle = 2 * np.pi * _turns(name, length, periodic)
    return _window(sum((-1) ** k * a * np.cos(k * angle) for k, a in enumerate(factors)), dtype)


def _turns(name: str, length: int, periodic: bool) -> np.ndarray:
    """From 0 to 1, which is left out if the window is periodic."""
    count = integer_of(name, "window_length", length)
    if count < 0:
        raise ArgumentError(name, f"window_length = {count}", "Give 0 or more.")
    return np.arange(count) / max(1, count if periodic else count - 1)


def _window(values: np.ndarray, dtype: object) -> Tensor:
    one = np.ones(1) if len(values) == 1 else values
    return as_tensor(np.asarray(one).astype(as_dtype(dtype).numpy))
