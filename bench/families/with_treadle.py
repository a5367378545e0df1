"""Treadle's side of the zoo."""

from __future__ import annotations

from typing import Any

import treadle as td
from treadle import losses
from treadle import nn as nn
from treadle.nn import init

relu, gelu, silu, relu6, leaky_relu = td.relu, td.gelu, td.silu, td.relu6, td.leaky_relu
sigmoid, tanh, exp, softplus, softmax = td.sigmoid, td.tanh, td.exp, td.softplus, td.softmax
cat, stack, arange, where, outer = td.concat, td.stack, td.arange, td.where, td.outer
sin, cos, einsum = td.sin, td.cos, td.einsum
segment_softmax, segment_sum, take = td.segment_softmax, td.segment_sum, td.take
scan, linear = td.scan, td.linear
mse, log_softmax = losses.mse, td.log_softmax


def parameter(*shape: int, spread: float = 0.02) -> Any:
    return nn.Parameter(shape, init.normal(0.0, spread))


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
