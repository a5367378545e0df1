"""`treadle bench`: how fast small steps are on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn, optim

Batch = dict[str, np.ndarray]
WARM = 3  # steps before any is measured


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the shape of what it is fed."""

    title: str
    make: Callable[[], nn.Module]
    x: tuple[int, ...]
    classes: int
    is_tokens: bool = False

    def batch(self) -> Batch:
        rng = np.random.default_rng(0)
        shape = self.x if self.is_tokens else self.x[:1]
        y = rng.integers(0, self.classes, shape).astype(np.int32)
        if self.is_tokens:
            return {"x": rng.integers(0, self.classes, self.x).astype(np.int32), "y": y}
        return {"x": rng.standard_normal(self.x).astype(np.float32), "y": y}

    @property
    def units(self) -> int:
        """Samples of a batch, or tokens."""
        return int(np.prod(self.x)) if self.is_tokens else self.x[0]


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what it is given."""

    def __init__(self, width: int, heads: int) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiHeadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: td.Tensor) -> td.Tensor:
        x = x + self.attention(self.norm1(x), causal=True)
        return x + self.down(td.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens to scores of the next one."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: td.Tensor) -> td.Tensor:
        x = self.tokens(tokens) + self.places(td.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores: td.Tensor = self.head(self.norm(x))
        return scores


WORKLOADS = {
    "mlp": Workload("MLP 784-128-10, batch 128", lambda: mlp(784, 128, 10), (128, 784), 10),
    "cnn": Workload("CNN on 28 x 28, batch 64", cnn, (64, 1, 28, 28), 10),
    "transformer": Workload(
        "transformer, 2 layers of width 128, 16 rows of 64 tokens",
        lambda: Transformer(96, 64, 128, 4, 2), (16, 64), 96, True,
    ),
}  # fmt: skip


def loss(model: nn.Module, batch: dict[str, td.Tensor]) -> td.Tensor | td.Mean:
    return losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one workload."""

    workload: str
    parameters: int
    first: float  # seconds from nothing to the first result
    steps: np.ndarray  # seconds each

    def quantile(self, share: float) -> float:
        """Milliseconds."""
        return 1e3 * float(np.quantile(self.steps, share))


def measure(name: str, device: str, seconds: float) -> Measured:
    """Train a workload with AdamW for some seconds; every step is timed."""
    work = WORKLOADS[name]
    batch = work.batch()
    start = time.perf_counter()
    step = td.compile_step(work.make(), loss, optim.adamw(1e-3), batch, device=device)
    step(batch)
    first = time.perf_counter() - start
    for _ in range(WARM):
        step(batch)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        before = time.perf_counter()
        step(batch)
        found.append(time.perf_counter() - before)
    return Measured(name, step.report.parameters, first, np.array(found))


def run_bench(
    names: Sequence[str] = (), device: str = "auto", seconds: float = 2.0, as_json: bool = False
) -> int:
    """Measure the workloads, all if none is named, and print a table or JSON."""
    rows: list[dict[str, Any]] = []
    for name in names or WORKLOADS:
        work, found = WORKLOADS[name], measure(name, device, seconds)
        rows.append(
            {
                "workload": name,
                "title": work.title,
                "parameters": found.parameters,
                "first_s": found.first,
                "ms": found.quantile(0.5),
                "quartiles_ms": [found.quantile(0.25), found.quantile(0.75)],
                "per_second": work.units / float(np.median(found.steps)),
                "unit": "tokens" if work.is_tokens else "samples",
                "steps": len(found.steps),
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    titles = ["workload", "parameters", "first step", "ms a step", "quartiles", "a second"]
    lines = [titles, *(_row(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip())
    print("Training steps: forward, backward and AdamW. The first step compiles, or finds what was")
    print("compiled before in the plan cache. Other programs that run make steps slower.")
    return 0


def _row(row: dict[str, Any]) -> list[str]:
    low, high = row["quartiles_ms"]
    return [
        row["title"],
        f"{row['parameters']:,}",
        f"{row['first_s']:.2f} s",
        f"{row['ms']:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{row['per_second']:,.0f} {row['unit']}",
    ]
