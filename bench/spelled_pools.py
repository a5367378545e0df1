"""Pooling and rotations by position in several spellings, beside the functions that they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from typing import Any

import treadle as td
from treadle import nn

Pool = Callable[[Any], Any]


# --- pooling: windows of 2 × 2 side by side, and of 3 × 3 every second element --------------------


def max_by_function(x):
    return td.max_pool(x, 2)


def mean_by_function(x):
    return td.avg_pool(x, 2)


def blocks(x):
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2)


def max_by_reshape(x):
    return td.max(blocks(x), (3, 5))


def mean_by_reshape(x):
    return td.mean(blocks(x), (3, 5))


def columns(x):
    n, c, h, w = x.shape
    return td.unfold(x, 2, stride=2).reshape(n, c, 4, h // 2, w // 2)


def max_by_unfold(x):
    return td.max(columns(x), 2)


def mean_by_unfold(x):
    return td.mean(columns(x), 2)


def parts(x):
    return [x[:, :, i::2, j::2] for i, j in product(range(2), repeat=2)]


def max_by_slices(x):
    return reduce(td.maximum, parts(x))


def mean_by_slices(x):
    return sum(parts(x)) / 4


def max_by_stack(x):
    return td.max(td.stack(parts(x)), 0)


MAXIMA: tuple[Pool, ...] = (max_by_reshape, max_by_unfold, max_by_slices, max_by_stack)
MEANS: tuple[Pool, ...] = (mean_by_reshape, mean_by_unfold, mean_by_slices)


class Pooled(nn.Module):
    """Digits through two convolutions with pooling between them."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.conv_1, self.conv_2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.fc, self.out = nn.Linear(3136, 128), nn.Linear(128, 10)

    def forward(self, x):
        for conv in (self.conv_1, self.conv_2):
            x = self.pool(td.relu(conv(x)))
        return self.out(td.relu(self.fc(x.reshape(x.shape[0], -1))))


# --- rotations of queries and keys: halves are paired, or neighbours ------------------------------


def angles(t: int, d: int):
    rate = td.exp(td.arange(d // 2).astype(td.float32) * (-2 * math.log(10000.0) / d))
    return td.arange(t).astype(td.float32)[:, None] * rate


def waves(x):
    angle = angles(x.shape[-2], x.shape[-1])
    return td.cos(angle).astype(x.dtype), td.sin(angle).astype(x.dtype)


def halves(x):
    """As `nn.RotaryEmbedding` has it."""
    c, s = waves(x)
    a, b = td.chunk(x, 2, -1)
    return td.concat([a * c - b * s, b * c + a * s], -1)


def halves_rotated(x):
    """x · cos + rotate_half(x) · sin, with cosines and sines of the whole width."""
    angle = angles(x.shape[-2], x.shape[-1])
    both = td.concat([angle, angle], -1)
    c, s = td.cos(both).astype(x.dtype), td.sin(both).astype(x.dtype)
    a, b = td.chunk(x, 2, -1)
    return x * c + td.concat([-b, a], -1) * s


def halves_stacked(x):
    c, s = waves(x)
    pair = x.reshape(*x.shape[:-1], 2, -1)
    a, b = pair[..., 0, :], pair[..., 1, :]
    return td.stack([a * c - b * s, a * s + b * c], -2).reshape(*x.shape)


def neighbours(x):
    """Even and odd elements are paired."""
    c, s = waves(x)
    a, b = x[..., ::2], x[..., 1::2]
    return td.stack([a * c - b * s, a * s + b * c], -1).reshape(*x.shape)


def neighbours_complex(x):
    """A product of complex numbers, real and imaginary parts by themselves."""
    c, s = waves(x)
    pair = x.reshape(*x.shape[:-1], -1, 2)
    re, im = pair[..., 0], pair[..., 1]
    turned = re * c - im * s, re * s + im * c
    return td.concat([t.unsqueeze(-1) for t in turned], -1).reshape(*x.shape)


def neighbours_rotated(x):
    """x · cos + (−odd, even) · sin, every cosine and sine twice."""
    c, s = (td.repeat_interleave(w, 2, -1) for w in waves(x))
    turned = td.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(*x.shape)
    return x * c + turned * s


OF_HALVES = (halves_rotated, halves_stacked)
OF_NEIGHBOURS = (neighbours_complex, neighbours_rotated)


def attention_after(rotate: Callable[..., Any], q, k, v):
    return td.attention(rotate(q), rotate(k), v, causal=True)


def rotating(rotate: Callable[..., Any]) -> Callable[..., Any]:
    return partial(attention_after, rotate)
