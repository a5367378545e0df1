"""What a run recorded: numbers by name at steps, in memory and on disk."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.metrics.direction import Direction, checked_direction
from treadle.train.curves import Plot
from treadle.train.log_files import LogFile
from treadle.train.loggers import STEP, csv_text, json_number


class Point(NamedTuple):
    """A value and the step it was recorded at."""

    step: int
    value: float


class _Column:
    """The values of one name, each with the number of its row: most names are not in every row."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows, self.values = array("q"), array("d")


class History:
    """Rows by step, a column for each name.

    `history["loss"]` is a column as an array, NaN where a row has no such value; `series` leaves
    those rows out. `stopped` says why training ended, where it ended early.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, _Column] = {}
        self.stopped: str | None = None

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add values at a step: the last one that has a row, or a later one."""
        steps = self._steps
        last = steps[-1] if steps else -1
        if step < last:
            cause = f"step {step} comes after step {last}"
            raise ArgumentError("History", cause, "Steps do not decrease.")
        if step > last:
            steps.append(step)
        row = len(steps) - 1
        for name, value in values.items():
            column = self._columns.get(name) or self._new_column(name)
            if column.rows and column.rows[-1] == row:
                column.values[-1] = value
            else:
                column.rows.append(row)
                column.values.append(value)

    def _new_column(self, name: str) -> _Column:
        if name == STEP:
            raise ArgumentError("History", f"a value is named {STEP!r}", "Rename it.")
        column = self._columns[name] = _Column()
        return column

    def __len__(self) -> int:
        """Rows."""
        return len(self._steps)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names, the step first."""
        return (STEP, *self._columns)

    def __contains__(self, name: object) -> bool:
        return name == STEP or name in self._columns

    def __getitem__(self, name: str) -> np.ndarray:
        """A column, one element for each row."""
        if name == STEP:
            return np.array(self._steps, np.int64)
        column = self._column(name)
        found = np.full(len(self), math.nan)
        found[np.array(column.rows, np.int64)] = column.values
        return found

    def _column(self, name: str) -> _Column:
        if not isinstance(name, str) or name not in self._columns:
            known = ", ".join(self.columns)
            raise ArgumentError("History", f"there is no column {name!r}", f"There are: {known}.")
        return self._columns[name]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a column, without the rows that do not have it."""
        column = self._column(name)
        steps = np.array(self._steps, np.int64)[np.array(column.rows, np.int64)]
        return steps, np.array(column.values)

    def last(self, name: str) -> Point:
        """The latest value of a column."""
        column = self._column(name)
        return Point(self._steps[column.rows[-1]], column.values[-1])

    def best(self, name: str, mode: Direction | None = None) -> Point:
        """The best value of a column; of equals the first.

        `mode` is "min" or "max". Names such as "val/loss" and "val/accuracy" need none.
        """
        steps, values = self.series(name)
        direction = checked_direction("History", name, mode)
        if np.isnan(values).all():
            raise ArgumentError("History", f"{name} is never a number", "Look at its series.")
        place = int(np.nanargmin(values) if direction == "min" else np.nanargmax(values))
        return Point(int(steps[place]), float(values[place]))

    def rows(self, start: int = 0) -> Iterator[dict[str, float]]:
        """Rows as dicts with what they have, from a row on."""
        places = {n: _first_at(c.rows, start) for n, c in self._columns.items()}
        for row in range(start, len(self)):
            found: dict[str, float] = {STEP: self._steps[row]}
            for name, column in self._columns.items():
                place = places[name]
                if place < len(column.rows) and column.rows[place] == row:
                    found[name] = column.values[place]
                    places[name] += 1
            yield found

    def to_csv(self, path: str | Path) -> None:
        """A row for each step; cells without a value are empty."""
        columns = self.columns
        rows = [[_cell(row, name) for name in columns] for row in self.rows()]
        file = LogFile(path)
        file.begin(csv_text([list(columns), *rows]))
        file.close()

    def plot(self, *names: str, log: bool = False) -> Plot:
        """Columns as curves, by default the losses; `log=True` has a logarithmic axis.

        The plot is shown in notebooks, and `plot.save("curves.svg")` writes it;
        .png and .pdf need matplotlib.
        """
        chosen: Sequence[str] = names or [
            n for n in self._columns if n.rpartition("/")[2] == "loss"
        ]
        return Plot({name: self.series(name) for name in chosen}, log)

    def __repr__(self) -> str:
        end = f", stopped: {self.stopped}" if self.stopped else ""
        last = f" to step {self._steps[-1]}" if self._steps else ""
        return f"History({len(self)} rows{last}: {', '.join(self._columns)}{end})"


def _first_at(rows: array[int], start: int) -> int:
    """Where a column's rows from `start` on begin."""
    return int(np.searchsorted(np.array(rows, np.int64), start)) if start else 0


def _cell(row: Mapping[str, float], name: str) -> str:
    return repr(row[name]) if name in row else ""


class HistoryFile:
    """A history beside checkpoints: a JSON object a line; lines of one step belong together.

    Rows are appended when a checkpoint is about to be written, and only then.
    """

    def __init__(self, path: Path):
        self._file = LogFile(path)
        self._written = 0  # rows that are in the file

    def begin(self, history: History) -> None:
        """Over whatever is there."""
        self._file.begin(_lines(history, 0))
        self._written = len(history)

    def append(self, history: History) -> None:
        """What is new, the last row again since it may have grown; on the disk before returning."""
        start = max(0, self._written - 1)
        self._file.append(_lines(history, start))
        self._file.sync()
        self._written = len(history)

    def read(self, upto: int) -> History:
        """The rows up to a step. Anything that is no row of a history raises a ValueError."""
        history = History()
        for line in self._file.lines():
            row = json.loads(line)
            if row[STEP] <= upto:
                values = {n: float(v) for n, v in row.items() if n != STEP}
                history.record(int(row[STEP]), values)
        return history

    def close(self) -> None:
        self._file.close()


def _lines(history: History, start: int) -> bytes:
    rows = ({n: json_number(v) for n, v in row.items()} for row in history.rows(start))
    return "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows).encode()
