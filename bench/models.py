"""The workloads of the benchmarks, in Treadle and in PyTorch, with the same parameters."""

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
    """A model, what it is fed, and whether gradients are clipped."""

    make: Callable[[], nn.Module]
    make_torch: Callable[[], Any]
    x: tuple[int, ...]
    y: tuple[int, ...]
    classes: int
    tokens: bool = False  # x is tokens rather than numbers
    clip: float | None = None

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


def mlp(*widths: int, gelu: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        if i:
            layers.append(nn.GELU() if gelu else nn.ReLU())
        layers.append(nn.Linear(a, b))
    return nn.Sequential(*layers)


def torch_mlp(*widths: int, gelu: bool = False) -> Any:
    import torch

    layers: list[Any] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        if i:
            layers.append(torch.nn.GELU() if gelu else torch.nn.ReLU())
        layers.append(torch.nn.Linear(a, b))
    return torch.nn.Sequential(*layers)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def torch_cnn() -> Any:
    from torch import nn as tn

    return tn.Sequential(
        tn.Conv2d(1, 32, 3, padding=1), tn.ReLU(), tn.MaxPool2d(2),
        tn.Conv2d(32, 64, 3, padding=1), tn.ReLU(), tn.MaxPool2d(2),
        tn.Flatten(), tn.Linear(3136, 128), tn.ReLU(), tn.Linear(128, 10),
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


def torch_gpt(vocabulary: int, t: int, d: int, heads: int, layers: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn as tn

    class TorchBlock(tn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = tn.LayerNorm(d), tn.LayerNorm(d)
            self.qkv, self.proj = tn.Linear(d, 3 * d), tn.Linear(d, d)
            self.fc, self.out = tn.Linear(d, 4 * d), tn.Linear(4 * d, d)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            parts = self.qkv(self.ln_1(x)).split(d, -1)
            q, k, v = (p.view(b, t, heads, -1).transpose(1, 2) for p in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
            return x + self.out(F.gelu(self.fc(self.ln_2(x))))

    class TorchGPT(tn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = tn.Embedding(vocabulary, d), tn.Embedding(t, d)
            self.blocks = tn.ModuleList(TorchBlock() for _ in range(layers))
            self.ln_f = tn.LayerNorm(d)

        def forward(self, tokens: Any) -> Any:
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return F.linear(self.ln_f(x), self.wte.weight)

    return TorchGPT()


WORKLOADS = {
    "mlp": Workload(
        lambda: mlp(784, 128, 10), lambda: torch_mlp(784, 128, 10), (128, 784), (128,), 10
    ),
    "mlp_wide": Workload(
        lambda: mlp(784, 1024, 1024, 10, gelu=True),
        lambda: torch_mlp(784, 1024, 1024, 10, gelu=True),
        (256, 784),
        (256,),
        10,
    ),
    "cnn": Workload(cnn, torch_cnn, (64, 1, 28, 28), (64,), 10),
    "gpt_nano": Workload(
        lambda: GPT(65, 64, 128, 4, 4),
        lambda: torch_gpt(65, 64, 128, 4, 4),
        (12, 64),
        (12, 64),
        65,
        True,
        1.0,
    ),
    "gpt_char": Workload(
        lambda: GPT(65, 256, 384, 6, 6),
        lambda: torch_gpt(65, 256, 384, 6, 6),
        (4, 256),
        (4, 256),
        65,
        True,
        1.0,
    ),
}
