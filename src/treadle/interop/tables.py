"""Tables as loaders: Parquet files by row groups, Arrow tables, polars and pandas frames."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.base.memory import refuse_beyond
from treadle.base.numbers import check_whole
from treadle.base.trees import Tree
from treadle.data.loaders import ArrayLoader
from treadle.data.shuffle import permutation
from treadle.interop.arrow import (
    Columns,
    Fill,
    Named,
    batch_arrays,
    check_fill,
    check_type,
    chosen_columns,
    needed,
    pyarrow,
)

OPERATION = "tables.loader"
Files = str | Path | Sequence[str | Path]


def loader(
    data: Any,
    columns: Columns = None,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    fill: Fill = None,
    window: int = 8,
) -> ArrayLoader:
    """Batches of the columns of a table, by name: a `td.data.ArrayLoader`, which can be resumed.

    `data` is a Parquet file, a folder or list of them, or a table: of Arrow, polars, pandas or
    anything that speaks Arrow's C interface. `columns` are names, or arrays by name with the
    columns they are made of: `{"x": ["age", "height"], "y": "label"}`. Nulls are refused, or become
    `fill`, a number or a dict of them by column.

    Of files, row groups are read as they are needed and `window` of them are in memory at a time; a
    shuffled pass takes row groups in an order of the seed and mixes the rows of a window.
    """
    if isinstance(data, (str, Path)) or _is_paths(data):
        check_whole(OPERATION, "window", window)
        source: Any = ParquetRows(data, columns, fill, window)
    else:
        source = _in_memory(data, columns, fill)
    return ArrayLoader(source, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)


def _is_paths(data: object) -> bool:
    is_list = isinstance(data, (list, tuple)) and len(data) > 0
    return is_list and all(isinstance(part, (str, Path)) for part in data)  # type: ignore[attr-defined]


def _in_memory(data: Any, columns: Columns, fill: Fill) -> Tree:
    """The columns of a table as arrays; those without nulls share its memory."""
    pa = pyarrow(OPERATION)
    try:
        table = data if isinstance(data, pa.Table) else pa.table(data)
    except (TypeError, ValueError, pa.ArrowException) as error:
        cause = f"the data is a {type(data).__name__}, not a table"
        remedy = (
            "Pass a path, an Arrow table or a frame of polars or pandas; .collect() a lazy one."
        )
        raise ArgumentError(OPERATION, cause, remedy) from error
    check_fill(OPERATION, fill, table.column_names)
    named = chosen_columns(OPERATION, columns, table.column_names)
    for name in needed(named):
        check_type(OPERATION, name, table.schema.field(name).type)
    return batch_arrays(OPERATION, table, named, fill)


class ParquetRows:
    """Rows of Parquet files, a source of a loader: row groups are read when rows are asked for."""

    def __init__(self, files: Files, columns: Columns, fill: Fill, window: int):
        self._pa = pyarrow(OPERATION)
        self._paths, self._fill, self._window = _paths(files), fill, window
        self._groups: list[tuple[int, int]] = []  # file and number in it
        counts: list[int] = []
        self._named: Named = {}
        for number, path in enumerate(self._paths):
            metadata, schema = self._opened(path)
            check_fill(OPERATION, fill, schema.names)
            named = chosen_columns(f"{OPERATION}, {path.name}", columns, schema.names)
            if number and named != self._named:
                cause = f"{path.name} has other columns than {self._paths[0].name}"
                raise LoadError(OPERATION, cause, "Name those that all have: columns=[…].")
            self._named = named
            for name in needed(named):
                check_type(f"{OPERATION}, {path.name}", name, schema.field(name).type)
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                counts.append(metadata.row_group(group).num_rows)
        if min(counts, default=0) < 0:
            raise LoadError(OPERATION, "a row group has less than no rows", "Use another copy.")
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        refuse_beyond(OPERATION, "the order of the rows", 8 * len(self))
        self._kept: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def _opened(self, path: Path) -> tuple[Any, Any]:
        try:
            found = self._pa.parquet.ParquetFile(path)
            return found.metadata, found.schema_arrow
        except (OSError, ValueError, TypeError, MemoryError, self._pa.ArrowException) as error:
            cause = f"{path} is no Parquet file that can be read: {str(error)[:200]}"
            raise LoadError(OPERATION, cause, "Use another copy.") from error

    def __len__(self) -> int:
        return int(self._starts[-1])

    def identity(self) -> dict[str, int]:
        return {"groups": len(self._groups), "window": self._window}

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Row groups in an order of their own, and the rows of each window of them mixed."""
        groups = permutation(seed, epoch, len(self._groups))
        parts = []
        for at in range(0, len(groups), self._window):
            some = groups[at : at + self._window]
            rows = [np.arange(self._starts[g], self._starts[g + 1]) for g in some]
            together = np.concatenate(rows)
            # Streams of windows are apart from those of epochs, which are below 2³².
            stream = ((at // self._window + 1) << 32) + epoch
            parts.append(together[permutation(seed, stream, len(together))])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def gather(self, indices: np.ndarray) -> Tree:
        """Rows by their numbers; those of a row group together."""
        of_group = np.searchsorted(self._starts, indices, side="right") - 1
        found: dict[str, np.ndarray] = {}
        with self._lock:
            # Those in memory first: the next ones take their place.
            asked = sorted(np.unique(of_group).tolist(), key=lambda g: g not in self._kept)
            for group in asked:
                arrays, is_here = self._group(group), of_group == group
                within = indices[is_here] - self._starts[group]
                for name, array in arrays.items():
                    if name not in found:
                        found[name] = np.empty((len(indices), *array.shape[1:]), array.dtype)
                    self._check_shape(name, found[name], array, group)
                    found[name][is_here] = array[within]
        return found

    def _check_shape(self, name: str, first: np.ndarray, array: np.ndarray, group: int) -> None:
        if first.shape[1:] != array.shape[1:] or first.dtype != array.dtype:
            file, number = self._groups[group]
            raise LoadError(
                OPERATION,
                f"{name} is {array.dtype}{array.shape[1:]} in row group {number} of "
                f"{self._paths[file].name}, and {first.dtype}{first.shape[1:]} elsewhere",
                "Rows of a batch have one shape and one dtype: pad or cast them first.",
            )

    def _group(self, group: int) -> dict[str, np.ndarray]:
        """The arrays of a row group; those used last stay, a window and the one that begins."""
        if group not in self._kept:
            self._kept[group] = self._read(*self._groups[group], group)
            while len(self._kept) > self._window + 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _read(self, file: int, number: int, group: int) -> dict[str, np.ndarray]:
        path, expected = self._paths[file], int(self._starts[group + 1] - self._starts[group])
        where = f"{path.name}, row group {number}"
        try:
            opened = self._pa.parquet.ParquetFile(path)
            size = opened.metadata.row_group(number).total_byte_size
            refuse_beyond(OPERATION, where, size)
            table = opened.read_row_group(number, columns=needed(self._named))
            table.validate(full=True)
        except (OSError, ValueError, TypeError, MemoryError, self._pa.ArrowException) as error:
            cause = f"{where} cannot be read: {str(error)[:200]}"
            raise LoadError(OPERATION, cause, "Use another copy.") from error
        if table.num_rows != expected:
            cause = f"{where} has {table.num_rows} rows, the file says {expected}"
            raise LoadError(OPERATION, cause, "Use another copy.")
        return batch_arrays(f"{OPERATION}, {where}", table, self._named, self._fill)


def _paths(files: Files) -> list[Path]:
    """Files as they are given; those of a folder by name."""
    given = [files] if isinstance(files, (str, Path)) else list(files)
    found: list[Path] = []
    for path in map(Path, given):
        found += sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        cause = f"there is no file {missing[0]}" if missing else f"no .parquet file in {given[0]}"
        raise LoadError(OPERATION, cause, "Pass a Parquet file, a folder or a list of them.")
    return found
