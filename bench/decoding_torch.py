"""The decoder of `transformers` in plain PyTorch with a static cache: a peer where that is missing.

The operations are those of its Llama: rotations, grouped heads, a cache that is written in place
and read whole under a mask, one token at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, config: Any, slots: int):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_width
        self.heads, self.groups = config.num_attention_heads, config.kv_heads
        self.width = config.head_width
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.width, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.width, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        shape = (1, self.groups, slots, self.width)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(
        self, x: torch.Tensor, at: torch.Tensor, turn: tuple[Any, Any], mask: torch.Tensor
    ) -> torch.Tensor:
        def heads(y: torch.Tensor, count: int) -> torch.Tensor:
            return y.view(1, -1, count, self.width).transpose(1, 2)

        q = rotated(heads(self.q_proj(x), self.heads), *turn)
        k = rotated(heads(self.k_proj(x), self.groups), *turn)
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, heads(self.v_proj(x), self.groups))
        mixed = F.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(1, x.shape[1], -1))


class Feed(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Any, slots: int):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, slots), Feed(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, *where: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """One token (1, 1) and its position (1,) → the next one, likeliest first."""

    def __init__(self, config: Any, slots: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, slots) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        rates, _ = config.rates()
        self.rates = torch.tensor(np.concatenate([rates, rates]))
        self.slots = torch.arange(slots)

    def logits(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        angle = at.float()[:, None] * self.rates
        turn = angle.cos().to(x.dtype)[None, None], angle.sin().to(x.dtype)[None, None]
        mask = (self.slots[None] <= at[:, None])[None, None]
        for layer in self.layers:
            x = layer(x, at, turn, mask)
        return F.linear(self.norm(x[:, -1]), self.embed_tokens.weight)

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.logits(tokens, at).argmax(-1, keepdim=True)


def decoder(
    config: Any, values: Mapping[str, np.ndarray], slots: int, device: str, dtype: torch.dtype
) -> Decoder:
    """One with the values of a Treadle model, whose names it has below "model."."""
    found = Decoder(config, slots)
    named = {
        n.removeprefix("model."): torch.tensor(np.asarray(v, np.float32)) for n, v in values.items()
    }
    caches = {n: b for n, b in found.named_buffers() if n not in named}
    found.load_state_dict({**named, **caches})
    found = found.to(device=device, dtype=dtype).eval()
    found.rates, found.slots = found.rates.to(device), found.slots.to(device)
    return found
