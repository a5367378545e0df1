"""Axes by labels: what the axes of tensors are to each other, through reshapes and permutations.

A group of labels is an axis: `bh` is one of batch and heads, in that order. A reshape that cuts an
axis splits its label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Groups = tuple[str, ...]


class Axes:
    """Labels with their sizes, and what has become of those that were split."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._parts: dict[str, str] = {}

    def new(self, size: int) -> str:
        label = chr(ord("a") + len(self.sizes))
        self.sizes[label] = size
        return label

    def resolved(self, group: str) -> str:
        """A group in labels that were not split."""
        return "".join(self.resolved(self._parts[x]) if x in self._parts else x for x in group)

    def size(self, group: str) -> int:
        return math.prod(self.sizes[x] for x in self.resolved(group))

    def shape(self, group: str) -> tuple[int, ...]:
        """The size of each label."""
        return tuple(self.sizes[x] for x in self.resolved(group))

    def _split(self, label: str, first: int) -> None:
        parts = self.new(first), self.new(self.sizes[label] // first)
        self._parts[label] = "".join(parts)

    def grouped(self, groups: Sequence[str], shape: Sequence[int]) -> Groups | None:
        """The groups of a tensor that is reshaped; labels are split where a new axis ends in them.

        None where it does not end at a divisor.
        """
        left, found = list(self.resolved("".join(groups))), list[str]()
        for n in shape:
            group, size = "", 1
            while size < n and left:
                label = left.pop(0)
                if n % (size * self.sizes[label]):
                    first = n // size
                    if n % size or first < 2 or self.sizes[label] % first:
                        return None
                    self._split(label, first)
                    left[:0] = self._parts[label]
                    continue
                group, size = group + label, size * self.sizes[label]
            if size != n:
                return None
            found.append(group)
        if any(self.sizes[x] != 1 for x in left) or not found:
            return None
        return (*found[:-1], found[-1] + "".join(left))
