"""Attention and rotary embeddings."""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor, broadcast_to
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import linear
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.activations import softmax
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.padding import pad
from treadle.frontend.functions.sequences import repeat_interleave
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator, rank_of


def _heads(call: Call, x: Value, name: str) -> Tensor:
    """(B, T, H · D) as (B, H, T, D)."""
    tensor = as_tensor(x)
    if tensor.ndim != 3:
        return tensor
    b, t, width = tensor.shape
    heads = call.integer(name)
    if heads < 1 or width % heads:
        raise call.refuse(f"{heads} heads of {tensor.type}")
    return s.transpose(s.reshape(tensor, (b, t, heads, width // heads)), 1, 2)


def _attention_bias(call: Call, q: Tensor, keys: int, mask: Value, past: int, ends: Value) -> Value:
    """What is added to the scores: the mask, causality, and ends of the keys; None for nothing."""
    t, parts = q.shape[2], []
    if mask is not None:
        given = as_tensor(mask)
        if given.dtype is dtypes.bool_:
            given = a.where(given, s.zeros(given.shape, q.dtype), -math.inf)
        missing = keys - given.shape[-1]
        parts.append(pad(given, [*[(0, 0)] * (given.ndim - 1), (0, missing)], -math.inf))
    left, right = (call.integer(f"{side}_window_size", -1) for side in ("left", "right"))
    is_causal = call.flag("is_causal")
    first: Value = past
    if ends is not None:
        lengths = s.reshape(cast_to(as_tensor(ends), dtypes.int32), (q.shape[0], 1, 1, 1))
        first = lengths - t
        parts.append(_hidden(s.iota((1, 1, 1, keys), 3) < lengths, q))
    shape = (1, 1, t, keys)
    ahead = s.iota(shape, 3) - (s.iota(shape, 2) + first)
    if is_causal:
        parts.append(_hidden(ahead <= 0, q))
    if left >= 0:
        parts.append(_hidden(ahead >= -left, q))
    if right >= 0:
        parts.append(_hidden(ahead <= right, q))
    total: Value = None
    for part in parts:
        total = part if total is None else total + part
    return total


def _hidden(seen: Tensor, q: Tensor) -> Tensor:
    return a.where(seen, s.zeros(seen.shape, q.dtype), -math.inf)


@operator("Attention")
def _attention(
    call: Call,
    q: Value,
    k: Value,
    v: Value,
    mask: Value = None,
    past_key: Value = None,
    past_value: Value = None,
    ends: Value = None,
) -> list[Tensor]:
    query = _heads(call, q, "q_num_heads")
    key, value = (_heads(call, x, "kv_num_heads") for x in (k, v))
    past = 0
    if past_key is not None and past_value is not None:
        past = as_tensor(past_key).shape[2]
        key, value = s.concat([past_key, key], 2), s.concat([past_value, value], 2)
    scale = call.real("scale") if call.has("scale") else query.shape[3] ** -0.5
    softcap = call.real("softcap", 0.0)
    is_causal_alone = call.flag("is_causal") and mask is None and ends is None and not past
    is_windowed = (
        max(call.integer("left_window_size", -1), call.integer("right_window_size", -1)) >= 0
    )
    if softcap or call.is_read(3):
        found, scores = _written_out(call, query, key, value, scale, softcap, mask, past, ends)
    elif is_causal_alone and not is_windowed:
        found, scores = linear.attention(query, key, value, None, True, scale), None
    else:
        bias = _attention_bias(call, query, key.shape[2], mask, past, ends)
        found, scores = linear.attention(query, key, value, bias, False, scale), None
    if rank_of(q) == 3:
        b, h, t, d = found.shape
        found = s.reshape(s.transpose(found, 1, 2), (b, t, h * d))
    return [found, key, value, *([] if scores is None else [scores])]


def _written_out(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float,
    mask: Value,
    past: int,
    ends: Value,
) -> tuple[Tensor, Tensor]:
    """The result and the scores, or what became of them."""
    times = query.shape[1] // key.shape[1]
    keys, values = (repeat_interleave(x, times, 1) if times > 1 else x for x in (key, value))
    scores = linear.einsum("bhtd,bhsd->bhts", query, keys) * scale
    mode = call.integer("qk_matmul_output_mode", 0)
    if softcap:
        scores = a.tanh(scores / softcap) * softcap
    bias = _attention_bias(call, query, key.shape[2], mask, past, ends)
    biased = scores if bias is None else scores + bias
    weights = softmax(biased, -1)
    if bias is not None:  # a row that sees nothing is zero
        whole = broadcast_to(as_tensor(bias), scores.shape)
        seen = a.gt(s.unsqueeze(_most(whole), -1), -math.inf)
        weights = a.where(seen, weights, 0.0)
    shown = {0: scores, 1: scores if softcap else biased, 2: biased, 3: weights}.get(mode)
    if shown is None:
        raise call.refuse(f"qk_matmul_output_mode is {mode}")
    return linear.einsum("bhts,bhsd->bhtd", weights, values), shown


def _most(x: Tensor) -> Tensor:
    return x.max(-1)


@operator("RotaryEmbedding")
def _rotary(call: Call, x: Value, cosines: Value, sines: Value, positions: Value = None) -> Tensor:
    given = as_tensor(x)
    if given.ndim == 3:
        b, t, width = given.shape
        heads = call.integer("num_heads")
        rows = s.reshape(given, (b, t, heads, width // heads))
    else:
        rows = s.transpose(given, 1, 2)
    size = call.integer("rotary_embedding_dim", 0) or rows.shape[3]
    tables = [as_tensor(t) for t in (cosines, sines)]
    if positions is not None:
        tables = [take(t, as_tensor(positions)) for t in tables]
    cos, sin = (s.unsqueeze(t, 2) for t in tables)
    turned, rest = rows[..., :size], rows[..., size:]
    if call.flag("interleaved"):
        one, two = turned[..., 0::2], turned[..., 1::2]
    else:
        one, two = turned[..., : size // 2], turned[..., size // 2 :]
    real, other = cos * one - sin * two, sin * one + cos * two
    if call.flag("interleaved"):
        both = s.reshape(s.stack([real, other], -1), turned.shape)
    else:
        both = s.concat([real, other], -1)
    found = s.concat([both, rest], -1)
    return s.reshape(found, given.shape) if given.ndim == 3 else s.transpose(found, 1, 2)
