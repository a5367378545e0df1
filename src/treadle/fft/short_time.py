"""Short-time Fourier transforms: spectra of windows that move along a signal, and back."""

from __future__ import annotations

import numpy as np

from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import check_choice
from treadle.fft.pairs import checked, complex
from treadle.fft.transforms import fft, irfft, rfft
from treadle.frontend.coerce import cast, constant
from treadle.frontend.functions.arithmetic import as_real
from treadle.frontend.functions.indexing import scatter_add, take
from treadle.frontend.functions.padding import pad
from treadle.frontend.functions.shaping import (
    integer_of,
    permute,
    reshape,
    slice_along,
    transpose,
    unsqueeze,
)
from treadle.frontend.tensor import Operand, Tensor

MODES = ("reflect", "constant", "replicate", "circular")


def stft(
    x: Operand,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Operand | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool = True,
    return_complex: bool = True,
) -> Tensor:
    """Spectra of windows of a signal, as pairs of real and imaginary parts.

    Windows are `hop_length` apart, n_fft // 4 unless given; with `center` the first has its middle
    at the first element.

    Shapes: (L,) or (N, L) → (…, frequencies, windows, 2).
    """
    real = as_real(x)
    if real.ndim not in (1, 2):
        raise ShapeError("stft", f"{real.type}", "Give a signal (L,), or several (N, L).")
    size, hop, weights = _plan("stft", n_fft, hop_length, win_length, window, real)
    rows = unsqueeze(real, 0) if real.ndim == 1 else real
    if center:
        check_choice("stft", "pad_mode", pad_mode, MODES)
        edge = size // 2
        if pad_mode == "constant":
            rows = pad(rows, [(0, 0), (edge, edge)])
        else:
            rows = reshape(
                pad(unsqueeze(rows, 1), [(0, 0), (0, 0), (edge, edge)], mode=pad_mode),
                (rows.shape[0], -1),
            )
    length = rows.shape[1]
    if length < size:
        raise ShapeError(
            "stft", f"{length} elements for windows of {size}", "Give a longer signal, or center."
        )
    places = _places(size, hop, 1 + (length - size) // hop)
    frames = take(rows, places, 1) * weights  # (N, windows, n_fft)
    norm = "ortho" if normalized else None
    found = rfft(frames, norm=norm) if onesided else fft(complex(frames, frames * 0), norm=norm)
    turned = permute(found, (0, 2, 1, 3))
    return reshape(turned, turned.shape[1:]) if real.ndim == 1 else turned


def istft(
    z: Operand,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Operand | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool = True,
    length: int | None = None,
) -> Tensor:
    """The signal whose `stft` is nearest to the spectra, by least squares.

    Shapes: (…, frequencies, windows, 2) → (L,) or (N, L).
    """
    pair = checked("istft", z)
    if pair.ndim not in (3, 4):
        raise ShapeError("istft", f"{pair.type}", "Give what td.stft gives.")
    size, hop, weights = _plan("istft", n_fft, hop_length, win_length, window, pair)
    rows = unsqueeze(pair, 0) if pair.ndim == 3 else pair
    batch, frequencies, count, _ = rows.shape
    if frequencies != (size // 2 + 1 if onesided else size):
        raise ShapeError(
            "istft", f"{frequencies} frequencies for n_fft = {size}", "Give what td.stft gives."
        )
    norm, spectra = "ortho" if normalized else None, permute(rows, (0, 2, 1, 3))
    # Of a real signal: what both halves say is read from the first, as PyTorch does.
    frames = irfft(slice_along(spectra, 2, 0, size // 2 + 1), size, norm=norm)
    whole = size + hop * (count - 1)
    places = _places(size, hop, count)
    empty = constant(0, (whole, batch), frames.dtype)
    added = reshape(transpose(reshape(frames * weights, (batch, -1)), 0, 1), (-1, batch))
    total = transpose(scatter_add(empty, places.reshape(-1), added), 0, 1)
    squares = reshape(weights * weights + constant(0, (count, size), weights.dtype), (-1,))
    envelope = scatter_add(constant(0, (whole,), weights.dtype), places.reshape(-1), squares)
    start = size // 2 if center else 0
    stop = whole - (size // 2 if center else 0)
    if length is not None:
        stop = start + integer_of("istft", "length", length)
    found = slice_along(total, 1, start, min(stop, whole))
    divisor = slice_along(envelope, 0, start, min(stop, whole))
    _refuse_gaps(divisor)
    signal = pad(found / divisor, [(0, 0), (0, max(0, stop - whole))])
    return reshape(signal, signal.shape[1:]) if pair.ndim == 3 else signal


def _plan(
    name: str, n_fft: int, hop: int | None, width: int | None, window: Operand | None, like: Tensor
) -> tuple[int, int, Tensor]:
    """The length of a transform, the distance of two, and the window with zeros on both sides."""
    size = integer_of(name, "n_fft", n_fft)
    step = size // 4 if hop is None else integer_of(name, "hop_length", hop)
    length = size if width is None else integer_of(name, "win_length", width)
    if size < 1 or step < 1 or not 1 <= length <= size:
        raise ArgumentError(
            name,
            f"n_fft = {size}, hop_length = {step}, win_length = {length}",
            "All are positive, and the window is no longer than n_fft.",
        )
    weights = (
        constant(1, (length,), like.dtype) if window is None else cast(as_real(window), like.dtype)
    )
    if weights.shape != (length,):
        raise ShapeError(name, f"the window is {weights.type}", f"It has {length} elements.")
    before = (size - length) // 2
    return size, step, pad(weights, [(before, size - length - before)])


def _places(size: int, hop: int, count: int) -> np.ndarray:
    """(count, size): where the elements of each window are."""
    return (np.arange(count)[:, None] * hop + np.arange(size)).astype(np.int32)


def _refuse_gaps(envelope: Tensor) -> None:
    """Where no window reaches, there is nothing to divide by; seen where the window is known."""
    if isinstance(envelope.handle, np.ndarray) and envelope.size:
        least = float(np.abs(envelope.handle).min())
        if least < 1e-11:
            raise ArgumentError(
                "istft",
                f"the windows add up to {least} somewhere",
                "Give windows that overlap: a smaller hop_length, or center=True.",
            )
