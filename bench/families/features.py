"""Vectors of features: tables of categories, coordinates of rays, a narrow middle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats


def layers_of(s: Any, sizes: tuple[int, ...]) -> Any:
    """Linear layers with ReLU after each."""
    pairs = itertools.pairwise(sizes)
    return s.nn.Sequential(*(part for a, b in pairs for part in (s.nn.Linear(a, b), s.nn.ReLU())))


def dlrm(
    s: Any, tables: int, rows: int, d: int, numbers: int, bottom: Any, top: Any, **others: int
) -> Any:
    """DLRM: categories in large tables, products of all pairs of vectors."""
    nn, count = s.nn, tables + 1
    pairs = np.flatnonzero(np.tril(np.ones((count, count)), -1)).astype(np.int32)

    class DLRM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(rows, d) for _ in range(tables)])
            self.bottom = layers_of(s, (numbers, *bottom, d))
            self.top = layers_of(s, (d + len(pairs), *top))
            self.last, self.pairs = nn.Linear(top[-1], 1), s.constant(pairs)

        def forward(self, batch: Any) -> Any:
            x = self.bottom(batch["numbers"])
            found = [table(batch["categories"][:, i]) for i, table in enumerate(self.tables)]
            vectors = s.stack([x, *found], 1)  # (N, count, d)
            products = s.einsum("nid,njd->nij", vectors, vectors)
            chosen = s.take(products.reshape(x.shape[0], -1), self.pairs, 1)
            logits = self.last(self.top(s.cat([x, chosen], 1)))[:, 0]
            return s.bce_with_logits(logits, batch["y"])

    return DLRM()


def clicks(
    rng: np.random.Generator, n: int, tables: int, rows: int, numbers: int, **others: Any
) -> Arrays:
    return {
        "numbers": floats(rng, n, numbers),
        "categories": classes(rng, rows, n, tables),
        "y": (rng.random(n) < 0.3).astype(np.float32),
    }


def nerf(s: Any, samples: int, width: int, depth: int, frequencies: int, **others: int) -> Any:
    """NeRF: points along rays by their sines, colours by how much light comes through."""
    nn, wide = s.nn, 3 + 6 * frequencies

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs = [wide, *[width] * (depth - 1)]
            inputs[depth // 2] += wide  # the encoding once more, in the middle
            self.layers = nn.ModuleList([nn.Linear(i, width) for i in inputs])
            self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)
            self.rates = s.constant((2.0 ** np.arange(frequencies)).astype(np.float32))

        def encoded(self, points: Any) -> Any:
            n = points.shape[0]
            angles = (points[:, :, :, None] * self.rates).reshape(n, samples, 3 * frequencies)
            return s.cat([points, s.sin(angles), s.cos(angles)], -1)

        def forward(self, batch: Any) -> Any:
            depths = batch["depths"]  # (N, samples)
            points = batch["origin"][:, None] + batch["direction"][:, None] * depths[:, :, None]
            x = encoding = self.encoded(points)
            for i, layer in enumerate(self.layers):
                x = s.relu(layer(s.cat([x, encoding], -1) if i == depth // 2 else x))
            density = s.softplus(self.density(x))[:, :, 0]
            passes = s.exp(-density * batch["steps"])  # of the light, through each part
            before = s.cat([passes[:, :1] * 0 + 1, passes[:, :-1]], 1)
            weights = s.cumprod(before, 1) * (1 - passes)
            found = (weights[:, :, None] * s.sigmoid(self.colour(x))).sum(1)
            return s.mse(found, batch["y"])

    return Field()


def rays(rng: np.random.Generator, n: int, samples: int, **others: int) -> Arrays:
    direction = floats(rng, n, 3)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    steps = rng.uniform(0.5, 1.5, (n, samples)).astype(np.float32) / samples
    return {
        "origin": floats(rng, n, 3),
        "direction": direction,
        "depths": np.cumsum(steps, 1, dtype=np.float32),
        "steps": steps,
        "y": rng.uniform(0, 1, (n, 3)).astype(np.float32),
    }


def autoencoder(s: Any, sizes: Any, **others: int) -> Any:
    """A denoising autoencoder: to a narrow middle and back."""
    nn = s.nn

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = layers_of(s, sizes)
            self.decoder = layers_of(s, tuple(reversed(sizes[1:])))
            self.last = nn.Linear(sizes[1], sizes[0])

        def forward(self, batch: Any) -> Any:
            found = self.last(self.decoder(self.encoder(batch["x"] + batch["noise"])))
            return s.mse(s.sigmoid(found), batch["x"])

    return Autoencoder()


def noisy(rng: np.random.Generator, n: int, sizes: Any, **others: int) -> Arrays:
    x = rng.uniform(0, 1, (n, sizes[0])).astype(np.float32)
    return {"x": x, "noise": floats(rng, n, sizes[0]) * np.float32(0.2)}


ENTRIES = [
    Entry(
        "dlrm",
        "DLRM, large embeddings",
        dlrm,
        clicks,
        {"n": 256, "tables": 8, "rows": 10000, "d": 16, "numbers": 13, "bottom": (64, 32),
         "top": (64, 32)},
        {"n": 4096, "tables": 26, "rows": 50000, "d": 64, "numbers": 13, "bottom": (512, 256),
         "top": (512, 256)},
    ),
    Entry(
        "nerf",
        "NeRF, volume rendering",
        nerf,
        rays,
        {"n": 64, "samples": 32, "width": 64, "depth": 4, "frequencies": 6},
        {"n": 4096, "samples": 64, "width": 256, "depth": 8, "frequencies": 6},
    ),
    Entry(
        "autoencoder",
        "denoising autoencoder",
        autoencoder,
        noisy,
        {"n": 128, "sizes": (784, 256, 64, 16)},
        {"n": 4096, "sizes": (3072, 2048, 512, 64)},
    ),
]  # fmt: skip
