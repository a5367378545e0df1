"""CSV files as columns. What does not fit is an error with its line and column."""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path

import numpy as np

from treadle.base.arrays import FILL, lost_mask, lost_range, rounded
from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError, DTypeError, LoadError
from treadle.data.files import as_path, open_bytes

ROWS = 1 << 12  # rows that are text at a time
MISSING = frozenset(["", "na", "n/a", "nan", "null", "none", "?"])  # in lower case
OTHER_DELIMITERS = (";", "\t", "|")
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")

Table = dict[str, np.ndarray]


def read_csv(
    path: str | Path,
    *,
    delimiter: str = ",",
    header: bool | Sequence[str] = True,
    types: Mapping[str, type] | None = None,
    fill: float | None = None,
    encoding: str = "utf-8",
) -> Table:
    """The columns of a CSV file (gzip too) by name: int64, float64 or text.

    A column is numbers if its first value is, and then all of its values must be; `types` says
    otherwise: `{"zip": str}`. A value that is missing (empty, NA, NaN, null, ?) in a column of
    numbers is an error, or `fill`. `header` is the names where the file has none.
    """
    name = as_path("read_csv", path).name
    _check_format(delimiter, header, types, fill, encoding)
    with open_bytes("read_csv", path) as file:
        try:
            text = io.TextIOWrapper(file, _with_mark(encoding), newline="")
            rows = _rows(csv.reader(text, delimiter=delimiter, strict=True), name)
            columns = _header(rows, header, types or {}, name, fill)
            _read(rows, columns, name)
        except UnicodeDecodeError as error:
            raise _undecodable(path, name, encoding, error) from error
        except (EOFError, zlib.error, OSError) as error:
            raise LoadError(
                "read_csv", f"{name} cannot be read: {error}", "Use another copy."
            ) from error
    if not columns[0].count:
        raise LoadError("read_csv", f"{name} has no rows", "The data is empty.")
    return {c.name: c.array() for c in columns}


def _check_format(
    delimiter: object, header: object, types: object, fill: object, encoding: object
) -> None:
    """What is said about a file, before it is read."""
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n"':
        remedy = "It is one character, for instance ';' or a tab."
        raise ArgumentError("read_csv", f"delimiter = {delimiter!r}", remedy)
    is_names = isinstance(header, (list, tuple)) and all(isinstance(n, str) for n in header)
    if not isinstance(header, bool) and not is_names:
        remedy = "It is True, or the names of the columns in a list."
        raise ArgumentError("read_csv", f"header = {header!r}", remedy)
    if types is not None and not isinstance(types, Mapping):
        raise ArgumentError("read_csv", f"types = {types!r}", 'It is a dict: {"zip": str}.')
    if fill is not None and (isinstance(fill, bool) or not isinstance(fill, Real)):
        raise ArgumentError("read_csv", f"fill = {fill!r}", "It is a number; NaN is one.")
    try:
        "".encode(encoding)  # type: ignore[arg-type]
    except (LookupError, TypeError, ValueError) as error:
        remedy = 'Use one that Python knows, for instance "utf-8" or "latin-1".'
        raise ArgumentError("read_csv", f"encoding = {encoding!r}", remedy) from error


def _with_mark(encoding: str) -> str:
    """UTF-8 with or without the mark that spreadsheets put in front."""
    return "utf-8-sig" if encoding.lower().replace("-", "") == "utf8" else encoding


def _undecodable(
    path: str | Path, name: str, encoding: str, error: UnicodeDecodeError
) -> LoadError:
    """Text is decoded ahead of the lines, so the line is found by reading once more."""
    where, found = name, error
    with open_bytes("read_csv", path) as file, suppress(EOFError, OSError, zlib.error):
        for line, content in enumerate(file, 1):
            try:
                content.decode(encoding)
            except UnicodeDecodeError as inside:
                where, found = f"{name}, line {line}, byte {inside.start} of it", inside
                break
    return LoadError(
        "read_csv",
        f"{where}: not {encoding}: {found.reason}",
        'Pass encoding="latin-1" or what it was written with.',
    )


def _rows(reader: Iterator[list[str]], name: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the lines they begin on; blank lines are none."""
    while True:
        line = reader.line_num + 1  # type: ignore[attr-defined]
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            end = reader.line_num  # type: ignore[attr-defined]
            where = f"line {line}" if end <= line else f"lines {line} to {end}"
            raise LoadError(
                "read_csv",
                f"{name}, {where}: {error}",
                "Check quotes and the delimiter there.",
            ) from error
        if "\0" in "".join(row):
            raise LoadError(
                "read_csv",
                f"{name}, line {line}: there is a zero byte",
                'Is it UTF-16? Then pass encoding="utf-16".',
            )
        if row:
            yield line, row


class _Column:
    """One column while it is read: pieces of arrays."""

    def __init__(self, index: int, name: str, kind: type | None, fill: float | None):
        self.index, self.name, self.kind, self.fill = index, name, kind, fill
        self.pieces: list[np.ndarray] = []
        self.undecided: list[tuple[Sequence[str], Sequence[int]]] = []  # nothing is there so far
        self.count = 0

    def add(self, values: Sequence[str], lines: Sequence[int], file: str) -> None:
        self.count += len(values)
        if self.kind is None:
            self.kind = _kind_of(values)
            self.undecided.append((values, lines))
            if self.kind is not None:
                self.decide(self.kind, file)
            return
        self._convert(values, lines, file)

    def decide(self, kind: type, file: str) -> None:
        """What waited is of this kind."""
        self.kind, waiting = kind, self.undecided
        self.undecided = []
        for values, lines in waiting:
            self._convert(values, lines, file)

    def _convert(self, values: Sequence[str], lines: Sequence[int], file: str) -> None:
        if self.kind is str:
            self.pieces.append(np.array(values, str))
            return
        found = _numbers(values, self.kind is int)
        self.pieces.append(self._slowly(values, lines, file) if found is None else found)

    def _slowly(self, values: Sequence[str], lines: Sequence[int], file: str) -> np.ndarray:
        """Value by value: to fill what is missing, or to find what is wrong."""
        numbers: list[float] = []
        for value, line in zip(values, lines, strict=True):
            is_missing = value.strip().lower() in MISSING
            one = None if is_missing else _numbers([value], self.kind is int)
            if one is not None:
                numbers.append(one[0])
            elif is_missing and self.fill is not None:
                numbers.append(self.fill)
            else:
                raise self._wrong(value, line, file, is_missing)
        whole = all(isinstance(n, (int, np.integer)) for n in numbers)
        return np.array(numbers, np.int64 if whole else np.float64)

    def _wrong(self, value: str, line: int, file: str, is_missing: bool) -> LoadError:
        where = f"{file}, line {line}, column {self.index + 1} ({self.name!r})"
        if is_missing:
            remedy = "Pass fill=math.nan, or the number that is to stand there."
            return LoadError("read_csv", f"{where}: a number is missing ({value!r})", remedy)
        what = "whole number" if self.kind is int else "number"
        if (_INTEGER if self.kind is int else _NUMBER).fullmatch(value):
            what = "number that 64 bits hold"
        remedy = f"If the column is text, pass types={{{self.name!r}: str}}."
        return LoadError("read_csv", f"{where}: {value!r} is not a {what}", remedy)

    def array(self) -> np.ndarray:
        return np.concatenate(self.pieces)


def _kind_of(values: Sequence[str]) -> type | None:
    """What the first value that is there says; None if none is."""
    for value in values:
        if value.strip().lower() not in MISSING:
            return str if _numbers([value]) is None and not _NUMBER.fullmatch(value) else float
    return None


def _numbers(values: Sequence[str], whole: bool = False) -> np.ndarray | None:
    """int64 or float64; None if any is missing, no number, or an integer that does not fit."""
    joined = "".join(values)
    if "_" in joined or not joined.isascii():  # Python takes 1_000 and digits of any script
        return None
    try:
        return np.array(values, np.int64)
    except (ValueError, OverflowError):
        pass
    if whole or any(len(v) > 18 and _INTEGER.fullmatch(v) and _is_large(v) for v in values):
        return None
    try:
        found = np.array(values, np.float64)
    except ValueError:
        return None
    if np.isnan(found).any():  # something is missing
        return None
    # "inf" says so itself; 1e400 is a number that became infinite.
    infinite = np.flatnonzero(np.isinf(found)).tolist()
    return None if any(_NUMBER.fullmatch(values[i]) for i in infinite) else found


def _is_large(value: str) -> bool:
    return not -(2**63) <= int(value) < 2**63


def _header(
    rows: Iterator[tuple[int, list[str]]],
    header: bool | Sequence[str],
    types: Mapping[str, type],
    file: str,
    fill: float | None,
) -> list[_Column]:
    """A column for each name: of the first row, of the argument, or numbers."""
    if header is True:
        line, row = next(rows, (1, []))
        names = [n.strip() for n in row]
        _check_names(names, file, line)
        _check_delimiter(names, file, line)
    elif header is False:
        raise ArgumentError(
            "read_csv", "header=False leaves columns without names", 'Pass header=["x", "y", …].'
        )
    else:
        names = list(header)
        _check_names(names, file, 0)
    unknown = [n for n in types if n not in names]
    wrong = [t for t in types.values() if t not in (int, float, str)]
    if unknown or wrong:
        raise ArgumentError(
            "read_csv",
            f"types has {', '.join(map(repr, unknown)) or wrong}",
            f"Columns are {', '.join(names)}; types are int, float and str.",
        )
    return [_Column(i, n, types.get(n), fill) for i, n in enumerate(names)]


def _check_names(names: list[str], file: str, line: int) -> None:
    where = f"{file}, line {line}" if line else file
    if not names:
        raise LoadError("read_csv", f"{file} is empty", "There is not even a header.")
    if all(_numbers([n]) is not None for n in names):
        raise LoadError(
            "read_csv",
            f"{where}: the header is {', '.join(names[:4])}: numbers, not names",
            'If the file has no header, pass header=["x", "y", …].',
        )
    for i, name in enumerate(names):
        if not name or name in names[:i]:
            what = f"the name {name!r} occurs twice" if name else "there is no name"
            raise LoadError("read_csv", f"{where}, column {i + 1}: {what}", "Name every column.")


def _check_delimiter(names: list[str], file: str, line: int) -> None:
    """One name with what usually parts names in it: the file has another delimiter."""
    other = next((d for d in OTHER_DELIMITERS if d in names[0]), None)
    if len(names) == 1 and other is not None:
        raise LoadError(
            "read_csv",
            f"{file}, line {line}: the header is one name, {names[0]!r}",
            f"If {other!r} parts the columns, pass delimiter={other!r}.",
        )


def _read(rows: Iterator[tuple[int, list[str]]], columns: list[_Column], file: str) -> None:
    lines: list[int] = []
    block: list[list[str]] = []
    for line, row in rows:
        if len(row) != len(columns):
            raise LoadError(
                "read_csv",
                f"{file}, line {line}: {len(row)} fields for {len(columns)} columns; the last one, "
                f"in column {len(row)}, is {row[-1]!r}",
                "Check quotes and the delimiter there.",
            )
        lines.append(line)
        block.append(row)
        if len(block) == ROWS:
            _flush(lines, block, columns, file)
            lines, block = [], []
    if block:
        _flush(lines, block, columns, file)
    for column in columns:
        if column.kind is None:
            column.decide(float, file)


def _flush(lines: list[int], block: list[list[str]], columns: list[_Column], file: str) -> None:
    for column, values in zip(columns, zip(*block, strict=True), strict=True):
        column.add(values, lines, file)


def columns_matrix(
    table: Mapping[str, np.ndarray], columns: Sequence[str] | None = None
) -> np.ndarray:
    """Columns of numbers side by side as float32 (rows, columns), in the order given."""
    is_list = isinstance(columns, (list, tuple))
    if not isinstance(table, Mapping) or not (columns is None or is_list):
        raise ArgumentError(
            "columns_matrix",
            f"the table is a {type(table).__name__}, columns = {columns!r}",
            "Pass what read_csv gave, and a list of names.",
        )
    names = list(table) if columns is None else list(columns)
    missing = [n for n in names if n not in table]
    if missing or not names:
        raise ArgumentError(
            "columns_matrix",
            f"there is no column {', '.join(map(repr, missing))}" if missing else "no columns",
            f"Columns are {', '.join(table)}.",
        )
    text = [n for n in names if table[n].dtype.kind not in "biuf"]
    if text:
        raise DTypeError(
            "columns_matrix",
            f"{', '.join(text)}: text, not numbers",
            "Encode it with OneHotEncoder or LabelEncoder, or leave it out.",
        )
    for name in names:
        _check_column(name, table[name])
    return np.stack([table[n] for n in names], axis=1).astype(np.float32)


def _check_column(name: str, column: np.ndarray) -> None:
    """That a column is the same after rounding to float32, and whole."""
    masked, lost = lost_mask(column), lost_range(column, float32)
    if masked is not None:
        raise ArgumentError("columns_matrix", f"{name} {masked}", FILL)
    if lost is not None:
        row = int(np.argmax(np.isinf(rounded(column, float32.numpy)) & np.isfinite(column)))
        cause = f"{name} {lost} (row {row})"
        raise ArgumentError("columns_matrix", cause, "Scale the column first, or leave it out.")
