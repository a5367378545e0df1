"""Small models that are exported to ONNX and imported from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import treadle as td
from treadle import nn

Arrays = tuple[np.ndarray, ...]


class Mlp(nn.Module):
    def __init__(self) -> None:
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Any) -> Any:
        return td.softmax(self.layers(x), -1)


class Cnn(nn.Module):
    def __init__(self) -> None:
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2)
        self.head = nn.Linear(6, 3)

    def forward(self, image: Any) -> Any:
        x = td.max_pool(td.relu(self.norm(self.conv1(image))), 2)
        x = td.gelu(self.conv2(x))
        return self.head(td.mean(x, (2, 3)))


class Block(nn.Module):
    """Tokens through an embedding, causal attention and two layers."""

    def __init__(self) -> None:
        self.wte = nn.Embedding(11, 16)
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc, self.back = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens)
        b, t, c = x.shape
        parts = td.chunk(self.qkv(self.ln_1(x)), 3, -1)
        q, k, v = (p.reshape(b, t, 2, c // 2).transpose(1, 2) for p in parts)
        mixed = td.attention(q, k, v, causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        x = x + self.back(td.gelu(self.fc(self.ln_2(x)), approximate="tanh"))
        return x @ td.transpose(self.wte.weight, 0, 1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Any) -> Any:
        out, (h, _) = self.lstm(x)
        return {"scores": self.head(out), "last": h}


class UNet(nn.Module):
    def __init__(self) -> None:
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Any) -> Any:
        a = td.silu(self.norm1(self.down1(x)))
        b = td.silu(self.norm2(self.down2(td.avg_pool(a, 2))))
        wide = td.interpolate(b, scale_factor=2, mode="bilinear")[:, :4]
        return self.last(td.concat([a, self.up(b) + wide], 1))


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Arrays]] = {
    "mlp": (Mlp, (_normal(5, 6),)),
    "cnn": (Cnn, (_normal(3, 2, 9, 9),)),
    "block": (Block, (np.arange(14).reshape(2, 7) % 11,)),
    "lstm": (Lstm, (_normal(2, 6, 4),)),
    "unet": (UNet, (_normal(2, 1, 8, 8),)),
}
