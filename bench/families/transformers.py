"""Attention and what is like it: encoders, decoders, patches, experts, mixers."""

from __future__ import annotations

from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats, lengths


def heads_of(x: Any, heads: int) -> Any:
    """(B, T, d) as (B, heads, T, d / heads)."""
    b, t, d = x.shape
    return x.reshape(b, t, heads, d // heads).transpose(1, 2)


def joined(x: Any) -> Any:
    b, h, t, d = x.shape
    return x.transpose(1, 2).reshape(b, t, h * d)


def layers_of(s: Any, d: int, heads: int) -> tuple[Any, Any, Any]:
    """Self-attention, attention to a memory, and the feed-forward layer."""
    nn = s.nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

        def forward(self, x: Any, hidden: Any = None, causal: bool = False) -> Any:
            q, k, v = (heads_of(p, heads) for p in self.qkv(self.norm(x)).chunk(3, -1))
            return x + self.out(joined(s.attention(q, k, v, hidden, causal)))

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q = nn.LayerNorm(d), nn.Linear(d, d)
            self.kv, self.out = nn.Linear(d, 2 * d), nn.Linear(d, d)

        def forward(self, x: Any, memory: Any, hidden: Any = None) -> Any:
            q = heads_of(self.q(self.norm(x)), heads)
            k, v = (heads_of(p, heads) for p in self.kv(memory).chunk(2, -1))
            return x + self.out(joined(s.attention(q, k, v, hidden)))

    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc, self.out = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(self, x: Any) -> Any:
            return x + self.out(s.gelu(self.fc(self.norm(x))))

    return Attention, Cross, Feed


def bert(s: Any, vocabulary: int, t: int, d: int, heads: int, layers: int, **others: int) -> Any:
    """Masked tokens predicted; padding is hidden and unmasked labels are ignored."""
    nn = s.nn
    Attention, _, Feed = layers_of(s, d, heads)

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
            self.attention = nn.ModuleList([Attention() for _ in range(layers)])
            self.feed = nn.ModuleList([Feed() for _ in range(layers)])
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

        def forward(self, batch: Any) -> Any:
            hidden = s.arange(t)[None, :] >= batch["lengths"][:, None]
            x = self.wte(batch["x"]) + self.wpe(s.arange(t))
            for attention, feed in zip(self.attention, self.feed, strict=True):
                x = feed(attention(x, hidden))
            return s.cross_entropy(self.head(self.norm(x)), batch["y"])

    return Bert()


def masked(rng: np.random.Generator, n: int, t: int, vocabulary: int, **others: int) -> Arrays:
    """A seventh of the tokens has a label."""
    ends, x = lengths(rng, t, n), classes(rng, vocabulary, n, t)
    is_asked = (rng.random((n, t)) < 0.15) & (np.arange(t) < ends[:, None])
    y = np.where(is_asked, classes(rng, vocabulary, n, t), -100).astype(np.int32)
    return {"x": x, "y": y, "lengths": ends}


def vit(
    s: Any, size: int, patch: int, d: int, heads: int, layers: int, count: int, **others: int
) -> Any:
    nn, patches = s.nn, (size // patch) ** 2
    Attention, _, Feed = layers_of(s, d, heads)

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, d, patch, patch)
            self.cls, self.wpe = s.parameter(1, 1, d), s.parameter(patches + 1, d)
            blocks = [block() for _ in range(layers) for block in (Attention, Feed)]
            self.blocks = nn.Sequential(*blocks)
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, count)

        def forward(self, batch: Any) -> Any:
            x = self.patches(batch["x"]).flatten(2).transpose(1, 2)
            first = self.cls.expand(x.shape[0], 1, d)
            x = self.blocks(s.cat([first, x], 1) + self.wpe)
            return s.cross_entropy(self.head(self.norm(x)[:, 0]), batch["y"])

    return ViT()


def mixer(
    s: Any, size: int, patch: int, d: int, mixed: int, layers: int, count: int, **others: int
) -> Any:
    nn, patches = s.nn, (size // patch) ** 2

    def feed(width: int, hidden: int) -> Any:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.tokens, self.channels = feed(patches, mixed), feed(d, 4 * d)

        def forward(self, x: Any) -> Any:
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, d, patch, patch)
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, count)

        def forward(self, batch: Any) -> Any:
            x = self.blocks(self.patches(batch["x"]).flatten(2).transpose(1, 2))
            return s.cross_entropy(self.head(self.norm(x).mean(1)), batch["y"])

    return Mixer()


def labelled(rng: np.random.Generator, n: int, size: int, count: int, **others: int) -> Arrays:
    return {"x": floats(rng, n, 3, size, size), "y": classes(rng, count, n)}


def experts(
    s: Any, vocabulary: int, t: int, d: int, heads: int, layers: int, count: int, **others: int
) -> Any:
    """A decoder whose feed-forward layers are experts, all computed and weighed by a router."""
    nn = s.nn
    Attention, _, _ = layers_of(s, d, heads)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.router = nn.LayerNorm(d), nn.Linear(d, count)
            self.into = s.parameter(count, 2 * d, d)
            self.out = s.parameter(count, d, 2 * d)

        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            gates = s.softmax(self.router(y))
            hidden = s.gelu(s.einsum("btd,ehd->bteh", y, self.into))
            return x + s.einsum("bteh,edh,bte->btd", hidden, self.out, gates)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
            self.attention = nn.ModuleList([Attention() for _ in range(layers)])
            self.experts = nn.ModuleList([Experts() for _ in range(layers)])
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

        def forward(self, batch: Any) -> Any:
            x = self.wte(batch["x"]) + self.wpe(s.arange(t))
            for attention, of_experts in zip(self.attention, self.experts, strict=True):
                x = of_experts(attention(x, causal=True))
            return s.cross_entropy(self.head(self.norm(x)), batch["y"])

    return Decoder()


def llama(
    s: Any, vocabulary: int, d: int, heads: int, groups: int, layers: int, **others: int
) -> Any:
    """RMSNorm, rotated queries, shared keys, gated feed-forward layers."""
    nn, size, hidden = s.nn, d // heads, 3 * d

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
            self.qkv = nn.Linear(d, (heads + 2 * groups) * size, bias=False)
            self.out = nn.Linear(d, d, bias=False)
            self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
            self.down = nn.Linear(hidden, d, bias=False)

        def forward(self, x: Any) -> Any:
            narrow = groups * size
            parts = self.qkv(self.norm1(x)).split([d, narrow, narrow], -1)
            q, k, v = (heads_of(p, p.shape[-1] // size) for p in parts)
            mixed = s.attention(s.rotated(q), s.rotated(k), v, causal=True)
            x = x + self.out(joined(mixed))
            y = self.norm2(x)
            return x + self.down(s.silu(self.gate(y)) * self.up(y))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(vocabulary, d)
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.norm = nn.RMSNorm(d, eps=1e-5)
            self.head = nn.Linear(d, vocabulary, bias=False)

        def forward(self, batch: Any) -> Any:
            x = self.blocks(self.wte(batch["x"]))
            return s.cross_entropy(self.head(self.norm(x)), batch["y"])

    return Llama()


def tokens(rng: np.random.Generator, n: int, t: int, vocabulary: int, **others: int) -> Arrays:
    return {"x": classes(rng, vocabulary, n, t), "y": classes(rng, vocabulary, n, t)}


def translator(
    s: Any, vocabulary: int, t: int, d: int, heads: int, layers: int, **others: int
) -> Any:
    """An encoder that hides padding, and a decoder that looks at what it gives."""
    nn = s.nn
    Attention, Cross, Feed = layers_of(s, d, heads)

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
            self.encoder, self.decoder, self.cross, self.feed1, self.feed2 = (
                nn.ModuleList([kind() for _ in range(layers)])
                for kind in (Attention, Attention, Cross, Feed, Feed)
            )
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.head = nn.Linear(d, vocabulary)

        def forward(self, batch: Any) -> Any:
            hidden = s.arange(t)[None, :] >= batch["lengths"][:, None]
            x = self.wte(batch["source"]) + self.wpe(s.arange(t))
            for attention, feed in zip(self.encoder, self.feed1, strict=True):
                x = feed(attention(x, hidden))
            memory = self.norm1(x)
            y = self.wte(batch["x"]) + self.wpe(s.arange(t))
            for attention, cross, feed in zip(self.decoder, self.cross, self.feed2, strict=True):
                y = feed(cross(attention(y, causal=True), memory, hidden))
            return s.cross_entropy(self.head(self.norm2(y)), batch["y"])

    return Translator()


def translated(rng: np.random.Generator, n: int, t: int, vocabulary: int, **others: int) -> Arrays:
    source = classes(rng, vocabulary, n, t)
    return tokens(rng, n, t, vocabulary) | {"source": source, "lengths": lengths(rng, t, n)}


ENTRIES = [
    Entry(
        "bert",
        "BERT, padding hidden",
        bert,
        masked,
        {"n": 4, "t": 128, "vocabulary": 1000, "d": 192, "heads": 6, "layers": 2},
        {"n": 16, "t": 512, "vocabulary": 30522, "d": 768, "heads": 12, "layers": 12},
    ),
    Entry(
        "vit",
        "ViT",
        vit,
        labelled,
        {"n": 8, "size": 32, "patch": 4, "d": 192, "heads": 3, "layers": 2, "count": 10},
        {"n": 64, "size": 224, "patch": 16, "d": 384, "heads": 6, "layers": 12, "count": 1000},
    ),
    Entry(
        "mixer",
        "MLP-Mixer",
        mixer,
        labelled,
        {"n": 8, "size": 32, "patch": 4, "d": 192, "mixed": 96, "layers": 2, "count": 10},
        {"n": 64, "size": 224, "patch": 16, "d": 512, "mixed": 256, "layers": 8, "count": 1000},
    ),
    Entry(
        "moe",
        "decoder with experts",
        experts,
        tokens,
        {"n": 4, "t": 64, "vocabulary": 256, "d": 128, "heads": 4, "layers": 2, "count": 4},
        {"n": 16, "t": 512, "vocabulary": 8192, "d": 512, "heads": 8, "layers": 6, "count": 4},
    ),
    Entry(
        "translator",
        "encoder–decoder",
        translator,
        translated,
        {"n": 8, "t": 48, "vocabulary": 500, "d": 128, "heads": 4, "layers": 2},
        {"n": 64, "t": 128, "vocabulary": 8192, "d": 512, "heads": 8, "layers": 6},
    ),
    Entry(
        "llama",
        "Llama-like",
        llama,
        tokens,
        {"n": 4, "t": 64, "vocabulary": 512, "d": 192, "heads": 6, "groups": 2, "layers": 2},
        {"n": 4, "t": 1024, "vocabulary": 32000, "d": 1024, "heads": 16, "groups": 4, "layers": 16},
    ),
]
