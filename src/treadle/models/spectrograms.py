"""Log-mel spectrograms on the host, as Whisper's features are made."""

from __future__ import annotations

from functools import cache

import numpy as np

from treadle.base.errors import ShapeError
from treadle.base.numbers import check_whole

RATE = 16_000  # samples a second
WINDOW, HOP = 400, 160  # samples of a frame, and between two
HIGHEST = 8000.0  # Hz
KNEE, PER_MEL, GROWTH = 1000.0, 200.0 / 3, np.log(6.4) / 27  # Slaney's scale: linear, then log


def log_mel(waveform: object, bins: int = 80, frames: int = 3000) -> np.ndarray:
    """Features of a mono recording at 16 kHz: (samples,) or (B, samples) → (…, bins, frames).

    Frames of 25 ms, one every 10 ms; a recording is cut or filled with silence to `frames`.
    """
    check_whole("log_mel", "bins", bins)
    check_whole("log_mel", "frames", frames)
    given = np.asarray(waveform)
    if given.ndim not in (1, 2) or given.dtype.kind != "f":
        cause = f"a waveform of shape {given.shape} and dtype {given.dtype}"
        raise ShapeError("log_mel", cause, "Pass floats (samples,) or (B, samples).")
    rows = given[None] if given.ndim == 1 else given
    length = frames * HOP
    rows = np.pad(rows[:, :length], ((0, 0), (0, max(0, length - rows.shape[1]))))
    found = np.stack([_features(row, bins) for row in rows])
    return found[0] if given.ndim == 1 else found


def _features(row: np.ndarray, bins: int) -> np.ndarray:
    half = WINDOW // 2
    mirrored = np.pad(row, half, "reflect" if len(row) > half else "symmetric")
    framed = np.lib.stride_tricks.sliding_window_view(mirrored, WINDOW)[: len(row) : HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(framed * window)) ** 2  # (frames, WINDOW / 2 + 1)
    levels = np.log10(np.maximum(power @ mel_filters(bins), 1e-10)).T
    found: np.ndarray = (np.maximum(levels, levels.max() - 8.0) + 4.0) / 4.0
    return found.astype(np.float32)


@cache
def mel_filters(bins: int) -> np.ndarray:
    """Triangles of equal area on Slaney's scale: (WINDOW / 2 + 1, bins)."""
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    edges = _hertz(np.linspace(0, _mels(HIGHEST), bins + 2))
    rising = (frequencies[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies[:, None]) / np.diff(edges)[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    found: np.ndarray = triangles * (2 / (edges[2:] - edges[:-2]))
    return found


def _mels(hertz: float) -> float:
    if hertz < KNEE:
        return hertz / PER_MEL
    return float(KNEE / PER_MEL + np.log(hertz / KNEE) / GROWTH)


def _hertz(mels: np.ndarray) -> np.ndarray:
    knee = KNEE / PER_MEL
    return np.where(mels < knee, mels * PER_MEL, KNEE * np.exp((mels - knee) * GROWTH))
