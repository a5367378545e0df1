"""Rows that can be asked for by number: arrays in memory or on disk, windows of text."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from treadle.base import trees
from treadle.base.arrays import FILL, lost_mask
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import check_whole
from treadle.base.trees import Tree


@runtime_checkable
class Source(Protocol):
    """What `ArrayLoader` reads: a number of rows, and a batch of some of them."""

    def __len__(self) -> int: ...

    def gather(self, indices: np.ndarray) -> Tree:
        """The rows with these numbers, as a batch of arrays of their own."""
        ...


@runtime_checkable
class Ordered(Source, Protocol):
    """A source whose rows are cheap to read in some orders only: a file of compressed parts."""

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The shuffled rows of an epoch, which depend on these numbers alone."""
        ...

    def identity(self) -> dict[str, int]:
        """What the order depends on beside them."""
        ...


class Arrays:
    """A tree of arrays (memory maps too) whose first axis is one and the same."""

    def __init__(self, tree: Tree, operation: str = "Arrays"):
        leaves, self._structure = trees.flatten(tree)
        self._arrays = checked_arrays(operation, trees.paths(tree), leaves)
        self._count = len(self._arrays[0])

    def __len__(self) -> int:
        return self._count

    def gather(self, indices: np.ndarray) -> Tree:
        """Copies, so that nothing done to a batch reaches the data."""
        return self._structure.rebuild(np.asarray(a)[indices] for a in self._arrays)

    def part(self, start: int, stop: int) -> Tree:
        """Neighbouring rows as views: a memory map stays one."""
        return self._structure.rebuild(a[start:stop] for a in self._arrays)


def checked_arrays(operation: str, names: list[str], leaves: list[object]) -> list[np.ndarray]:
    """The leaves as arrays with one number of rows; one error for everything that is wrong."""
    arrays = [leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf) for leaf in leaves]
    shown = [name or "the array" for name in names]
    if not arrays:
        raise ArgumentError(operation, "there are no arrays", "Pass a dict of arrays.")
    masked = [f"{n} {lost}" for n, a in zip(shown, arrays, strict=True) if (lost := lost_mask(a))]
    if masked:
        raise ArgumentError(operation, "; ".join(masked), FILL)
    scalars = [n for n, a in zip(shown, arrays, strict=True) if a.ndim == 0]
    if scalars:
        raise ShapeError(
            operation,
            f"{', '.join(scalars[:6])}: not an array with rows",
            "The first axis counts rows. Lists of numbers are not arrays: use np.asarray.",
        )
    objects = [n for n, a in zip(shown, arrays, strict=True) if a.dtype == object]
    if objects:
        raise DTypeError(
            operation, f"{', '.join(objects)} holds Python objects", "Use an array of numbers."
        )
    counts = {n: len(a) for n, a in zip(shown, arrays, strict=True)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{n} has {count}" for n, count in counts.items())
        raise ShapeError(operation, f"numbers of rows differ: {listed}", "Rows belong together.")
    if 0 in counts.values():
        raise ArgumentError(operation, f"{', '.join(counts)}: no rows", "The data is empty.")
    return arrays


class TextWindows:
    """Windows of a long row of tokens: x, and y, which is x one token later. A `Source`.

    Each is int32 (B, length). Windows begin every `stride` tokens; without one they do not overlap.
    """

    def __init__(self, tokens: np.ndarray, length: int, stride: int | None = None):
        self._tokens = np.asarray(tokens)
        self._length = check_whole("TextWindows", "length", length)
        self._stride = length if stride is None else check_whole("TextWindows", "stride", stride)
        if self._tokens.ndim != 1 or self._tokens.dtype.kind not in "iu":
            raise DTypeError(
                "TextWindows",
                f"the tokens are {self._tokens.dtype} of shape {self._tokens.shape}",
                "They are integers in one row: BPE.encode gives such, np.frombuffer gives bytes.",
            )
        if len(self._tokens) <= length:
            raise ArgumentError(
                "TextWindows",
                f"{len(self._tokens)} tokens hold no window of {length} and the token after it",
                "Use shorter windows or more text.",
            )

    def __len__(self) -> int:
        return (len(self._tokens) - self._length - 1) // self._stride + 1

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The windows with these numbers."""
        starts = np.asarray(indices) * self._stride
        rows = self._tokens[starts[:, None] + np.arange(self._length + 1)].astype(np.int32)
        return {"x": rows[:, :-1].copy(), "y": rows[:, 1:].copy()}
