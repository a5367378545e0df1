"""Arithmetic on shapes and axes. Failures are reported by the caller, who knows the operation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Shape = tuple[int, ...]


def size_of(shape: Sequence[int]) -> int:
    return math.prod(shape)


def broadcast_shapes(*shapes: Shape) -> Shape | None:
    """The common shape by NumPy's rule, or None if there is none."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[int] = []
    for i in range(-rank, 0):
        sizes = {s[i] for s in shapes if len(s) >= -i} - {1}
        if len(sizes) > 1:
            return None
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def normal_axis(axis: int, rank: int) -> int | None:
    """`axis` counted from the front, or None if it is out of range."""
    return axis % rank if -rank <= axis < rank else None


def without(shape: Sequence[int], axes: Iterable[int]) -> Shape:
    """`shape` with `axes` left out."""
    dropped = set(axes)
    return tuple(n for i, n in enumerate(shape) if i not in dropped)


def inverse_permutation(axes: Sequence[int]) -> tuple[int, ...]:
    inverse = [0] * len(axes)
    for position, axis in enumerate(axes):
        inverse[axis] = position
    return tuple(inverse)


def windows(size: int, kernel: int, stride: int, dilation: int) -> int:
    """How many windows of `kernel` elements, `dilation` apart, fit into `size` at `stride`."""
    reach = dilation * (kernel - 1) + 1
    return (size - reach) // stride + 1 if size >= reach else 0
