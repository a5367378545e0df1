"""Small models of four kinds with their optimizers: what the tests train, beside whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import treadle as td
from treadle import losses, nn, optim


class MLP(nn.Module):
    def __init__(self) -> None:
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(td.gelu(self.fc1(x)))


class CNN(nn.Module):
    def __init__(self) -> None:
        self.conv, self.bn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 9, 3)

    def forward(self, x):
        h = td.max_pool(td.relu(self.bn(self.conv(x))), 2)
        return self.fc(td.flatten(h, 1))


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        self.ln_1, self.attn = nn.LayerNorm(d), nn.MultiHeadAttention(d, heads, batch_first=True)
        self.ln_2, self.fc, self.out = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x), causal=True)
        return x + self.out(td.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 11, d: int = 8, t: int = 6, layers: int = 2) -> None:
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
        self.blocks = nn.ModuleList(Block(d, 2) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(td.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return td.linear(self.ln_f(x), self.wte.weight)


class Tagger(nn.Module):
    def __init__(self) -> None:
        self.lstm, self.fc = nn.LSTM(5, 7, num_layers=2), nn.Linear(7, 3)

    def forward(self, x):
        return self.fc(self.lstm(x)[0])


@dataclass(frozen=True)
class Trajectory:
    """A model, the shapes of its batches (x are tokens where it has no shape) and an optimizer."""

    model: Callable[[], nn.Module]
    x: tuple[int, ...] | None
    y: tuple[int, ...]
    classes: int
    optimizer: Callable[[], optim.Optimizer]
    clip: float | None = None

    def compiled(self, device: str, **options: object) -> td.TrainStep:
        """A step of it on a device."""
        x = td.Spec(self.y, td.int32) if self.x is None else td.Spec(self.x)
        return td.compile_step(
            self.model(),
            lambda model, b: losses.cross_entropy(model(b["x"]), b["y"], axis=-1),
            self.optimizer(),
            {"x": x, "y": td.Spec(self.y, td.int32)},
            clip_norm=self.clip,
            device=device,
            options=td.CompileOptions(**options),
        )

    def batches(self, count: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        for _ in range(count):
            tokens = rng.integers(0, self.classes, self.y).astype(np.int32)
            x = tokens if self.x is None else rng.normal(size=self.x).astype(np.float32)
            yield {"x": x, "y": rng.integers(0, self.classes, self.y).astype(np.int32)}


TRAJECTORIES = {
    "mlp-adamw": Trajectory(MLP, (8, 6), (8,), 4, lambda: optim.adamw(1e-2)),
    "cnn-batchnorm-sgd": Trajectory(
        CNN,
        (6, 1, 6, 6),
        (6,),
        3,
        lambda: optim.sgd(0.05, momentum=0.9, weight_decay=1e-3),
    ),
    "gpt-adamw-clip-warmup": Trajectory(
        GPT,
        None,
        (3, 6),
        11,
        lambda: optim.adamw(optim.warmup_cosine(1e-2, 5, 40), weight_decay=0.1),
        0.5,
    ),
    "lstm-adam": Trajectory(Tagger, (4, 3, 5), (4, 3), 3, lambda: optim.adam(1e-2)),
}
