"""Loggers: numbers by name at a step, to the console, files, TensorBoard, W&B and MLflow."""

from __future__ import annotations

import csv
import io
import json
import math
import numbers
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from treadle.base.errors import ArgumentError, LoadError
from treadle.train.events import record, restart_event, scalars_event, version_event
from treadle.train.log_files import LogFile

MOST_FAILURES = 3  # in a row; then a logger is left alone
STEP = "step"
ALL = sys.maxsize  # rows


class LoggerWarning(UserWarning):
    """A logger failed, and training goes on without its rows."""


class Logger(Protocol):
    """What a trainer tells its numbers to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name after a step."""
        ...

    def resume(self, step: int) -> None:
        """Go on after a step: rows beyond it are dropped, since they will come again."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


@runtime_checkable
class RowLogger(Protocol):
    """A logger that can also drop some of the rows of a step."""

    def resume_rows(self, step: int, rows: int) -> None:
        """Go on after so many rows of a step: those beyond are dropped."""
        ...


class Loggers:
    """Several loggers as one, of which none can stop training.

    A logger that fails warns once and is tried again; after three failures in a row it is left
    alone. Values that are not numbers are left out. What `resume` finds wrong is raised: it is
    before training.
    """

    def __init__(self, loggers: Iterable[Logger] = ()):
        self._loggers = tuple(loggers)
        self._failures = [0] * len(self._loggers)
        self._warned: set[int] = set()
        self._at, self._rows = 0, 0  # the last step, and how many rows it has

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """To all of them."""
        self._at, self._rows = step, self.rows_at(step) + 1
        if not self._loggers:
            return
        kept = scalars(values)
        for i, logger in enumerate(self._loggers):
            if self._failures[i] >= MOST_FAILURES:
                continue
            try:
                logger.log(step, kept)
                self._failures[i] = 0
            except Exception as error:
                self._failures[i] += 1
                self._warn(i, error)

    def rows_at(self, step: int) -> int:
        """How many rows were logged at a step, the last one or a later one."""
        return self._rows if self._at == step else 0

    def resume(self, step: int, rows: int | None = None) -> None:
        """All of them go on after a step; or after so many rows of it, where they can."""
        for logger in self._loggers:
            if rows is not None and isinstance(logger, RowLogger):
                logger.resume_rows(step, rows)
            else:
                logger.resume(step)
        self._at, self._rows = step, rows or 0

    def close(self) -> None:
        """All of them, also if one fails."""
        for i, logger in enumerate(self._loggers):
            try:
                logger.close()
            except Exception as error:
                self._warn(i, error)

    def _warn(self, i: int, error: Exception) -> None:
        if i not in self._warned:
            self._warned.add(i)
            name = type(self._loggers[i]).__name__
            warnings.warn(
                f"{name} failed, training goes on without its rows: {error!r}",
                LoggerWarning,
                stacklevel=4,
            )


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among values, as Python's own."""
    found: dict[str, float] = {}
    for name, value in values.items():
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        if isinstance(number, numbers.Integral):
            found[name] = int(number)
        elif isinstance(number, numbers.Real):
            found[name] = float(number)
    return found


class ConsoleLogger:
    """A line for every row, or for every n-th: `step 100  loss 0.2301  accuracy 0.925`."""

    def __init__(self, every: int = 1, file: TextIO | None = None):
        if every < 1:
            raise ArgumentError("ConsoleLogger", f"every = {every}", "At least 1.")
        self._every, self._file, self._rows = every, file, 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print it."""
        if self._rows % self._every == 0:
            parts = [f"{name} {shown(value)}" for name, value in values.items()]
            file = sys.stdout if self._file is None else self._file
            print(f"step {step}", *parts, sep="  ", file=file, flush=True)
        self._rows += 1

    def resume(self, step: int) -> None:
        """Nothing is undone on a console."""

    def close(self) -> None:
        """Nothing is open."""


def shown(value: float) -> str:
    """Four digits; integers as they are."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


class CSVLogger:
    """Rows of a CSV file: the step, and a column for each name.

    A name that comes later gets a column then; cells without a value are empty. A file that is
    there is begun anew, unless `resume` was called.
    """

    def __init__(self, path: str | Path):
        self._file = LogFile(path)
        self._columns: list[str] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row."""
        new = [n for n in values if n not in self._columns]
        if not self._file.is_open or new:
            self._widen(new)
        cells = ["" if n not in values else repr(values[n]) for n in self._columns]
        self._file.append(csv_text([[str(step), *cells]]))

    def _widen(self, new: list[str]) -> None:
        """More columns: the rows so far get empty cells."""
        if STEP in new:
            raise ArgumentError("CSVLogger", f"a value is named {STEP!r}", "Rename it.")
        rows = _csv_rows(self._file.lines())[1:] if self._file.is_open else []
        columns = [*self._columns, *new]
        padded = [row + [""] * (len(columns) + 1 - len(row)) for row in rows]
        self._file.begin(csv_text([[STEP, *columns], *padded]))
        self._columns = columns

    def resume(self, step: int) -> None:
        """Keep the rows up to a step and append to them."""
        self.resume_rows(step, ALL)

    def resume_rows(self, step: int, rows: int) -> None:
        """Keep the rows before a step and so many of it, and append to them."""
        found = _csv_rows(self._file.lines())
        header, body = (found[0], found[1:]) if found else ([STEP], [])
        if header[0] != STEP:
            raise _foreign("CSVLogger", self._file.path, 1)
        for number, row in enumerate(body, 2):
            if len(row) != len(header) or not row[0].isdecimal():
                raise _foreign("CSVLogger", self._file.path, number)
        kept = [body[i] for i in _kept([int(row[0]) for row in body], step, rows)]
        self._columns = header[1:]
        self._file.begin(csv_text([header, *kept]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _kept(steps: list[int], step: int, rows: int) -> list[int]:
    """Places of the rows before a step, and of so many of that step itself."""
    own = [i for i, at in enumerate(steps) if at == step][:rows]
    return sorted([i for i, at in enumerate(steps) if at < step] + own)


def _foreign(logger: str, path: Path, line: int) -> LoadError:
    return LoadError(
        logger,
        f"{path}, line {line}, is not of this logger",
        "Use another path, or delete the file.",
    )


def csv_text(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _csv_rows(lines: list[str]) -> list[list[str]]:
    return [row or [""] for row in csv.reader(lines)]


class JSONLLogger:
    """A JSON object for each row, on a line of its own: `{"step": 1, "loss": 0.5}`.

    JSON has no NaN or infinity; they are the strings "NaN", "Infinity" and "-Infinity". A file
    that is there is begun anew, unless `resume` was called.
    """

    def __init__(self, path: str | Path):
        self._file = LogFile(path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row."""
        if STEP in values:
            raise ArgumentError("JSONLLogger", f"a value is named {STEP!r}", "Rename it.")
        if not self._file.is_open:
            self._file.begin()
        row = {STEP: step} | {name: json_number(value) for name, value in values.items()}
        self._file.append(f"{json.dumps(row, allow_nan=False)}\n".encode())

    def resume(self, step: int) -> None:
        """Keep the rows up to a step and append to them."""
        self.resume_rows(step, ALL)

    def resume_rows(self, step: int, rows: int) -> None:
        """Keep the rows before a step and so many of it, and append to them."""
        lines = self._file.lines()
        steps = [self._step_of(line, i) for i, line in enumerate(lines, 1)]
        kept = [lines[i] for i in _kept(steps, step, rows)]
        self._file.begin("".join(f"{line}\n" for line in kept).encode())

    def _step_of(self, line: str, number: int) -> int:
        try:
            step = json.loads(line)[STEP]
        except (ValueError, KeyError, TypeError, RecursionError):
            step = None
        if not isinstance(step, int):
            raise _foreign("JSONLLogger", self._file.path, number)
        return step

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class TensorBoardLogger:
    """Event files in a folder, for `tensorboard --logdir`. The package is needed to look only."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._file: LogFile | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the numbers."""
        self._opened().append(record(scalars_event(time.time(), step, values)))

    def resume(self, step: int) -> None:
        """A new file, which makes readers forget rows beyond the step."""
        self.close()
        self._opened().append(record(restart_event(time.time(), step + 1)))

    def _opened(self) -> LogFile:
        """A file of a name of its own; readers take the files of a folder in the order of names."""
        if self._file is None:
            now, host = time.time(), platform.node() or "host"
            name = f"events.out.tfevents.{int(now * 1e6):017d}.{host}.{os.getpid()}"
            file = LogFile(self._folder / name)
            file.begin(record(version_event(now)))
            self._file = file
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class WandbLogger:
    """A run of Weights & Biases; options are those of `wandb.init`.

    To go on with a run pass its `id` and `resume="must"`. What the server has is not dropped: the
    steps that come again are the same, and are not sent again.
    """

    def __init__(self, project: str | None = None, **options: Any):
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("WandbLogger", "wandb") from error
        self._run = wandb.init(project=project, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers, unless the run is further."""
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def resume(self, step: int) -> None:
        """The server knows how far the run is."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflowLogger:
    """A run of MLflow; options are those of `mlflow.start_run`.

    To go on with a run pass its `run_id`. What the server has is not dropped: the steps that come
    again are the same, and are not sent again.
    """

    def __init__(self, experiment: str | None = None, **options: Any):
        try:
            import mlflow
        except ImportError as error:
            raise _not_installed("MLflowLogger", "mlflow") from error
        self._mlflow = mlflow
        if experiment is not None:
            mlflow.set_experiment(experiment)
        self._run = mlflow.start_run(**options)
        self._last: dict[str, int] = {}  # the last step that the server has, by name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers that are new."""
        new = {n: float(v) for n, v in values.items() if step > self._last.get(n, -1)}
        if new:
            self._mlflow.log_metrics(new, step=step)

    def resume(self, step: int) -> None:
        """Ask the server how far each number is."""
        client, run = self._mlflow.MlflowClient(), self._run.info.run_id
        for name in client.get_run(run).data.metrics:
            history = client.get_metric_history(run, name)
            self._last[name] = max((m.step for m in history), default=-1)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _not_installed(logger: str, package: str) -> ArgumentError:
    return ArgumentError(logger, f"{package} is not installed", f"pip install {package}")
