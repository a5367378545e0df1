"""Hugging Face `datasets` as loaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, DTypeError
from treadle.base.trees import Tree
from treadle.data.loaders import ArrayLoader, IterableLoader
from treadle.interop.arrow import (
    ENCODE,
    Columns,
    Fill,
    batch_arrays,
    check_fill,
    check_type,
    chosen_columns,
    needed,
)

OPERATION = "datasets.loader"
BUFFER = 1000  # rows of a stream that are mixed, as `datasets` does itself


def loader(
    dataset: Any,
    columns: Columns = None,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    fill: Fill = None,
) -> ArrayLoader | IterableLoader:
    """Batches of the columns of a dataset, by name, that can be resumed.

    A `datasets.Dataset` stays where it is, in memory or on disk, and rows are read as they are
    needed; one with a transform of its own (`set_transform`) gives what that makes. A stream, an
    `IterableDataset`, is mixed as `datasets` mixes it and resumed by skipping. `columns` and `fill`
    are those of `td.interop.tables.loader`; only rows that come straight from Arrow can be filled.
    """
    try:
        import datasets
    except ImportError as error:
        remedy = 'Install it: pip install "treadle[tables]".'
        raise ArgumentError(OPERATION, "datasets is not installed", remedy) from error
    if isinstance(dataset, Mapping):
        cause = f"it is a dict of splits: {', '.join(map(str, dataset))}"
        raise ArgumentError(OPERATION, cause, 'Pass one of them: dataset["train"].')
    if isinstance(dataset, datasets.IterableDataset):
        _refuse_fill(fill, "a stream", "map")
        stream = _Stream(dataset, columns, shuffle, seed)
        drops = shuffle if drop_last is None else drop_last
        return IterableLoader(stream.rows, batch_size, drop_last=drops)
    if not isinstance(dataset, datasets.Dataset):
        cause = f"the data is a {type(dataset).__name__}"
        raise ArgumentError(OPERATION, cause, "Pass a datasets.Dataset, or use tables.loader.")
    is_custom = dataset.format["type"] == "custom"
    if is_custom:
        _refuse_fill(fill, "a dataset with a transform", "set_transform")
    source = Transformed(dataset, columns) if is_custom else DatasetRows(dataset, columns, fill)
    return ArrayLoader(source, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)


def _refuse_fill(fill: Fill, what: str, where: str) -> None:
    if fill is not None:
        cause = f"fill = {fill!r}, and {what} gives rows that are Python's own"
        raise ArgumentError(OPERATION, cause, f"Replace what is None in the dataset's {where}.")


class DatasetRows:
    """Rows of a dataset through Arrow, a source of a loader."""

    def __init__(self, dataset: Any, columns: Columns, fill: Fill):
        known = dataset.format["columns"]
        check_fill(OPERATION, fill, known)
        self._named, self._fill = chosen_columns(OPERATION, columns, known), fill
        names = needed(self._named)
        for name in names:
            check_type(OPERATION, name, dataset.features.arrow_schema.field(name).type)
        self._dataset = dataset.with_format("arrow", columns=names)

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: np.ndarray) -> Tree:
        table = self._dataset[indices.tolist()]
        arrays = batch_arrays(OPERATION, table, self._named, self._fill)
        return {name: np.array(array) for name, array in arrays.items()}


class Transformed:
    """Rows as a transform of the dataset's own makes them."""

    def __init__(self, dataset: Any, columns: Columns):
        self._dataset, self._columns = dataset, columns

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: np.ndarray) -> Tree:
        return _numbers(self._dataset[indices.tolist()], self._columns)


class _Stream:
    """Rows of a stream, pass after pass."""

    def __init__(self, dataset: Any, columns: Columns, shuffle: bool, seed: int):
        mixed = dataset.shuffle(seed=seed, buffer_size=BUFFER) if shuffle else dataset
        self._dataset, self._columns = mixed, columns

    def rows(self, epoch: int) -> Iterable[Tree]:
        self._dataset.set_epoch(epoch)
        for row in self._dataset:
            yield _numbers(row, self._columns)


def _numbers(values: Mapping[str, Any], columns: Columns) -> dict[str, np.ndarray]:
    """Values by name as arrays of numbers."""
    named = chosen_columns(OPERATION, columns, list(values))
    found = {name: _array(name, values[name]) for name in needed(named)}
    return {
        name: found[parts] if isinstance(parts, str) else np.stack([found[p] for p in parts], -1)
        for name, parts in named.items()
    }


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        cause = f"the column {name!r} has lists of different lengths"
        raise DTypeError(OPERATION, cause, "Pad or cut them first.") from error
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        cause = f"the column {name!r} is {array.dtype}, not numbers"
        raise DTypeError(OPERATION, cause, ENCODE)
    return array
