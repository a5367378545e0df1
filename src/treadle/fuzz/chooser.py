"""What the rules of forms choose from: the values so far, fresh inputs, sizes and axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from treadle.base import dtypes
from treadle.fuzz.program import NORMAL, Input, Literal, Values

T = TypeVar("T")

# Around the widths of vectors (4, 8, 16, 32 lanes) and the scheduler's blocks.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100)
LONG = (127, 128, 129, 255, 257, 300, 1000)
SMALL = tuple(n for n in SIZES if n <= 33)
MOST_ELEMENTS = 60_000  # of one value
MOST_RANK = 4
RANKS = (1, 2, 2, 2, 3, 3, 4)  # of fresh inputs
MOST_WORK = 4_000_000  # products in a contraction


@dataclass(frozen=True, slots=True)
class Proposal:
    """Operands by name and attributes of a step to come."""

    operands: tuple[str, ...]
    attributes: Mapping[str, Literal]


class Chooser:
    """A random stream, and the values of a program that is being made.

    Values are known as the oracle has them, so that a rule can look at shapes and at ranges.
    """

    def __init__(self, rng: np.random.Generator, dtype: str = "float32", is_model: bool = False):
        self.rng, self.dtype, self.is_model = rng, dtype, is_model
        self.known: dict[str, np.ndarray] = {}
        self.inputs: list[Input] = []

    # Numbers

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.integers(len(choices)))]

    def flag(self, probability: float = 0.5) -> bool:
        return bool(self.rng.random() < probability)

    def whole(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def size(self, most: int = MOST_ELEMENTS) -> int:
        pool = SMALL if self.flag(0.4) else SIZES if self.flag(0.8) else LONG
        return min(self.pick(pool), max(most, 1))

    def sizes(self, rank: int, most: int = MOST_ELEMENTS) -> tuple[int, ...]:
        """A shape, often of few columns: what runs over rows then has lanes to fill."""
        while True:
            found = [self.size() for _ in range(rank)]
            if rank > 1 and self.flag(0.3):
                found[-1] = self.whole(2, 7)
            if math.prod(found) <= most:
                return tuple(found)

    # Values

    def shape(self, name: str) -> tuple[int, ...]:
        return self.known[name].shape

    def fresh(self, shape: Sequence[int], values: Values = NORMAL, dtype: str | None = None) -> str:
        """A new input. A model's floats may be parameters."""
        name, dtype = f"x{len(self.inputs)}", dtype or self.dtype
        is_float = dtypes.BY_NAME[dtype].is_float
        is_parameter = self.is_model and is_float and self.flag()
        given = Input(name, tuple(shape), dtype, values, is_parameter)
        self.inputs.append(given)
        self.known[name] = values.draw(self.rng, given.shape).astype(given.type.numpy)
        return name

    def forget(self, count: int) -> None:
        """Leave the first inputs only: those after were for a step that did not come to be."""
        for given in self.inputs[count:]:
            del self.known[given.name]
        del self.inputs[count:]

    def value(
        self,
        low: int = 0,
        high: int = MOST_RANK,
        fits: Callable[[np.ndarray], bool] = lambda array: True,
        values: Values = NORMAL,
    ) -> str:
        """A float value of a rank from low to high; a fresh input where there is none."""
        known = [
            name
            for name, array in self.known.items()
            if _is_float(array) and low <= array.ndim <= high and fits(array)
        ]
        if known and self.flag(0.95):
            return known[-1] if self.flag(0.6) else self.pick(known)
        ranks = [rank for rank in RANKS if low <= rank <= high]
        return self.fresh(self.sizes(self.pick(ranks)), values)

    def like(self, shape: Sequence[int], values: Values = NORMAL) -> str:
        """A float value of exactly this shape: one that is there, or a fresh input."""
        known = [n for n, a in self.known.items() if _is_float(a) and a.shape == tuple(shape)]
        if known and values == NORMAL and self.flag(0.4):
            return self.pick(known)
        return self.fresh(shape, values)

    def integers(self, shape: Sequence[int], high: int, low: int = 0) -> str:
        """Integers from low up to, but without, high: values that are there, or a fresh input."""
        known = [
            name
            for name, array in self.known.items()
            if array.dtype.kind == "i"
            and array.shape == tuple(shape)
            and array.size
            and low <= array.min() <= array.max() < high
        ]
        if known and self.flag():
            return self.pick(known)
        return self.fresh(shape, Values("integers", low, high), "int32")

    # Axes of a value

    def axis(self, name: str) -> int:
        return self.whole(0, len(self.shape(name)) - 1)

    def axes(self, name: str) -> tuple[int, ...]:
        rank = len(self.shape(name))
        count = self.whole(1, rank)
        return tuple(sorted(int(a) for a in self.rng.choice(rank, count, replace=False)))

    def order(self, name: str) -> tuple[int, ...]:
        return tuple(int(a) for a in self.rng.permutation(len(self.shape(name))))


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind not in "iub"
