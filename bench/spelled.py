"""What there are several ways to write: attention, norms, losses, convolutions, recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from spelled_pools import (
    MAXIMA,
    MEANS,
    OF_HALVES,
    OF_NEIGHBOURS,
    Pool,
    Pooled,
    halves,
    max_by_function,
    mean_by_function,
    neighbours,
    rotating,
)

import treadle as td
from treadle import losses, nn

# --- attention, norms, activations and losses, each in several spellings ----------------------


def causal(t: int) -> td.Tensor:
    return td.iota((t, t), 1) <= td.iota((t, t), 0)


def softmax_by_hand(s: td.Tensor) -> td.Tensor:
    e = td.exp(s - td.max(s, -1, keepdims=True))
    return e / td.sum(e, -1, keepdims=True)


def by_composite(q, k, v):
    return td.attention(q, k, v, causal=True)


def by_where(q, k, v):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return td.softmax(td.where(causal(q.shape[2]), s, -math.inf), -1) @ v


def by_number(q, k, v):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return td.softmax(td.where(causal(q.shape[2]), s, -1e9), -1) @ v


def by_sum(q, k, v):
    t = q.shape[2]
    hidden = (1 - td.tril(td.ones((t, t)))) * -1e9
    return td.softmax((q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2) + hidden, -1) @ v


def by_exp(q, k, v):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return softmax_by_hand(td.where(causal(q.shape[2]), s, -math.inf)) @ v


def by_einsum(q, k, v):
    s = td.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    weights = td.softmax(td.where(~causal(q.shape[2]), -math.inf, s), -1)
    return td.einsum("bhqk,bhkd->bhqd", weights, v)


def by_rows(q, k, v):
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    s = td.einsum("nqd,nkd->nqk", q, k) * (1 / math.sqrt(d))
    weights = td.softmax(td.where(causal(t), s.reshape(b, h, t, t), -math.inf), -1)
    return td.einsum("nqk,nkd->nqd", weights.reshape(b * h, t, t), v).reshape(b, h, t, d)


ATTENTIONS = (by_where, by_number, by_sum, by_exp, by_einsum, by_rows)


def gelu_by_hand(x):
    return 0.5 * x * (1 + td.erf(x / math.sqrt(2)))


class NormByHand(nn.Module):
    def __init__(self, width: int):
        self.weight = nn.Parameter((width,), nn.init.ones)
        self.bias = nn.Parameter((width,), nn.init.zeros)

    def forward(self, x):
        mean = td.mean(x, -1, keepdims=True)
        var = td.mean(x * x, -1, keepdims=True) - mean * mean
        return (x - mean) / td.sqrt(var + 1e-5) * self.weight + self.bias


class RootMeanSquareByHand(nn.Module):
    def __init__(self, width: int):
        self.weight = nn.Parameter((width,), nn.init.ones)

    def forward(self, x):
        return x / td.sqrt(td.mean(x * x, -1, keepdims=True) + 1e-5) * self.weight


class GatedByHand(nn.Module):
    def __init__(self, width: int, hidden: int):
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate / (1 + td.exp(-gate)) * self.up(x))


class Gated(GatedByHand):
    def forward(self, x):
        return self.down(td.silu(self.gate(x)) * self.up(x))


def by_loss(z, y):
    return losses.cross_entropy(z, y, axis=-1)


def by_log_of_softmax(z, y):
    return -td.mean(td.take_along_axis(td.log(td.softmax(z, -1)), y.unsqueeze(-1), -1))


def by_log_softmax(z, y):
    return -td.mean(td.take_along_axis(td.log_softmax(z, -1), y.unsqueeze(-1), -1))


def by_one_hot(z, y):
    return -td.mean(td.sum(td.log_softmax(z, -1) * td.one_hot(y, z.shape[-1]), -1))


def by_probabilities(z, y):
    chosen = td.take_along_axis(softmax_by_hand(z), y.unsqueeze(-1), -1)
    return -td.mean(td.log(chosen))


LOSSES = (by_log_of_softmax, by_log_softmax, by_one_hot, by_probabilities)


# --- models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """How each part of a transformer is spelled."""

    attention: Callable[..., Any] = by_composite
    norm: Callable[[int], nn.Module] = nn.LayerNorm
    feed: Callable[[int, int], nn.Module] | None = None
    gelu: Callable[..., Any] = td.gelu
    loss: Callable[..., Any] = by_loss


class Block(nn.Module):
    def __init__(self, width: int, heads: int, parts: Parts):
        self.heads, self.parts = heads, parts
        self.ln_1, self.ln_2 = parts.norm(width), parts.norm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if parts.feed is not None:
            self.feed = parts.feed(width, 2 * width)
        else:
            self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        apart = td.chunk(self.qkv(self.ln_1(x)), 3, -1)
        q, k, v = (p.reshape(b, t, self.heads, -1).permute(0, 2, 1, 3) for p in apart)
        mixed = self.parts.attention(q, k, v)
        x = x + self.proj(mixed.permute(0, 2, 1, 3).reshape(b, t, d))
        h = self.ln_2(x)
        if self.parts.feed is not None:
            return x + self.feed(h)
        return x + self.out(self.parts.gelu(self.fc(h)))


class Transformer(nn.Module):
    def __init__(self, sizes: tuple[int, ...], parts: Parts):
        classes, length, width, heads, layers = sizes
        self.wte, self.wpe = nn.Embedding(classes, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, parts) for _ in range(layers))
        self.norm = parts.norm(width)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(td.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return td.linear(self.norm(x), self.wte.weight)


class ConvByHand(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        self.weight = nn.Parameter((outputs, inputs, 3, 3), nn.init.uniform(-0.1, 0.1))
        self.bias = nn.Parameter((outputs,), nn.init.zeros)

    def forward(self, x):
        return self.product(x) + self.bias.reshape(1, -1, 1, 1)

    def product(self, x):
        return td.conv(x, self.weight, padding=1)


class ConvByUnfold(ConvByHand):
    def product(self, x):
        n, c, h, w = x.shape
        padded = td.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        parts = [padded[:, :, i : i + h, j : j + w] for i in range(3) for j in range(3)]
        columns = td.stack(parts, 2).reshape(n, c * 9, h * w)
        return (self.weight.reshape(-1, c * 9) @ columns).reshape(n, -1, h, w)


class ConvByShifts(ConvByHand):
    def product(self, x):
        _, _, h, w = x.shape
        padded = td.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        total = None
        for i in range(3):
            for j in range(3):
                part = padded[:, :, i : i + h, j : j + w]
                term = td.einsum("nchw,oc->nohw", part, self.weight[:, :, i, j])
                total = term if total is None else total + term
        return total


def images(conv: type[ConvByHand]) -> nn.Module:
    return nn.Sequential(
        conv(1, 32), nn.ReLU(), nn.MaxPool2d(2), conv(32, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Recurrent(nn.Module):
    """An LSTM whose cell is written out: run by a scan, or unrolled."""

    def __init__(self, classes: int, width: int, is_unrolled: bool):
        self.wte, self.width, self.is_unrolled = nn.Embedding(classes, width), width, is_unrolled
        self.of_x, self.of_h = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, classes)

    def cell(self, carry, x):
        h, c = carry
        i, f, g, o = td.chunk(self.of_x(x) + self.of_h(h), 4, -1)
        c = td.sigmoid(f) * c + td.sigmoid(i) * td.tanh(g)
        h = td.sigmoid(o) * td.tanh(c)
        return (h, c), h

    def forward(self, tokens):
        x = self.wte(tokens)
        zero = td.zeros((x.shape[1], self.width))
        if not self.is_unrolled:
            return self.head(td.scan(self.cell, (zero, zero), x)[1])
        carry, out = (zero, zero), []
        for t in range(x.shape[0]):
            carry, h = self.cell(carry, x[t])
            out.append(h)
        return self.head(td.stack(out))


# --- cases -------------------------------------------------------------------------------------

Step = tuple[nn.Module, Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """A composite's step and the same by hand, over one batch."""

    name: str
    base: str  # cases of one base have the same composite's step
    composite: Callable[[], Step]
    by_hand: Callable[[], Step]
    batch: dict[str, np.ndarray]
    least: float = 0.97


def transformer(sizes: tuple[int, ...], parts: Parts) -> Step:
    def loss(model, batch):
        return parts.loss(model(batch["x"]), batch["y"])

    return Transformer(sizes, parts), loss


def classified(make: Callable[[], nn.Module]) -> Step:
    return make(), lambda model, batch: losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)


def tokens(shape: tuple[int, ...], classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.integers(0, classes, shape).astype(np.int32) for n in ("x", "y")}


def cases(device: str) -> list[Case]:
    is_gpu = device == "cuda"
    sizes = (8192, 1024, 768, 12, 2) if is_gpu else (65, 256, 192, 6, 2)
    batch = tokens((8, 1024) if is_gpu else (4, 256), sizes[0])
    found: list[Case] = []

    def add(name: str, by_hand: Parts, composite: Parts | None = None) -> None:
        parts = composite or Parts()
        makers = (lambda: transformer(sizes, parts)), (lambda: transformer(sizes, by_hand))
        found.append(Case(name, "gated" if composite else "plain", *makers, batch))

    for attention in ATTENTIONS:
        add(f"attention {attention.__name__}", Parts(attention))
    for loss in LOSSES:
        add(f"cross-entropy {loss.__name__}", Parts(loss=loss))
    add("layer norm", Parts(norm=NormByHand))
    of_rms = Parts(norm=lambda d: nn.RMSNorm(d, eps=1e-5), feed=Gated)
    add("rms norm", Parts(norm=RootMeanSquareByHand, feed=Gated), of_rms)
    add("SwiGLU", Parts(norm=of_rms.norm, feed=GatedByHand), of_rms)
    add("gelu", Parts(gelu=gelu_by_hand))
    add("all together", Parts(by_number, NormByHand, None, gelu_by_hand, by_log_of_softmax))
    return [*found, *_longer(device), *_rotated(sizes, batch), *_pooled(device)]


def _rotated(sizes: tuple[int, ...], batch: dict[str, np.ndarray]) -> list[Case]:
    def of(rotate: Callable[..., Any]) -> Callable[[], Step]:
        return lambda: transformer(sizes, Parts(rotating(rotate)))

    families = ((halves, OF_HALVES), (neighbours, OF_NEIGHBOURS))
    return [
        Case(f"rotation {r.__name__}", base.__name__, of(base), of(r), batch)
        for base, others in families
        for r in others
    ]


def _pooled(device: str) -> list[Case]:
    def of(pool: Pool) -> Callable[[], Step]:
        return lambda: classified(lambda: Pooled(pool))

    families = ((max_by_function, MAXIMA), (mean_by_function, MEANS))
    return [
        Case(f"pool {pool.__name__}", base.__name__, of(base), of(pool), digits(device))
        for base, others in families
        for pool in others
    ]


def digits(device: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    n = 256 if device == "cuda" else 64
    return {
        "x": rng.normal(size=(n, 1, 28, 28)).astype(np.float32),
        "y": rng.integers(0, 10, (n,)).astype(np.int32),
    }


def _longer(device: str) -> list[Case]:
    length, width = (64, 512) if device == "cuda" else (32, 256)
    text = tokens((length, 32), 65)
    long = (65, 1024, 192, 6, 1)

    def of(conv: type[ConvByHand]) -> Callable[[], Step]:
        return lambda: classified(lambda: images(conv))

    def lstm(is_unrolled: bool) -> Callable[[], Step]:
        return lambda: classified(lambda: Recurrent(65, width, is_unrolled))

    found = [
        Case("conv by unfold", "conv", of(ConvByHand), of(ConvByUnfold), digits(device)),
        Case("conv by shifts", "conv", of(ConvByHand), of(ConvByShifts), digits(device), 0.95),
        Case("LSTM unrolled", "scan", lstm(False), lstm(True), text, 0.95),
    ]
    if device == "cpu":
        makers = [lambda a=a: transformer(long, Parts(a)) for a in (by_composite, by_where)]
        found.append(Case("attention of 1024", "long", *makers, tokens((1, 1024), 65)))
    return found
