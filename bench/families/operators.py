"""Operators between functions: convolutions by their spectrum."""

from __future__ import annotations

from typing import Any

import numpy as np

from families.entry import Arrays, Entry, floats


def fno(s: Any, width: int, layers: int, modes: int, **others: int) -> Any:
    """A Fourier neural operator: the lowest frequencies of an image are mixed by weights."""
    nn = s.nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = s.parameter(width, width, 2 * modes, modes, 2, spread=1 / width)
            self.beside = nn.Conv2d(width, width, 1)

        def forward(self, x: Any) -> Any:
            return s.gelu(s.spectral_convolution(x, self.weight) + self.beside(x))

    class FNO(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.last = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
            self.layers = nn.ModuleList([Layer() for _ in range(layers)])

        def forward(self, batch: Any) -> Any:
            x = self.lift(batch["x"])
            for layer in self.layers:
                x = layer(x)
            return s.mse(self.last(x), batch["y"])

    return FNO()


def fields(rng: np.random.Generator, n: int, size: int, **others: int) -> Arrays:
    return {name: floats(rng, n, 1, size, size) for name in "xy"}


ENTRIES = [
    Entry(
        "fno",
        "Fourier neural operator",
        fno,
        fields,
        {"n": 4, "size": 64, "width": 32, "layers": 3, "modes": 12},
        {"n": 16, "size": 128, "width": 64, "layers": 4, "modes": 16},
    ),
]
