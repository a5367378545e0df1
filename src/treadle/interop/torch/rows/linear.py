"""Rows of products: matrices, convolutions, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.base.dtypes import bool_
from treadle.frontend.coerce import cast
from treadle.frontend.functions import distances, images
from treadle.frontend.functions import linear as m
from treadle.frontend.functions.activations import softmax
from treadle.frontend.functions.arithmetic import where
from treadle.frontend.functions.elementary import dropout
from treadle.frontend.functions.reductions import any as any_over
from treadle.frontend.functions.sequences import kron, outer
from treadle.frontend.functions.shaping import (
    expand,
    iota,
    repeat,
    reshape,
    roll,
    squeeze,
    transpose,
    unsqueeze,
)
from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.elementwise import scaled
from treadle.interop.torch.rows.table import aten, declare_all

Ints = Sequence[int]

declare_all(
    {
        "mm": m.matmul,
        "bmm": m.matmul,
        "matmul": m.matmul,
        "mv": m.matmul,
        "dot": m.matmul,
        "vdot": m.matmul,
        "linear": m.linear,
        "kron": kron,
        "outer": outer,
        "ger": outer,
    }
)


@aten("addmm", "addmv", "baddbmm")
def _addmm(x: Tensor, first: Tensor, second: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    product = scaled(m.matmul(first, second), alpha)
    return scaled(x, beta) + product if beta else product * 1


@aten("addbmm")
def _addbmm(x: Tensor, first: Tensor, second: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return scaled(x, beta) + scaled(m.einsum("bij,bjk->ik", first, second), alpha)


@aten("addr")
def _addr(x: Tensor, first: Tensor, second: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return scaled(x, beta) + scaled(outer(first, second), alpha)


@aten("einsum")
def _einsum(equation: str, tensors: Sequence[Tensor], path: Any = None) -> Tensor:
    return m.einsum(equation, *tensors)


@aten("bilinear")
def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = m.einsum("...i,oij,...j->...o", x1, weight, x2)
    return result if bias is None else result + bias


@aten("linalg_cross")
def _cross(x: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    """x₁y₂ − x₂y₁ and so on: elements one and two further along, around the corner."""
    return roll(x, -1, dim) * roll(y, -2, dim) - roll(x, -2, dim) * roll(y, -1, dim)


@aten("_cdist_forward", "cdist")
def _cdist(x: Tensor, y: Tensor, p: float = 2, mode: Any = None) -> Tensor:
    return distances.cdist(x, y, p)


@aten("cosine_similarity")
def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    return distances.cosine_similarity(x, y, dim, eps)


# Convolutions


def _one(values: Any) -> Any:
    """PyTorch's lists of one number stand for all axes."""
    return values[0] if isinstance(values, Sequence) and len(values) == 1 else values


@aten("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    batch = unsqueeze(x, 0) if x.ndim == weight.ndim - 1 else x
    pads = padding if isinstance(padding, str) else _one(padding)
    result = m.conv(batch, weight, bias, _one(stride), pads, _one(dilation), groups)
    return result if batch is x else squeeze(result, 0)


@aten("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    batch = unsqueeze(x, 0) if x.ndim == weight.ndim - 1 else x
    extra = _one(output_padding)
    result = images.conv_transpose(
        batch, weight, bias, _one(stride), _one(padding), extra, groups, _one(dilation)
    )
    return result if batch is x else squeeze(result, 0)


@aten("convolution")
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Tensor:
    if transposed:
        return _conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _conv(x, weight, bias, stride, padding, dilation, groups)


# Attention


@aten("scaled_dot_product_attention")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Treadle's attention, whose scores are never in memory, unless some of them are dropped."""
    leads = [t.shape[:-2] for t in (query, key, value)]
    if enable_gqa or leads[0] == leads[1] == leads[2]:
        lead = leads[0]
        q, k, v = query, key, value
    else:
        lead = tuple(np.broadcast_shapes(*leads))
        q, k, v = (expand(t, (*lead, *t.shape[-2:])) for t in (query, key, value))
    q, k, v = (_four_axes(t) for t in (q, k, v))
    mask = None if attn_mask is None else _fitting_mask(attn_mask, lead)
    if dropout_p:
        found = _with_dropout(q, k, v, mask, dropout_p, is_causal, scale)
    else:
        found = m.attention(q, k, v, mask, is_causal, scale)
    return reshape(found, (*lead, *found.shape[-2:]))


def _four_axes(x: Tensor) -> Tensor:
    """(B, H, T, D): more axes in front are one batch, and fewer are of one element."""
    lead = x.shape[:-2]
    if len(lead) < 2:
        return reshape(x, (*(1,) * (2 - len(lead)), *x.shape))
    batch = int(np.prod(lead[:-1]))
    return reshape(x, (batch, lead[-1], *x.shape[-2:]))


def _fitting_mask(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    if len(lead) <= 2 or mask.ndim <= 2:
        return reshape(mask, (*(1,) * max(0, 4 - mask.ndim), *mask.shape))
    return _four_axes(expand(mask, (*lead, *mask.shape[-2:])))


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype is not bool_:
        return cast(mask, query.dtype)
    # Finite, so that a row without a True gives no NaN.
    return where(mask, 0.0, cast(mask, query.dtype) * 0.0 - 0.5 * query.dtype.largest)


def _with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    bias = _bias(mask, q)
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = (_repeated_heads(t, shared) for t in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = m.matmul(q, transpose(k, -1, -2)) * factor
    if bias is not None:
        scores = scores + bias
    if causal:
        rows, columns = scores.shape[-2:]
        seen = iota((rows, columns), 1) <= iota((rows, columns), 0)
        scores = where(seen, scores, -0.5 * q.dtype.largest)
    found = m.matmul(dropout(softmax(scores, -1), p), v)
    if mask is not None and mask.dtype is bool_:
        # Who may look at nothing gets zeros.
        found = where(any_over(mask, -1, True), found, 0.0)
    return found


def _repeated_heads(x: Tensor, times: int) -> Tensor:
    batch, heads, n, d = x.shape
    wide = repeat(unsqueeze(x, 2), 1, 1, times, 1, 1)
    return reshape(wide, (batch, heads * times, n, d))
