"""The workloads of the benchmarks and their models in Treadle; `peers.py` has the peers' models.

An architecture is a name and its sizes. Parameters have the same names and shapes as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn


@dataclass(frozen=True)
class Workload:
    """An architecture, what it is fed, and whether gradients are clipped."""

    title: str
    architecture: str
    sizes: tuple[int, ...]
    x: tuple[int, ...]
    y: tuple[int, ...]
    classes: int
    tokens: bool = False  # x is tokens rather than numbers
    clip: float | None = None

    def make(self) -> nn.Module:
        return ARCHITECTURES[self.architecture](*self.sizes)

    def specs(self) -> dict[str, td.Spec]:
        return {
            "x": td.Spec(self.x, td.int32 if self.tokens else td.float32),
            "y": td.Spec(self.y, td.int32),
        }

    def batch(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        y = rng.integers(0, self.classes, self.y).astype(np.int32)
        if self.tokens:
            return {"x": rng.integers(0, self.classes, self.x).astype(np.int32), "y": y}
        return {"x": rng.standard_normal(self.x).astype(np.float32), "y": y}


def loss(model: Any, batch: Any) -> Any:
    return losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)


def mlp(activation: Callable[[], nn.Module], *widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        if i:
            layers.append(activation())
        layers.append(nn.Linear(a, b))
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, d: int, heads: int):
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        parts = td.chunk(self.qkv(self.ln_1(x)), 3, -1)
        q, k, v = (p.reshape(b, t, self.heads, -1).permute(0, 2, 1, 3) for p in parts)
        mixed = td.attention(q, k, v, causal=True).permute(0, 2, 1, 3).reshape(b, t, d)
        x = x + self.proj(mixed)
        return x + self.out(td.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, t: int, d: int, heads: int, layers: int):
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(td.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return td.linear(self.ln_f(x), self.wte.weight)


class GroupedAttention(nn.Module):
    """Rotated queries and keys; several queries share a key and value."""

    def __init__(self, d: int, heads: int, groups: int):
        self.heads, self.groups, self.size = heads, groups, d // heads
        self.qkv = nn.Linear(d, (heads + 2 * groups) * self.size, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.rotate = nn.RotaryEmbedding(self.size, 100000.0)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        width, narrow = self.heads * self.size, self.groups * self.size
        parts = td.split(self.qkv(x), [width, narrow, narrow], -1)
        q, k, v = (p.reshape(b, t, -1, self.size).permute(0, 2, 1, 3) for p in parts)
        mixed = td.attention(self.rotate(q), self.rotate(k), v, causal=True)
        return self.proj(mixed.permute(0, 2, 1, 3).reshape(b, t, d))


class LlamaBlock(nn.Module):
    def __init__(self, d: int, heads: int, groups: int, hidden: int):
        self.norm_1, self.norm_2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.attention = GroupedAttention(d, heads, groups)
        self.mlp = nn.SwiGLU(d, hidden)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """A decoder as Llama's, its table used for the output too: SmolLM2."""

    def __init__(self, vocabulary: int, d: int, heads: int, groups: int, hidden: int, layers: int):
        self.wte = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(LlamaBlock(d, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(d, eps=1e-5)

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return td.linear(self.norm(x), self.wte.weight)


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions; the one of 3 × 3 has the stride."""

    def __init__(self, channels: int, width: int, stride: int):
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Any) -> Any:
        y = td.relu(self.bn1(self.conv1(x)))
        y = td.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return td.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, classes: int, *counts: int):
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1, self.pool = nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, padding=1)
        layers, channels = [], 64
        for i, count in enumerate(counts):
            width, blocks = 64 << i, []
            for k in range(count):
                blocks.append(Bottleneck(channels, width, 2 if i and not k else 1))
                channels = 4 * width
            layers.append(nn.Sequential(*blocks))
        self.layers = nn.ModuleList(layers)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        x = self.pool(td.relu(self.bn1(self.conv1(x))))
        for layer in self.layers:
            x = layer(x)
        return self.fc(td.mean(x, (2, 3)))


class Recurrent(nn.Module):
    """An LSTM over tokens (T, N) that predicts a class at every step."""

    def __init__(self, vocabulary: int, d: int, layers: int):
        self.wte = nn.Embedding(vocabulary, d)
        self.lstm = nn.LSTM(d, d, layers)
        self.head = nn.Linear(d, vocabulary)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.lstm(self.wte(tokens))[0])


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "mlp": lambda *widths: mlp(nn.ReLU, *widths),
    "mlp_gelu": lambda *widths: mlp(nn.GELU, *widths),
    "cnn": cnn,
    "gpt": GPT,
    "llama": Llama,
    "resnet": ResNet,
    "lstm": Recurrent,
}

WORKLOADS = {
    "mlp": Workload(
        "MLP 784-128-10, batch 128", "mlp", (784, 128, 10), (128, 784), (128,), 10
    ),
    "mlp_wide": Workload(
        "MLP 784-1024-1024-10 gelu, batch 256",
        "mlp_gelu", (784, 1024, 1024, 10), (256, 784), (256,), 10,
    ),
    "cnn": Workload("CNN 28×28, batch 64", "cnn", (), (64, 1, 28, 28), (64,), 10),
    "gpt_nano": Workload(
        "GPT 4 layers, width 128, context 64, batch 12",
        "gpt", (65, 64, 128, 4, 4), (12, 64), (12, 64), 65, True, 1.0,
    ),
    "gpt_char": Workload(
        "GPT 6 layers, width 384, context 256, batch 4",
        "gpt", (65, 256, 384, 6, 6), (4, 256), (4, 256), 65, True, 1.0,
    ),
    "gpt_6x384": Workload(
        "GPT 6 layers, width 384, context 256, batch 32, vocabulary 50304",
        "gpt", (50304, 256, 384, 6, 6), (32, 256), (32, 256), 50304, True, 1.0,
    ),
    "gpt2_b4": Workload(
        "GPT-2 124M, context 1024, batch 4",
        "gpt", (50304, 1024, 768, 12, 12), (4, 1024), (4, 1024), 50304, True, 1.0,
    ),
    "gpt2_b32": Workload(
        "GPT-2 124M, context 1024, batch 32",
        "gpt", (50304, 1024, 768, 12, 12), (32, 1024), (32, 1024), 50304, True, 1.0,
    ),
    "gpt_xl": Workload(
        "GPT 1.5B, context 1024, batch 8",
        "gpt", (50304, 1024, 1600, 25, 48), (8, 1024), (8, 1024), 50304, True, 1.0,
    ),
    "smollm2": Workload(
        "SmolLM2-135M, context 1024, batch 8",
        "llama", (49152, 576, 9, 3, 1536, 30), (8, 1024), (8, 1024), 49152, True, 1.0,
    ),
    "resnet50": Workload(
        "ResNet-50, 224×224, batch 64",
        "resnet", (1000, 3, 4, 6, 3), (64, 3, 224, 224), (64,), 1000,
    ),
    "lstm": Workload(
        "LSTM 2 layers, width 256, 64 steps, batch 32",
        "lstm", (65, 256, 2), (64, 32), (64, 32), 65, True,
    ),
}  # fmt: skip

FOR_GPUS = frozenset(
    ["gpt_6x384", "gpt2_b4", "gpt2_b32", "gpt_xl", "smollm2", "resnet50"]
)  # too large for a few processors
