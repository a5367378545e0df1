"""Fourier transforms and mel filters."""

from __future__ import annotations

import math

import numpy as np

from treadle.fft import transforms
from treadle.fft.pairs import complex as complex_of
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.indexing import take
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.library import DTYPES
from treadle.interop.onnx.reader.calls import Call, Value, operator


@operator("DFT")
def _dft(call: Call, x: Value, length: Value = None, axis: Value = None) -> Tensor:
    """Of signals (…, 1) or (…, 2): real numbers, or pairs of both parts."""
    signal = as_tensor(x)
    at = call.integer("axis", 1) if call.opset < 20 else -2
    if axis is not None:
        at = int(call.number(axis, "the axis"))
    at = call.axis(at, signal.ndim)
    if at == signal.ndim - 1:
        raise call.refuse(f"axis {at} of {signal.type} has the parts of complex numbers")
    size = None if length is None else int(call.number(length, "the length"))
    call.bounded(size or 0)
    is_onesided = call.flag("onesided")
    if not call.flag("inverse"):
        return _frequencies(call, signal, size, at, is_onesided)
    pairs = _pairs(call, signal)
    if is_onesided:
        return s.unsqueeze(transforms.irfft(pairs, size, at), -1)
    return transforms.ifft(pairs, size, at)


def _pairs(call: Call, signal: Tensor) -> Tensor:
    if signal.shape[-1] not in (1, 2):
        raise call.refuse(f"a signal {signal.type}", "Its last axis has one or two elements.")
    if signal.shape[-1] == 2:
        return signal
    real = s.squeeze(signal, -1)
    return complex_of(real, s.zeros_like(real))


def _frequencies(
    call: Call, signal: Tensor, size: int | None, axis: int, is_onesided: bool
) -> Tensor:
    if is_onesided and signal.shape[-1] == 1:
        return transforms.rfft(s.squeeze(signal, -1), size, axis)
    found = transforms.fft(_pairs(call, signal), size, axis)
    return s.slice_along(found, axis, 0, found.shape[axis] // 2 + 1) if is_onesided else found


@operator("STFT")
def _stft(call: Call, x: Value, step: Value, window: Value = None, length: Value = None) -> Tensor:
    """(B, n, 1 or 2) to (B, frames, frequencies, 2)."""
    signal = as_tensor(x)
    hop = int(call.number(step, "the step"))
    if length is not None:
        size = int(call.number(length, "the length of a frame"))
    elif window is not None:
        size = as_tensor(window).size
    else:
        raise call.refuse("neither a window nor the length of a frame is given")
    if signal.ndim != 3 or hop < 1 or not 1 <= size <= signal.shape[1]:
        raise call.refuse(f"frames of {size} elements, {hop} apart, of {signal.type}")
    count = 1 + (signal.shape[1] - size) // hop
    places = s.iota((count, 1), 0) * hop + s.iota((1, size), 1)
    frames = take(signal, places, 1)
    if window is not None:
        weights = as_tensor(window)
        if weights.shape != (size,):
            raise call.refuse(f"a window {weights.type} for frames of {size} elements")
        frames = frames * s.reshape(weights, (size, 1))
    return _frequencies(call, frames, None, 2, call.flag("onesided", True))


@operator("MelWeightMatrix")
def _mel_weights(
    call: Call, bins: Value, length: Value, rate: Value, lowest: Value, highest: Value
) -> np.ndarray:
    """(length // 2 + 1, bins): how much each frequency has of each triangular filter."""
    names = ("the number of bins", "the length", "the rate")
    count, size, sampled = (
        int(call.number(v, n)) for v, n in zip((bins, length, rate), names, strict=True)
    )
    edges = [float(call.number(v, "an edge")) for v in (lowest, highest)]
    call.bounded(count + 2, size // 2 + 1)
    dtype = DTYPES.get(call.integer("output_datatype", 1))
    if dtype is None or min(count, size, sampled) < 1 or min(edges) <= -700:
        raise call.refuse(f"{count} bins of {size} elements, {sampled} in a second, from {edges}")
    first, last = (2595 * math.log10(1 + edge / 700) for edge in edges)
    mels = first + np.arange(count + 2) * (last - first) / (count + 2)
    places = np.floor((size + 1) * 700 * (10 ** (mels / 2595) - 1) / sampled).astype(np.int64)
    at = np.arange(size // 2 + 1)[:, None]
    low, middle, high = places[:-2], places[1:-1], places[2:]
    rising = np.where(middle > low, (at - low) / np.maximum(middle - low, 1), 1.0)
    falling = (high - at) / np.maximum(high - middle, 1)
    is_rising = (at >= low) & (at <= middle)
    is_falling = (at >= middle) & (at < high)
    return np.where(is_falling, falling, np.where(is_rising, rising, 0.0)).astype(dtype.numpy)
