"""An entry of the zoo: a training step at a size for a few processors and at one for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Sizes = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """`make(side, **sizes)` is a module from a batch to its loss; `batch(rng, **sizes)` feeds it.

    A side is `families.with_treadle` or `families.with_torch`: the same names, so that one text of
    the model gives both twins, whose parameters have the same names. Whatever the two libraries
    do differently is a function of the sides, each in the library's best habits.
    """

    name: str
    title: str
    make: Callable[..., Any]
    batch: Callable[..., Arrays]
    cpu: Sizes
    gpu: Sizes
    is_image: bool = False  # the peer is also tried with channels last
    gpu_precision: str = "bfloat16"

    def sizes(self, device: str) -> Sizes:
        return self.gpu if device == "cuda" else self.cpu

    def precision(self, device: str) -> str:
        return self.gpu_precision if device == "cuda" else "float32"

    def arrays(self, device: str) -> Arrays:
        return self.batch(np.random.default_rng(0), **self.sizes(device))


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def classes(rng: np.random.Generator, count: int, *shape: int) -> np.ndarray:
    return rng.integers(0, count, shape).astype(np.int32)


def lengths(rng: np.random.Generator, longest: int, n: int) -> np.ndarray:
    """From half of the longest to all of it, which one at least has."""
    found = rng.integers(longest // 2, longest + 1, n)
    found[0] = longest
    return found.astype(np.int32)
