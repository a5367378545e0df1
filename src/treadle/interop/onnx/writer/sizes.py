"""Sizes of a program whose batch is not fixed: each is a number, or so many times the batch.

They are found by tracing a program at two sizes of the batch: what differs grows with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape

FIXED = "Export it with a fixed batch."


@dataclass(frozen=True, slots=True)
class Grows:
    """times · batch + plus."""

    times: int
    plus: int


Size = int | Grows
Sizes = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The two sizes that a program was traced at."""

    first: int
    second: int

    def size(self, first: int, second: int) -> Size:
        """What a number is that was `first` in one trace and `second` in the other."""
        if first == second:
            return first
        times, rest = divmod(second - first, self.second - self.first)
        if rest:
            cause = f"a size is {first} for a batch of {self.first}, and {second} for one of "
            raise ArgumentError("export", f"{cause}{self.second}", FIXED)
        return Grows(times, first - times * self.first)

    def sizes(self, first: Shape, second: Shape) -> Sizes:
        if len(first) != len(second):
            cause = f"the number of axes depends on the batch: {first} and {second}"
            raise ArgumentError("export", cause, FIXED)
        return tuple(map(self.size, first, second))


def is_fixed(sizes: Sizes) -> bool:
    return all(isinstance(n, int) for n in sizes)


def fixed(operation: str, sizes: Sizes) -> Shape:
    """The sizes, which must not depend on the batch."""
    if not is_fixed(sizes):
        cause = f"{operation} has the sizes {sizes}, which depend on the batch"
        raise ArgumentError("export", cause, FIXED)
    return tuple(n for n in sizes if isinstance(n, int))
