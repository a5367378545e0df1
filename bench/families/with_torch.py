"""PyTorch's side of the zoo: each function as its users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn as nn

relu, gelu, silu, relu6, leaky_relu = F.relu, F.gelu, F.silu, F.relu6, F.leaky_relu
sigmoid, tanh, exp, softplus = torch.sigmoid, torch.tanh, torch.exp, F.softplus
cat, stack, where, outer = torch.cat, torch.stack, torch.where, torch.outer
sin, cos, einsum, linear = torch.sin, torch.cos, torch.einsum, F.linear
cumsum, cumprod, amax = torch.cumsum, torch.cumprod, torch.amax
glu, elu, sqrt, maximum = F.glu, F.elu, torch.sqrt, torch.maximum
mse, huber = F.mse_loss, F.huber_loss
vmap, grad = torch.func.vmap, torch.func.grad


def arange(count: int) -> Any:
    return torch.arange(count, device=torch.get_default_device())


def softmax(x: Any, axis: int = -1) -> Any:
    return F.softmax(x, axis)


def log_softmax(x: Any, axis: int = -1) -> Any:
    return F.log_softmax(x, axis)


def parameter(*shape: int, spread: float = 0.02) -> Any:
    return nn.Parameter(torch.randn(shape) * spread)


def constant(value: np.ndarray) -> Any:
    return torch.tensor(value, device=torch.get_default_device())


def stop_gradient(x: Any) -> Any:
    return x.detach()


def gradient(function: Callable[[Any], Any], x: Any) -> Any:
    """The graph of a gradient is what eager mode is fast with; only torch.func is compiled."""
    if torch.compiler.is_compiling():
        return torch.func.grad(function)(x)
    at = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(function(at), at, create_graph=True)[0]


def call(module: Any, values: dict[str, Any], *arguments: Any) -> Any:
    return torch.func.functional_call(module, values, arguments)


def pad_left(x: Any, count: int) -> Any:
    return F.pad(x, (count, 0))


def roll(x: Any, shift: int, axes: tuple[int, ...]) -> Any:
    return torch.roll(x, (shift,) * len(axes), axes)


def take_along(x: Any, index: Any, axis: int) -> Any:
    return x.gather(axis, index.long())


def segment_mean(x: Any, segments: Any, count: int) -> Any:
    """As torch_geometric's."""
    ones = x.new_ones((segments.shape[0], 1))
    sizes = x.new_zeros((count, 1)).index_add(0, segments, ones)
    return segment_sum(x, segments, count) / sizes.clamp(min=1)


def biased_attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))


def attention(q: Any, k: Any, v: Any, hidden: Any = None, causal: bool = False) -> Any:
    mask = None if hidden is None else ~hidden[:, None, None, :]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long())


def pixel_cross_entropy(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels.long())


def bce_with_logits(logits: Any, labels: Any) -> Any:
    return F.binary_cross_entropy_with_logits(logits, labels)


def recurrent(layer: Any, x: Any, lengths: Any) -> Any:
    """Packed, as PyTorch wants sequences of several lengths."""
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], total_length=x.shape[0])[0]


def ctc(log_probs: Any, targets: Any, times: Any, lengths: Any) -> Any:
    return F.ctc_loss(log_probs, targets, times.long(), lengths.long())


def take(x: Any, index: Any, axis: int = 0) -> Any:
    return x.index_select(axis, index)


def segment_sum(x: Any, segments: Any, count: int) -> Any:
    return x.new_zeros((count, *x.shape[1:])).index_add(0, segments, x)


def segment_softmax(x: Any, segments: Any, count: int) -> Any:
    """As torch_geometric's."""
    places = segments.long()[:, None].expand_as(x)
    lowest = x.new_full((count, *x.shape[1:]), -torch.inf)
    top = lowest.scatter_reduce(0, places, x.detach(), "amax")
    weights = torch.exp(x - top.index_select(0, segments))
    return weights / segment_sum(weights, segments, count).index_select(0, segments)


def scan(body: Any, first: Any, xs: Any) -> Any:
    """A loop: PyTorch has none that is compiled with its gradient."""
    carry, outputs = first, []
    for row in zip(*xs, strict=True):
        carry, output = body(carry, row)
        outputs.append(output)
    return carry, torch.stack(outputs)


def rotated(x: Any, base: float = 10000.0) -> Any:
    size = x.shape[-1]
    rate = base ** (-torch.arange(0, size, 2, device=x.device) / size)
    angle = torch.arange(x.shape[2], device=x.device)[:, None] * rate
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def spectral_convolution(x: Any, weight: Any) -> Any:
    """As the operator's authors write it: the lowest frequencies of a whole transform.

    Transforms and complex products are of float32: bfloat16 has none.
    """
    w, m = torch.view_as_complex(weight), weight.shape[3]
    with torch.autocast(x.device.type, enabled=False):
        z = torch.fft.rfft2(x.float())
        out = z.new_zeros((x.shape[0], w.shape[1], *z.shape[2:]))
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", z[:, :, :m, :m], w[:, :, :m])
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", z[:, :, -m:, :m], w[:, :, m:])
        return torch.fft.irfft2(out, s=x.shape[2:])
