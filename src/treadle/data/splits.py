"""Data in parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FINITE, check_integer, check_number
from treadle.base.trees import Tree
from treadle.data.shuffle import SPLIT, permutation
from treadle.data.sources import Arrays


def split(
    data: Tree,
    fractions: Sequence[float] = (0.8, 0.2),
    *,
    seed: int = 0,
    shuffle: bool = True,
    stratify: object = None,
) -> list[Tree]:
    """A tree of arrays in parts, one for each fraction; every row is in exactly one.

    The seed decides which, and rows keep their order within a part. `stratify` is an array of
    classes, one for each row, whose proportions every part gets to within a row. With
    `shuffle=False` parts are neighbours and views, which leaves memory maps on disk.
    """
    arrays = Arrays(data, "split")
    parts = _checked(fractions)
    count = len(arrays)
    if not shuffle:
        if stratify is not None:
            raise ArgumentError("split", "stratify with shuffle=False", "Neighbours are as is.")
        ends = np.cumsum([0, *_sizes(parts, count)])
        return [arrays.part(int(a), int(b)) for a, b in pairwise(ends)]
    order = permutation(check_integer("split", "seed", seed), SPLIT, count)
    if stratify is None:
        chosen = np.split(order, np.cumsum(_sizes(parts, count))[:-1])
    else:
        chosen = _stratified(parts, order, np.asarray(stratify))
    return [arrays.gather(np.sort(indices)) for indices in chosen]


def _checked(fractions: Sequence[float]) -> np.ndarray:
    is_list = isinstance(fractions, (list, tuple, np.ndarray))
    given = fractions if is_list else (fractions,)
    parts = np.array([check_number("split", "one of the fractions", f, FINITE) for f in given])
    is_good = parts.ndim == 1 and len(parts) > 0 and bool((parts > 0).all())
    if not is_good or abs(parts.sum() - 1) > 1e-9:
        raise ArgumentError(
            "split",
            f"fractions = {tuple(given)}",
            "They are positive and add up to 1, for instance (0.8, 0.1, 0.1).",
        )
    return parts


def _sizes(parts: np.ndarray, count: int) -> list[int]:
    """Whole numbers that add up to the count, none of them 0."""
    ends = np.rint(np.cumsum(parts) * count).astype(int)
    sizes = np.diff(ends, prepend=0).tolist()
    if 0 in sizes:
        raise ArgumentError(
            "split", f"{count} rows in parts of {sizes} rows", "Use more rows or fewer parts."
        )
    return sizes


def _stratified(parts: np.ndarray, order: np.ndarray, classes: np.ndarray) -> list[np.ndarray]:
    """Each class is cut by itself; where it does not divide, the cuts of all classes even out."""
    if classes.shape != order.shape:
        raise ArgumentError(
            "split", f"stratify has the shape {classes.shape}", f"One class for {order.shape} rows."
        )
    names, index = np.unique(classes, return_inverse=True)
    by_class = order[np.argsort(index[order], kind="stable")]  # class after class, shuffled
    counts = np.bincount(index)
    starts = np.cumsum(counts) - counts
    within = np.arange(len(order)) - np.repeat(starts, counts)
    place = (within + 0.5) / np.repeat(counts, counts)  # of a row within its class, 0 to 1
    spread = by_class[np.argsort(place, kind="stable")]  # all classes evenly from end to end
    sizes = _sizes(parts, len(order))
    if counts.min() < len(parts):
        raise ArgumentError(
            "split",
            f"the class {names[counts.argmin()]!r} has {counts.min()} rows for {len(parts)} parts",
            "Use fewer parts or leave stratify out.",
        )
    return np.split(spread, np.cumsum(sizes)[:-1])
