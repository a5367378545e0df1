"""Treadle's side of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import treadle as td
from treadle import losses
from treadle import nn as nn
from treadle.nn import init

relu, gelu, silu, relu6, leaky_relu = td.relu, td.gelu, td.silu, td.relu6, td.leaky_relu
sigmoid, tanh, exp, softplus, softmax = td.sigmoid, td.tanh, td.exp, td.softplus, td.softmax
cat, stack, arange, where, outer = td.concat, td.stack, td.arange, td.where, td.outer
sin, cos, einsum, cumsum, cumprod = td.sin, td.cos, td.einsum, td.cumsum, td.cumprod
segment_softmax, segment_sum, take = td.segment_softmax, td.segment_sum, td.take
segment_mean, take_along, amax = td.segment_mean, td.take_along_axis, td.max
scan, linear, glu, elu, sqrt, maximum = td.scan, td.linear, td.glu, td.elu, td.sqrt, td.maximum
mse, huber, log_softmax = losses.mse, losses.huber, td.log_softmax
stop_gradient, vmap, grad = td.stop_gradient, td.vmap, td.grad


def parameter(*shape: int, spread: float = 0.02) -> Any:
    return nn.Parameter(shape, init.normal(0.0, spread))


def constant(value: np.ndarray) -> Any:
    """What a model holds and does not train."""
    return value


def gradient(function: Callable[[Any], Any], x: Any) -> Any:
    """The gradient of a scalar function, of which there may be a gradient again."""
    return td.grad(function)(x)


def call(module: Any, values: dict[str, Any], *arguments: Any) -> Any:
    """A module with other values than its own."""
    return module.apply(values, *arguments)


def pad_left(x: Any, count: int) -> Any:
    """Zeros before the last axis."""
    return td.pad(x, [(0, 0)] * (x.ndim - 1) + [(count, 0)])


def roll(x: Any, shift: int, axes: tuple[int, ...]) -> Any:
    for axis in axes:
        x = td.roll(x, shift, axis)
    return x


def biased_attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The bias is added to the scores."""
    return td.attention(q, k, v, bias)


def attention(q: Any, k: Any, v: Any, hidden: Any = None, causal: bool = False) -> Any:
    """`hidden` (B, S) says which keys nobody sees."""
    bias = (
        None
        if hidden is None
        else td.where(hidden, -float("inf"), 0.0).reshape(-1, 1, 1, hidden.shape[1])
    )
    return td.attention(q, k, v, bias, causal=causal)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Of the last axis; labels of −100 do not count."""
    return losses.cross_entropy(logits, labels, axis=-1)


def pixel_cross_entropy(logits: Any, labels: Any) -> Any:
    """Of the second axis."""
    return losses.cross_entropy(logits, labels)


def bce_with_logits(logits: Any, labels: Any) -> Any:
    return losses.bce_with_logits(logits, labels)


def recurrent(layer: Any, x: Any, lengths: Any) -> Any:
    """Outputs of an RNN, GRU or LSTM over sequences (T, N, features) that end at their lengths."""
    return layer(x, lengths=lengths)[0]


def ctc(log_probs: Any, targets: Any, times: Any, lengths: Any) -> Any:
    return losses.ctc(log_probs, targets, times, lengths)


def rotated(x: Any, base: float = 10000.0) -> Any:
    return nn.RotaryEmbedding(x.shape[-1], base)(x)


def spectral_convolution(x: Any, weight: Any) -> Any:
    """x (batch, in, height, width); weight (in, out, 2m, m, 2)."""
    modes = weight.shape[2:4]
    z = td.fft.einsum("bixy,ioxy->boxy", td.fft.rfft2(x, modes=modes), weight)
    return td.fft.irfft2(z, s=x.shape[2:], modes=modes)
