"""Multi-head attention, rotary positions and the gated feed-forward layer."""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import POSITIVE, check_number, check_whole
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions import linear
from treadle.frontend.functions.activations import silu, softmax
from treadle.frontend.functions.arithmetic import cos, exp, sin, where
from treadle.frontend.functions.shaping import chunk, concat, iota, permute, reshape, transpose
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn import init
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Linear
from treadle.nn.module import Module, Parameter


class MultiHeadAttention(Module):
    """Attention with projections, as torch.nn.MultiheadAttention (sequence first by default).

    `key` and `value` default to `query`. The bias is added to the scores and broadcasts to
    (B, heads, T, S).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
    ):
        check_whole("MultiHeadAttention", "embed_dim", embed_dim)
        check_whole("MultiHeadAttention", "num_heads", num_heads)
        if embed_dim % num_heads:
            raise ArgumentError(
                "MultiHeadAttention",
                f"{num_heads} heads of a width of {embed_dim}",
                "The number of heads divides the width.",
            )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.dropout = Dropout(dropout)
        self.in_proj_weight = Parameter((3 * embed_dim, embed_dim), init.xavier_uniform())
        self.in_proj_bias = Parameter((3 * embed_dim,), init.zeros) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if self.out_proj.bias is not None:
            self.out_proj.bias.init = init.zeros

    def forward(
        self,
        query: Operand,
        key: Operand | None = None,
        value: Operand | None = None,
        bias: Operand | None = None,
        causal: bool = False,
    ) -> Tensor:
        q = as_tensor(query)
        k = q if key is None else as_tensor(key)
        v = k if value is None else as_tensor(value)
        for name, x in (("query", q), ("key", k), ("value", v)):
            if x.ndim != 3 or x.shape[2] != self.embed_dim:
                raise ShapeError(
                    "MultiHeadAttention",
                    f"the {name} is {x.type}, the width {self.embed_dim}",
                    "It is (T, N, width), or (N, T, width) with batch_first.",
                )
        q, k, v = (self._project(i, x) for i, x in enumerate((q, k, v)))
        mixed = self._mixed(q, k, v, bias, causal)  # (B, H, T, D)
        joined = reshape(permute(mixed, 0, 2, 1, 3), (mixed.shape[0], mixed.shape[2], -1))
        result = self.out_proj(joined)
        return result if self.batch_first else transpose(result, 0, 1)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, bias: Operand | None, causal: bool) -> Tensor:
        """Attention; with dropout of its weights it is written out."""
        if not self.training or self.dropout.p == 0:
            return linear.attention(q, k, v, bias, causal)
        scores = linear.matmul(q, transpose(k, -1, -2)) * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias
        if causal:
            t, s = scores.shape[-2:]
            scores = where(iota((t, s), 1) <= iota((t, s), 0), scores, -math.inf)
        return linear.matmul(self.dropout(softmax(scores)), v)

    def _project(self, part: int, x: Tensor) -> Tensor:
        """One of the three projections, split into heads: (B, H, T, D)."""
        rows = slice(part * self.embed_dim, (part + 1) * self.embed_dim)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        projected = linear.linear(x, self.in_proj_weight[rows], bias)
        if not self.batch_first:
            projected = transpose(projected, 0, 1)
        b, t, _ = projected.shape
        return permute(reshape(projected, (b, t, self.num_heads, -1)), 0, 2, 1, 3)


class RotaryEmbedding(Module):
    """Rotates queries and keys (…, T, D) by their position; halves are paired, as in Llama."""

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


class SwiGLU(Module):
    """down(silu(gate x) · up x): the gated feed-forward layer of Llama."""

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False):
        check_whole("SwiGLU", "dim", dim)
        check_whole("SwiGLU", "hidden_dim", hidden_dim)
        self.gate_proj = Linear(dim, hidden_dim, bias)
        self.up_proj = Linear(dim, hidden_dim, bias)
        self.down_proj = Linear(hidden_dim, dim, bias)

    def forward(self, x: Operand) -> Tensor:
        result: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result
