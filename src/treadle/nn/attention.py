"""Multi-head attention, in two spellings, and the gated feed-forward layer."""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import check_whole
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor, broadcast_to, cast
from treadle.frontend.functions import linear
from treadle.frontend.functions.activations import silu, softmax
from treadle.frontend.functions.arithmetic import (
    where,
)
from treadle.frontend.functions.reductions import mean
from treadle.frontend.functions.shaping import (
    iota,
    permute,
    reshape,
    squeeze,
    transpose,
    unsqueeze,
)
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn import init
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Linear
from treadle.nn.module import Module, Parameter


class MultiHeadAttention(Module):
    """Attention with projections, as torch.nn.MultiheadAttention (sequence first by default).

    `key` and `value` default to `query`. The float bias is added to the scores and broadcasts to
    (B, heads, T, S).

    Shapes: (T, N, embed_dim), (S, N, embed_dim) → (T, N, embed_dim); N comes first with
    batch_first.
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
        added = None if bias is None else as_tensor(bias)
        if added is not None and not added.dtype.is_float:
            raise DTypeError(
                "MultiHeadAttention",
                f"the bias is {added.type}, but it is added to the scores",
                "Pass td.where(mask, 0.0, -math.inf) for a mask that is True where a key takes "
                "part, or nn.MultiheadAttention, whose masks are True where a key is hidden.",
            )
        q, k, v = (self._project(i, x) for i, x in enumerate((q, k, v)))
        mixed = self._mixed(q, k, v, added, causal)  # (B, H, T, D)
        joined = reshape(permute(mixed, 0, 2, 1, 3), (mixed.shape[0], mixed.shape[2], -1))
        result = self.out_proj(joined)
        return result if self.batch_first else transpose(result, 0, 1)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
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


class SwiGLU(Module):
    """down(silu(gate x) · up x), the gated feed-forward layer of Llama: (…, dim) → (…, dim)."""

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False):
        check_whole("SwiGLU", "dim", dim)
        check_whole("SwiGLU", "hidden_dim", hidden_dim)
        self.gate_proj = Linear(dim, hidden_dim, bias)
        self.up_proj = Linear(dim, hidden_dim, bias)
        self.down_proj = Linear(hidden_dim, dim, bias)

    def forward(self, x: Operand) -> Tensor:
        result: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class MultiheadAttention(Module):
    """torch.nn.MultiheadAttention: `output, weights = attention(query, key, value)`.

    A bool mask is True where a key is hidden, as in PyTorch's layer: the opposite of
    `td.attention`. A float mask is added to the scores, here and there. `num_kv_heads` shares keys
    and values among groups of heads.

    Shapes: (T, N, embed_dim), (S, N, kdim), (S, N, vdim) → (T, N, embed_dim) and weights (N, T, S)
    or None; N comes first with batch_first, and all may be without N.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        num_kv_heads: int | None = None,
    ):
        name = "MultiheadAttention"
        check_whole(name, "embed_dim", embed_dim)
        check_whole(name, "num_heads", num_heads)
        groups = (
            num_heads if num_kv_heads is None else check_whole(name, "num_kv_heads", num_kv_heads)
        )
        if embed_dim % num_heads or num_heads % groups:
            raise ArgumentError(
                name,
                f"{num_heads} heads, {groups} of keys, for a width of {embed_dim}",
                "The heads divide the width, and those of keys divide the heads.",
            )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.num_kv_heads, self.head_dim = groups, embed_dim // num_heads
        self.dropout = Dropout(dropout)
        narrow = groups * self.head_dim
        self.is_packed = (
            narrow == embed_dim and kdim in (None, embed_dim) and vdim in (None, embed_dim)
        )
        if self.is_packed:
            self.in_proj_weight = Parameter((3 * embed_dim, embed_dim), init.xavier_uniform())
        else:
            first = init.xavier_uniform()
            self.q_proj_weight = Parameter((embed_dim, embed_dim), first)
            self.k_proj_weight = Parameter((narrow, kdim or embed_dim), first)
            self.v_proj_weight = Parameter((narrow, vdim or embed_dim), first)
        rows = embed_dim + 2 * narrow
        self.in_proj_bias = Parameter((rows,), init.zeros) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if self.out_proj.bias is not None:
            self.out_proj.bias.init = init.zeros

    def forward(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        key_padding_mask: Operand | None = None,
        need_weights: bool = True,
        attn_mask: Operand | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (as_tensor(t) for t in (query, key, value))
        if q.ndim == k.ndim == v.ndim == 2:
            axis = 0 if self.batch_first else 1
            padding = None if key_padding_mask is None else unsqueeze(key_padding_mask, 0)
            q, k, v = unsqueeze(q, axis), unsqueeze(k, axis), unsqueeze(v, axis)
            kept = need_weights, attn_mask, average_attn_weights, is_causal
            output, weights = self.forward(q, k, v, padding, *kept)
            return squeeze(output, axis), None if weights is None else squeeze(weights, 0)
        for label, x in (("query", q), ("key", k), ("value", v)):
            if x.ndim != 3:
                raise ShapeError(
                    "MultiheadAttention",
                    f"the {label} is {x.type}",
                    "It is (T, N, width), or (N, T, width) with batch_first.",
                )
        q, k, v = (self._heads(i, x) for i, x in enumerate((q, k, v)))
        shape = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        bias = masks_as_bias(shape, q.dtype, attn_mask, key_padding_mask)
        is_dropped = self.training and self.dropout.p > 0
        if need_weights or is_dropped:
            weights = self._weights(q, k, bias, is_causal)
            mixed = linear.matmul(self.dropout(weights), spread_heads(v, self.num_heads))
        else:
            weights = None
            mixed = linear.attention(q, k, v, bias, is_causal)
        joined = reshape(permute(mixed, 0, 2, 1, 3), (shape[0], shape[2], self.embed_dim))
        result: Tensor = self.out_proj(joined)
        output = result if self.batch_first else transpose(result, 0, 1)
        if weights is None or not need_weights:
            return output, None
        return output, mean(weights, 1) if average_attn_weights else weights

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
        scores = (
            linear.matmul(q, transpose(spread_heads(k, self.num_heads), -1, -2))
            * self.head_dim**-0.5
        )
        if bias is not None:
            scores = scores + bias
        if is_causal:
            t, s = scores.shape[-2:]
            scores = where(iota((t, s), 1) <= iota((t, s), 0), scores, -math.inf)
        return softmax(scores)

    def _heads(self, part: int, x: Tensor) -> Tensor:
        """One of the three projections, split into heads: (B, H, T, D)."""
        narrow = self.num_kv_heads * self.head_dim
        widths = (self.embed_dim, narrow, narrow)
        start = sum(widths[:part])
        rows = slice(start, start + widths[part])
        if self.is_packed:
            weight: Operand = self.in_proj_weight[rows]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[part]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        projected = linear.linear(x, weight, bias)
        if not self.batch_first:
            projected = transpose(projected, 0, 1)
        b, t, _ = projected.shape
        return permute(reshape(projected, (b, t, -1, self.head_dim)), 0, 2, 1, 3)


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, G, S, D) of a group for each of its heads: → (B, heads, S, D)."""
    b, g, s, d = x.shape
    if g == heads:
        return x
    each = broadcast_to(unsqueeze(x, 2), (b, g, heads // g, s, d))
    return reshape(each, (b, heads, s, d))


def masks_as_bias(
    shape: Shape,
    dtype: dtypes.DType,
    attn_mask: Operand | None = None,
    key_padding_mask: Operand | None = None,
) -> Tensor | None:
    """PyTorch's masks as what is added to scores (B, H, T, S); None where there are none."""
    b, heads, t, s = shape
    found: Tensor | None = None
    if attn_mask is not None:
        mask = as_tensor(attn_mask)
        if mask.ndim == 3 and mask.shape == (b * heads, t, s):
            mask = reshape(mask, (b, heads, t, s))
        if mask.shape[-2:] != (t, s) and mask.shape[-2:] != (1, s):
            raise ShapeError(
                "attention", f"attn_mask is {mask.type}", f"It ends in {(t, s)}: queries and keys."
            )
        found = _added("attn_mask", mask, dtype)
    if key_padding_mask is not None:
        mask = as_tensor(key_padding_mask)
        if mask.shape != (b, s):
            raise ShapeError(
                "attention", f"key_padding_mask is {mask.type}", f"It is {(b, s)}: batch and keys."
            )
        hidden = reshape(_added("key_padding_mask", mask, dtype), (b, 1, 1, s))
        found = hidden if found is None else found + hidden
    return found


def _added(name: str, mask: Tensor, dtype: dtypes.DType) -> Tensor:
    if not mask.dtype.is_float and mask.dtype is not dtypes.bool_:
        raise DTypeError(
            "attention",
            f"{name} is {mask.type}, neither float (added to the scores) nor bool",
            "Pass mask == 0 for a mask that is 1 where a key takes part: bool masks of layers are "
            "True where a key is hidden.",
        )
    if mask.dtype is dtypes.bool_:
        return where(mask, as_tensor(-math.inf).astype(dtype), as_tensor(0.0).astype(dtype))
    return cast(mask, dtype)
