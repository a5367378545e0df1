"""The tree in which shards are summed, and the part of every array that a rank owns.

Sums are made like a binary counter counts: what a shard gives is added to what is waiting of as
many shards as it stands for, and so on. A block of 2ᵏ shards that begins at a multiple of 2ᵏ is
one node of the tree, so that a rank with as many shards gives one number, whoever adds the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape, size_of


@dataclass(frozen=True, slots=True)
class Merge:
    """What becomes of the sum of a shard: added to waiting ones, then waiting itself, or last."""

    levels: tuple[int, ...]  # of the waiting sums that it is added to, in this order
    waits_at: int | None  # the level at which it waits; None for the sum of all


def merges(count: int) -> list[Merge]:
    """The fixed tree over some shards, or ranks, as one merge after each."""
    found = []
    for i in range(count - 1):
        ones = ((i + 1) & ~i).bit_length() - 1  # of the trailing bits of i
        found.append(Merge(tuple(range(ones)), ones))
    last = count - 1
    levels = tuple(level for level in range(last.bit_length()) if last >> level & 1)
    return [*found, Merge(levels, None)]


@dataclass(frozen=True, slots=True)
class Share:
    """Which shards one of several ranks computes, and which rows of every array it owns."""

    shards: int
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        each, rest = divmod(self.shards, self.ranks)
        if rest:
            raise ArgumentError(
                "DataParallel",
                f"{self.shards} shards cannot be shared out to {self.ranks} ranks",
                f"Use a number of shards that is a multiple of {self.ranks}.",
            )
        if self.ranks > 1 and each & (each - 1):
            raise ArgumentError(
                "DataParallel",
                f"{self.shards} shards on {self.ranks} ranks are {each} on each, which is no "
                "power of two: sums would not be those of one rank",
                f"Use {self.ranks << (each.bit_length() - 1)} or "
                f"{self.ranks << each.bit_length()} shards.",
            )

    @property
    def each(self) -> int:
        """Shards of every rank."""
        return self.shards // self.ranks

    @property
    def own(self) -> range:
        """The shards of this rank."""
        return range(self.rank * self.each, (self.rank + 1) * self.each)

    def rank_of(self, shard: int) -> int:
        return shard // self.each


@dataclass(frozen=True, slots=True)
class Pieces:
    """An array as rows of equal length, one for each shard, filled up with zeros at the end."""

    shape: Shape
    shards: int

    @property
    def size(self) -> int:
        return size_of(self.shape)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return -(-self.size // self.shards)

    @property
    def filling(self) -> int:
        """Zeros at the end."""
        return self.length * self.shards - self.size

    def part(self, row: int) -> slice:
        """The elements of a row, as they lie in the flat array."""
        return slice(min(row * self.length, self.size), min((row + 1) * self.length, self.size))

    def cut(self, array: np.ndarray) -> np.ndarray:
        """(shards, length): a view where nothing is filled up."""
        flat = np.ascontiguousarray(array).reshape(-1)
        if self.filling:
            flat = np.concatenate([flat, np.zeros(self.filling, flat.dtype)])
        return flat.reshape(self.shards, self.length)

    def glue(self, rows: np.ndarray) -> np.ndarray:
        """The array that all rows are."""
        return rows.reshape(-1)[: self.size].reshape(self.shape)
