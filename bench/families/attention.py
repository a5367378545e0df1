"""Other attention: learnt biases, latents, linear in the length, low-rank changes of a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats
from families.transformers import heads_of, joined, layers_of, masked, tokens


def buckets_of(t: int, buckets: int, furthest: int) -> np.ndarray:
    """T5's bucket of each query and key: near distances one each, far ones by their logarithm."""
    apart = np.arange(t)[None, :] - np.arange(t)[:, None]
    half = buckets // 2
    exact = half // 2
    far = np.log(np.maximum(np.abs(apart), exact) / exact) / math.log(furthest / exact)
    coarse = np.minimum(exact + (far * (half - exact)).astype(int), half - 1)
    found = np.where(np.abs(apart) < exact, np.abs(apart), coarse) + half * (apart > 0)
    return found.astype(np.int32)


def t5(s: Any, vocabulary: int, t: int, d: int, heads: int, layers: int, **others: int) -> Any:
    """T5's encoder: RMSNorm, no biases, and one table of what distances add to scores."""
    nn, buckets = s.nn, 32

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
            self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
            self.fc1, self.fc2 = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

        def forward(self, x: Any, bias: Any) -> Any:
            q, k, v = (heads_of(p, heads) for p in self.qkv(self.norm1(x)).chunk(3, -1))
            x = x + self.out(joined(s.biased_attention(q, k, v, bias)))
            return x + self.fc2(s.relu(self.fc1(self.norm2(x))))

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.distance = nn.Embedding(vocabulary, d), nn.Embedding(buckets, heads)
            self.index = s.constant(buckets_of(t, buckets, 128))
            self.blocks = nn.ModuleList([Block() for _ in range(layers)])
            self.norm = nn.RMSNorm(d, eps=1e-6)
            self.head = nn.Linear(d, vocabulary, bias=False)

        def forward(self, batch: Any) -> Any:
            x = self.wte(batch["x"])
            bias = self.distance(self.index).permute(2, 0, 1)[None]  # (1, heads, T, T)
            for block in self.blocks:
                x = block(x, bias)
            return s.cross_entropy(self.head(self.norm(x)), batch["y"])

    return T5()


def asked(rng: np.random.Generator, **sizes: int) -> Arrays:
    """Masked tokens without padding."""
    batch = masked(rng, **sizes)
    return {"x": batch["x"], "y": batch["y"]}


def perceiver(
    s: Any, channels: int, latents: int, d: int, heads: int, rounds: int, layers: int, count: int,
    **others: int,
) -> Any:  # fmt: skip
    """Perceiver: few latents look at many inputs, then at each other, again and again."""
    nn = s.nn
    Attention, Cross, Feed = layers_of(s, d, heads)

    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.norm = nn.Linear(channels, d), nn.LayerNorm(d)
            self.latents = s.parameter(1, latents, d)
            self.cross = nn.ModuleList([Cross() for _ in range(rounds)])
            self.feed = nn.ModuleList([Feed() for _ in range(rounds)])
            blocks = [block() for _ in range(layers) for block in (Attention, Feed)]
            self.blocks = nn.Sequential(*blocks)  # shared by the rounds
            self.last, self.head = nn.LayerNorm(d), nn.Linear(d, count)

        def forward(self, batch: Any) -> Any:
            memory = self.norm(self.into(batch["x"]))
            x = self.latents.expand(memory.shape[0], latents, d)
            for cross, feed in zip(self.cross, self.feed, strict=True):
                x = self.blocks(feed(cross(x, memory)))
            return s.cross_entropy(self.head(self.last(x).mean(1)), batch["y"])

    return Perceiver()


def arrays(
    rng: np.random.Generator, n: int, inputs: int, channels: int, count: int, **others: int
) -> Arrays:
    return {"x": floats(rng, n, inputs, channels), "y": classes(rng, count, n)}


def linear_attention(
    s: Any, vocabulary: int, t: int, d: int, heads: int, layers: int, chunk: int, **others: int
) -> Any:
    """Causal attention without a softmax, by chunks: sums of k vᵀ stand for what was before."""
    nn, size, chunks = s.nn, d // heads, t // chunk
    _, _, Feed = layers_of(s, d, heads)
    seen = np.tril(np.ones((chunk, chunk), np.float32))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.seen = s.constant(seen)

        def forward(self, x: Any) -> Any:
            n = x.shape[0]
            parts = self.qkv(self.norm(x)).chunk(3, -1)
            q, k, v = (heads_of(p, heads).reshape(n, heads, chunks, chunk, size) for p in parts)
            q, k = s.elu(q) + 1, s.elu(k) + 1
            states = s.einsum("bhcti,bhctj->bhcij", k, v)
            totals = k.sum(3)  # (N, heads, chunks, size)
            before = s.cumsum(states, 2) - states
            scores = s.einsum("bhcti,bhcsi->bhcts", q, k) * self.seen
            y = s.einsum("bhcts,bhcsj->bhctj", scores, v)
            y = y + s.einsum("bhcti,bhcij->bhctj", q, before)
            sums = scores.sum(-1) + s.einsum("bhcti,bhci->bhct", q, s.cumsum(totals, 2) - totals)
            y = y / (sums[..., None] + 1e-6)
            return x + self.out(joined(y.reshape(n, heads, t, size)))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
            blocks = [block() for _ in range(layers) for block in (Attention, Feed)]
            self.blocks = nn.Sequential(*blocks)
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

        def forward(self, batch: Any) -> Any:
            x = self.blocks(self.wte(batch["x"]) + self.wpe(s.arange(t)))
            return s.cross_entropy(self.head(self.norm(x)), batch["y"])

    return Decoder()


def lora(
    s: Any, vocabulary: int, t: int, d: int, heads: int, layers: int, rank: int, **others: int
) -> Any:
    """A frozen decoder whose queries and values get trained changes of low rank."""
    nn = s.nn
    _, _, Feed = layers_of(s, d, heads)

    class Change(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = s.parameter(rank, d), s.parameter(d, rank)

        def forward(self, x: Any) -> Any:
            return s.linear(s.linear(x, self.down), self.up) * (16 / rank)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

        def forward(self, x: Any, to_queries: Any, to_values: Any) -> Any:
            y = self.norm(x)
            q, k, v = self.qkv(y).chunk(3, -1)
            q, v = q + to_queries(y), v + to_values(y)
            q, k, v = (heads_of(p, heads) for p in (q, k, v))
            return x + self.out(joined(s.attention(q, k, v, causal=True)))

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
            self.attention = nn.ModuleList([Attention() for _ in range(layers)])
            self.feed = nn.ModuleList([Feed() for _ in range(layers)])
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Base()
            self.base.requires_grad_(False)
            self.queries, self.values = (
                nn.ModuleList([Change() for _ in range(layers)]) for _ in range(2)
            )

        def forward(self, batch: Any) -> Any:
            base = self.base
            x = base.wte(batch["x"]) + base.wpe(s.arange(t))
            changes = zip(self.queries, self.values, strict=True)
            for attention, feed, change in zip(base.attention, base.feed, changes, strict=True):
                x = feed(attention(x, *change))
            return s.cross_entropy(base.head(base.norm(x)), batch["y"])

    return Tuned()


ENTRIES = [
    Entry(
        "t5",
        "T5's encoder, relative biases",
        t5,
        asked,
        {"n": 4, "t": 128, "vocabulary": 512, "d": 128, "heads": 4, "layers": 2},
        {"n": 16, "t": 512, "vocabulary": 8192, "d": 512, "heads": 8, "layers": 6},
    ),
    Entry(
        "perceiver",
        "Perceiver, cross-attention",
        perceiver,
        arrays,
        {"n": 4, "inputs": 256, "channels": 32, "latents": 32, "d": 96, "heads": 4, "rounds": 2,
         "layers": 2, "count": 10},
        {"n": 16, "inputs": 4096, "channels": 64, "latents": 256, "d": 512, "heads": 8,
         "rounds": 2, "layers": 4, "count": 1000},
    ),
    Entry(
        "linear_attention",
        "linear attention by chunks",
        linear_attention,
        tokens,
        {"n": 4, "t": 128, "vocabulary": 256, "d": 128, "heads": 4, "layers": 2, "chunk": 32},
        {"n": 16, "t": 1024, "vocabulary": 8192, "d": 512, "heads": 8, "layers": 6, "chunk": 64},
    ),
    Entry(
        "lora",
        "LoRA on a frozen decoder",
        lora,
        tokens,
        {"n": 4, "t": 64, "vocabulary": 256, "d": 128, "heads": 4, "layers": 2, "rank": 8},
        {"n": 16, "t": 512, "vocabulary": 8192, "d": 768, "heads": 12, "layers": 12, "rank": 16},
    ),
]  # fmt: skip
