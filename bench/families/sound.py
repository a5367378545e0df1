"""Sound: dilated causal convolutions, and blocks of attention and convolution."""

from __future__ import annotations

from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats
from families.transformers import layers_of


def wavenet(s: Any, levels: int, d: int, skip: int, dilations: Any, **others: int) -> Any:
    """WaveNet: causal convolutions with gates, twice as far back in each layer."""
    nn = s.nn

    class Layer(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.dilation = dilation
            self.conv = nn.Conv1d(d, 2 * d, 2, dilation=dilation)
            self.out, self.skip = nn.Conv1d(d, d, 1), nn.Conv1d(d, skip, 1)

        def forward(self, x: Any) -> tuple[Any, Any]:
            value, gate = self.conv(s.pad_left(x, self.dilation)).chunk(2, 1)
            y = s.tanh(value) * s.sigmoid(gate)
            return x + self.out(y), self.skip(y)

    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(levels, d)
            self.layers = nn.ModuleList([Layer(dilation) for dilation in dilations])
            self.conv1, self.conv2 = nn.Conv1d(skip, skip, 1), nn.Conv1d(skip, levels, 1)

        def forward(self, batch: Any) -> Any:
            x = self.wte(batch["x"]).transpose(1, 2)  # (N, d, T)
            total = 0.0
            for layer in self.layers:
                x, beside = layer(x)
                total = total + beside
            logits = self.conv2(s.relu(self.conv1(s.relu(total))))
            return s.pixel_cross_entropy(logits, batch["y"])

    return WaveNet()


def samples(rng: np.random.Generator, n: int, t: int, levels: int, **others: Any) -> Arrays:
    return {"x": classes(rng, levels, n, t), "y": classes(rng, levels, n, t)}


def conformer(
    s: Any, mels: int, d: int, heads: int, kernel: int, layers: int, count: int, **others: int
) -> Any:
    """Conformer: half a feed-forward layer, attention, a depthwise convolution, the other half."""
    nn = s.nn
    Attention, _, _ = layers_of(s, d, heads)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc, self.out = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(self, x: Any) -> Any:
            return x + self.out(s.silu(self.fc(self.norm(x)))) * 0.5

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.into = nn.LayerNorm(d), nn.Conv1d(d, 2 * d, 1)
            self.depthwise = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d)
            self.batch_norm, self.out = nn.BatchNorm1d(d), nn.Conv1d(d, d, 1)

        def forward(self, x: Any) -> Any:  # (N, T, d)
            y = s.glu(self.into(self.norm(x).transpose(1, 2)), 1)
            y = self.out(s.silu(self.batch_norm(self.depthwise(y))))
            return x + y.transpose(1, 2)

    class Conformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(mels, d)
            kinds = (Half, Attention, Convolution, Half)
            blocks = [[*(kind() for kind in kinds), nn.LayerNorm(d)] for _ in range(layers)]
            self.blocks = nn.Sequential(*(part for block in blocks for part in block))
            self.head = nn.Linear(d, count)

        def forward(self, batch: Any) -> Any:
            return s.cross_entropy(self.head(self.blocks(self.into(batch["x"]))), batch["y"])

    return Conformer()


def frames(
    rng: np.random.Generator, n: int, t: int, mels: int, count: int, **others: int
) -> Arrays:
    return {"x": floats(rng, n, t, mels), "y": classes(rng, count, n, t)}


ENTRIES = [
    Entry(
        "wavenet",
        "WaveNet, dilated causal convolutions",
        wavenet,
        samples,
        {"n": 4, "t": 256, "levels": 64, "d": 32, "skip": 64, "dilations": (1, 2, 4, 8, 16, 32)},
        {"n": 8, "t": 4096, "levels": 256, "d": 128, "skip": 256,
         "dilations": tuple(1 << i for i in range(10)) * 2},
    ),
    Entry(
        "conformer",
        "Conformer",
        conformer,
        frames,
        {"n": 4, "t": 64, "mels": 40, "d": 96, "heads": 4, "kernel": 15, "layers": 2, "count": 32},
        {"n": 16, "t": 512, "mels": 80, "d": 512, "heads": 8, "kernel": 31, "layers": 8,
         "count": 256},
    ),
]  # fmt: skip
