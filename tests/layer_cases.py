"""What the tests of layers share: a layer of ours beside PyTorch's, and inputs for both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from treadle import nn

BOTH = (False, True)


@dataclass(frozen=True)
class Draw:
    """An input to be drawn: normal numbers, or integers below `high`."""

    shape: tuple[int, ...]
    high: int | None = None

    def array(self, rng: np.random.Generator) -> np.ndarray:
        if self.high is None:
            return rng.standard_normal(self.shape)
        return rng.integers(0, self.high, self.shape)


class Case(NamedTuple):
    name: str
    ours: Callable[[], nn.Module]
    theirs: Callable[[], torch.nn.Module]
    inputs: tuple[Any, ...]  # trees of Draw and arrays
    keywords: dict[str, Any]  # of the call
    modes: tuple[bool, ...]  # training or not


class TorchAttention(torch.nn.MultiheadAttention):
    """torch's attention called as ours: masks are added to the scores (B, H, T, S)."""

    def forward(self, query, key=None, value=None, bias=None, causal=False):
        key = query if key is None else key
        value = key if value is None else value
        batch, length = (0, 1) if self.batch_first else (1, 0)
        b, t, s = query.shape[batch], query.shape[length], key.shape[length]
        mask = torch.zeros((b, self.num_heads, t, s), dtype=query.dtype)
        if bias is not None:
            mask = mask + torch.as_tensor(bias)
        if causal:
            mask = mask + torch.full((t, s), -math.inf, dtype=query.dtype).triu(1)
        # (B · H, T, S)
        flat = mask.reshape(-1, t, s) if bias is not None or causal else None
        return super().forward(query, key, value, need_weights=False, attn_mask=flat)[0]


class TorchRotary(torch.nn.Module):
    """x cos + rotate_half(x) sin, as transformers' modeling_llama."""

    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x, offset=0):
        position = torch.arange(offset, offset + x.shape[-2], dtype=torch.float64)
        freqs = torch.outer(position, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        rotated = torch.cat((-x2, x1), dim=-1)
        return x * emb.cos() + rotated * emb.sin()


class TorchSwiGLU(torch.nn.Module):
    def __init__(self, dim, hidden_dim, bias=False):
        super().__init__()
        self.gate_proj = torch.nn.Linear(dim, hidden_dim, bias=bias)
        self.up_proj = torch.nn.Linear(dim, hidden_dim, bias=bias)
        self.down_proj = torch.nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Chain(nn.Module):
    """A ModuleList in use: one after the other, with a residual."""

    def __init__(self, *layers):
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class TorchChain(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    forward = Chain.forward


COUNTERPARTS = {
    "MultiHeadAttention": TorchAttention,
    "RotaryEmbedding": TorchRotary,
    "SwiGLU": TorchSwiGLU,
}


def floats(*shape: int) -> Draw:
    return Draw(shape)


def integers(high: int, *shape: int) -> Draw:
    return Draw(shape, high)


def case(name: str, options: tuple | dict, *inputs: Any, modes=BOTH, **keywords: Any) -> Case:
    """The same constructor arguments for both."""
    arguments, named = (options, {}) if isinstance(options, tuple) else ((), options)
    theirs = COUNTERPARTS.get(name) or getattr(torch.nn, name)
    return Case(
        name,
        lambda: getattr(nn, name)(*arguments, **named),
        lambda: theirs(*arguments, **named),
        inputs,
        keywords,
        modes,
    )


def built(name: str, build: Callable[[Any], Any], *inputs: Any) -> Case:
    """One function that builds both, from `nn` or from `torch.nn`."""
    return Case(name, lambda: build(nn), lambda: build(torch.nn), inputs, {}, BOTH)


def chain(*layers: Callable[[Any], Any]) -> Case:
    return Case(
        "ModuleList",
        lambda: Chain(*(make(nn) for make in layers)),
        lambda: TorchChain(*(make(torch.nn) for make in layers)),
        (floats(3, 4),),
        {},
        BOTH,
    )
