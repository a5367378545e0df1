"""Positions: rotations of queries and keys, masks, and biases of scores."""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import POSITIVE, check_number, check_whole
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import (
    abs,
    cos,
    exp,
    sin,
    where,
)
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.shaping import (
    chunk,
    concat,
    iota,
    permute,
    reshape,
    unsqueeze,
)
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn import init
from treadle.nn.module import Module, Parameter


class RotaryEmbedding(Module):
    """Rotates queries and keys by their position; halves are paired, as in Llama.

    Shapes: (…, T, D) → the same.
    """

    def __init__(self, dim: int, base: float = 10000.0):
        if check_whole("RotaryEmbedding", "dim", dim) % 2:
            raise ArgumentError("RotaryEmbedding", f"a width of {dim}", "It must be even.")
        self.dim, self.base = dim, check_number("RotaryEmbedding", "base", base, POSITIVE)

    def forward(self, x: Operand, offset: Operand = 0) -> Tensor:
        """`offset` is the position of the first row."""
        value = as_tensor(x)
        if value.ndim < 2 or value.shape[-1] != self.dim:
            raise ShapeError(
                "RotaryEmbedding", f"x is {value.type}", f"Its last axis is {self.dim}."
            )
        t, half = value.shape[-2], self.dim // 2
        rate = exp(iota((half,), 0, dtypes.float32) * (-2 * math.log(self.base) / self.dim))
        position = cast(iota((t,), 0) + offset, dtypes.float32)
        angle = position[:, None] * rate  # (T, D / 2)
        c, s = (cast(f(angle), value.dtype) for f in (cos, sin))
        a, b = chunk(value, 2, -1)
        return concat([a * c - b * s, b * c + a * s], -1)


def causal_mask(t: int, s: int | None = None) -> Tensor:
    """A bias for attention: 0 where position t sees key s, −∞ where s is later: → (T, S).

    It is float, as `torch.nn.Transformer.generate_square_subsequent_mask` is, so that
    `td.attention` and all layers read it alike.
    """
    shape = (t, t if s is None else s)
    return _hiding(iota(shape, 1) > iota(shape, 0))


def sliding_window_mask(t: int, window: int, is_causal: bool = True) -> Tensor:
    """A bias for attention: −∞ for keys `window` or more positions away, else 0: → (T, T).

    With `is_causal` later keys are −∞, too.
    """
    check_whole("sliding_window_mask", "window", window)
    distance = iota((t, t), 0) - iota((t, t), 1)
    is_far = abs(distance) >= window
    return _hiding(is_far | (distance < 0) if is_causal else is_far)


def _hiding(is_hidden: Tensor) -> Tensor:
    return where(is_hidden, as_tensor(-math.inf), as_tensor(0.0))


def alibi_bias(num_heads: int, t: int, s: int | None = None) -> Tensor:
    """ALiBi's bias, the distance of key and query times a slope of each head: → (heads, T, S)."""
    check_whole("alibi_bias", "num_heads", num_heads)
    slopes = as_tensor([float(x) for x in _alibi_slopes(num_heads)]).astype(dtypes.float32)
    shape = (t, t if s is None else s)
    distance = cast(iota(shape, 1) - iota(shape, 0), dtypes.float32)
    return reshape(slopes, (num_heads, 1, 1)) * -abs(distance)


def _alibi_slopes(heads: int) -> list[float]:
    """Powers of 2^(−8 / n) for the largest power of two n, then others between them."""
    n = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    between = [2.0 ** (-8 * (i + 1) / (2 * n)) for i in range(0, 2 * n, 2)]
    return found + between[: heads - n]


class T5RelativeBias(Module):
    """T5's learned bias: distances in buckets, far ones by their logarithm.

    Shapes: two lengths T, S → (1, heads, T, S).
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ):
        check_whole("T5RelativeBias", "num_heads", num_heads)
        check_whole("T5RelativeBias", "num_buckets", num_buckets, 4)
        check_whole("T5RelativeBias", "max_distance", max_distance, 2)
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional = bidirectional
        self.relative_attention_bias = _Table(num_buckets, num_heads)

    def forward(self, t: int, s: int | None = None) -> Tensor:
        table = as_tensor(self.relative_attention_bias.weight)
        values = take(table, self._buckets(t, t if s is None else s), 0)  # (T, S, heads)
        return unsqueeze(permute(values, 2, 0, 1), 0)

    def _buckets(self, t: int, s: int) -> np.ndarray:
        """The bucket of each pair of positions."""
        relative = np.arange(s)[None, :] - np.arange(t)[:, None]  # key − query
        return t5_buckets(relative, self.num_buckets, self.max_distance, self.bidirectional)


def t5_buckets(
    relative: np.ndarray, buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray:
    """Buckets of distances, key − query; float32 as in the reference implementation."""
    start = np.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        start = np.where(relative > 0, buckets, 0)
        distance = np.abs(relative)
    else:
        distance = np.maximum(-relative, 0)
    exact = buckets // 2
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    growth = np.log(ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (growth * np.float32(buckets - exact)).astype(np.int64)
    found = np.where(distance < exact, distance, np.minimum(far, buckets - 1))
    return (start + found).astype(np.int32)


class _Table(Module):
    def __init__(self, rows: int, width: int):
        self.weight = Parameter((rows, width), init.normal())
