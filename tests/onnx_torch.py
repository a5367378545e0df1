"""PyTorch's own models of the kinds that `onnx_models` has, and what its exporter makes of them."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 16)
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc, self.back = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens)
        b, t, c = x.shape
        q, k, v = (
            p.reshape(b, t, 2, 8).transpose(1, 2) for p in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        x = x + self.back(nn.functional.gelu(self.fc(self.ln_2(x))))
        return x @ self.wte.weight.T


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Any) -> Any:
        out, (h, _) = self.lstm(x)
        return self.head(out), h


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Any) -> Any:
        a = nn.functional.silu(self.norm1(self.down1(x)))
        b = nn.functional.silu(self.norm2(self.down2(nn.functional.avg_pool2d(a, 2))))
        wide = nn.functional.interpolate(b, scale_factor=2, mode="bilinear")[:, :4]
        return self.last(torch.cat([a, self.up(b) + wide], 1))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(-1))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def _gru() -> nn.Module:
    return nn.GRU(4, 5, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, (5, 6)),
    "cnn": (_cnn, (3, 2, 9, 9)),
    "block": (Block, (2, 7)),
    "lstm": (Lstm, (2, 6, 4)),
    "gru": (_gru, (2, 6, 4)),
    "unet": (UNet, (2, 1, 8, 8)),
}


def exported(name: str, **options: Any) -> tuple[nn.Module, bytes, np.ndarray, list[np.ndarray]]:
    """A model, its ONNX file, an input and the outputs for it."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randint(0, 11, shape) if name == "block" else torch.randn(shape)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        options = {"dynamo": True, "verbose": False, **options}
        data = torch.onnx.export(model, (x,), **options).model_proto.SerializeToString()
    with torch.no_grad():
        found = model(x)
    outputs = found if isinstance(found, tuple) else (found,)
    return model, data, x.numpy(), [o.numpy() for o in outputs]
