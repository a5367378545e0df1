"""Columns of Arrow as arrays: without a copy where Arrow holds them as NumPy would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, DTypeError, LoadError

Columns = Sequence[str] | Mapping[str, str | Sequence[str]] | None
Fill = float | Mapping[str, float] | None
Named = dict[str, str | tuple[str, ...]]  # arrays of a batch: a column, or several side by side
ENCODE = (
    "Encode it first, with td.data.LabelEncoder or OneHotEncoder or a tokenizer, or leave it out: "
    "columns=[…]."
)


def pyarrow(operation: str) -> Any:
    """The package, or an error that says how to get it."""
    try:
        import pyarrow as found
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        remedy = 'Install it: pip install "treadle[tables]".'
        raise ArgumentError(operation, "PyArrow is not installed", remedy) from error
    assert pyarrow.compute
    assert pyarrow.parquet
    return found


def chosen_columns(operation: str, columns: Columns, known: Sequence[str]) -> Named:
    """Which columns make which arrays of a batch."""
    if columns is None:
        named: Named = {name: name for name in known}
    elif isinstance(columns, Mapping):
        named = {str(n): c if isinstance(c, str) else tuple(c) for n, c in columns.items()}
    elif isinstance(columns, str):
        raise ArgumentError(operation, f"columns = {columns!r}", f"A list: columns=[{columns!r}].")
    else:
        named = {name: name for name in columns}
    asked = [c for parts in named.values() for c in ((parts,) if isinstance(parts, str) else parts)]
    double = [c for c in asked if list(known).count(c) > 1]
    if double:
        cause = f"there are several columns {double[0]!r}"
        raise ArgumentError(operation, cause, "Give them names of their own.")
    unknown = [c for c in asked if c not in known]
    if unknown or not asked or () in named.values():
        cause = f"there is no column {', '.join(map(repr, unknown))}" if unknown else "no columns"
        raise ArgumentError(operation, cause, f"There are: {', '.join(known)}.")
    return named


def needed(named: Named) -> list[str]:
    """The columns that are read, each once."""
    parts = [(p,) if isinstance(p, str) else p for p in named.values()]
    return list(dict.fromkeys(name for part in parts for name in part))


def check_fill(operation: str, fill: object, known: Sequence[str]) -> None:
    """A number for all columns, or numbers by their names."""
    given = fill if isinstance(fill, Mapping) else {}
    unknown = [n for n in given if n not in known]
    numbers = list(given.values()) if isinstance(fill, Mapping) else [fill]
    is_number = all(n is None or isinstance(n, (bool, int, float, np.number)) for n in numbers)
    if unknown or not is_number:
        remedy = "A number for what is null, or a dict of numbers by column."
        raise ArgumentError(operation, f"fill = {fill!r}", remedy)


def batch_arrays(operation: str, table: Any, named: Named, fill: Fill) -> dict[str, np.ndarray]:
    """The arrays of a batch from the columns of a table."""
    missing = [n for n in needed(named) if n not in table.column_names]
    if missing:
        cause = f"there is no column {missing[0]!r} after all"
        raise LoadError(operation, cause, "The file is damaged: use another copy.")
    columns = {n: column_array(operation, n, table.column(n), fill) for n in needed(named)}
    return {
        name: columns[parts]
        if isinstance(parts, str)
        else _side_by_side(operation, [(p, columns[p]) for p in parts])
        for name, parts in named.items()
    }


def _side_by_side(operation: str, columns: Sequence[tuple[str, np.ndarray]]) -> np.ndarray:
    shapes = {a.shape[1:] for _, a in columns}
    if len(shapes) > 1:
        shown = ", ".join(f"{n}: {a.shape[1:]}" for n, a in columns)
        cause = f"columns side by side have elements of different shapes: {shown}"
        raise ArgumentError(operation, cause, "Put them into arrays of their own.")
    return np.stack([a for _, a in columns], axis=1)


def column_array(operation: str, name: str, column: Any, fill: Fill) -> np.ndarray:
    """A column (n,), or of lists of one length (n, length); what is no number is refused."""
    pa = pyarrow(operation)
    if isinstance(column, pa.ChunkedArray):
        parts = [_chunk(operation, name, c, fill, pa) for c in column.chunks]
        if len({p.shape[1:] for p in parts}) > 1:
            shown = ", ".join(sorted({str(p.shape[1:]) for p in parts}))
            raise _uneven(operation, name, shown)
        if not parts:
            parts = [_chunk(operation, name, pa.array([], column.type), fill, pa)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return _chunk(operation, name, column, fill, pa)


def _chunk(operation: str, name: str, array: Any, fill: Fill, pa: Any) -> np.ndarray:
    type_ = array.type
    if isinstance(type_, pa.FixedShapeTensorType):
        flat = _chunk(operation, name, array.storage, fill, pa)
        order = [0, *(1 + axis for axis in _axes(operation, name, type_))]
        return np.ascontiguousarray(flat.reshape(len(array), *type_.shape).transpose(order))
    if isinstance(type_, pa.BaseExtensionType):
        return _chunk(operation, name, array.storage, fill, pa)
    array = _filled(operation, name, array, fill, pa)
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    if is_list or pa.types.is_fixed_size_list(type_):
        return _lists(operation, name, array, fill, pa)
    if pa.types.is_boolean(type_):  # bits, which NumPy has no arrays of
        return np.asarray(array.to_numpy(zero_copy_only=False), np.bool_)
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return np.asarray(array.to_numpy(zero_copy_only=True))
    raise _refused(operation, name, type_, pa)


def _axes(operation: str, name: str, type_: Any) -> list[int]:
    """Which axis in memory each axis of a column's tensors is.

    Arrow's format says that this is the permutation, but PyArrow writes its inverse for arrays with
    permuted strides, and reads back neither: only one that is its own inverse has one meaning.
    """
    order = list(range(len(type_.shape))) if type_.permutation is None else type_.permutation
    if np.argsort(order).tolist() != order:
        cause = f"the column {name!r} has tensors with the permutation {order}, which is read in "
        cause += "two ways: as Arrow's format has it, and as PyArrow writes it"
        remedy = "Cast it first, column.cast(column.type.storage_type), and reshape and "
        remedy += "transpose the batches yourself."
        raise DTypeError(operation, cause, remedy)
    return order


def _lists(operation: str, name: str, array: Any, fill: Fill, pa: Any) -> np.ndarray:
    """Lists of one length as rows."""
    values = _chunk(operation, name, array.flatten(), fill, pa)
    if pa.types.is_fixed_size_list(array.type):
        length = array.type.list_size
    else:
        lengths = np.asarray(array.value_lengths().to_numpy(zero_copy_only=False))
        length = int(lengths[0]) if len(lengths) else 0
        if len(lengths) and (lengths != length).any():
            raise _uneven(operation, name, f"{lengths.min()} to {lengths.max()}")
    return values.reshape(len(array), length, *values.shape[1:])


def _uneven(operation: str, name: str, lengths: str) -> LoadError:
    return LoadError(
        operation,
        f"the column {name!r} has lists of different lengths: {lengths}",
        "Rows of a batch have one shape: pad or cut them first.",
    )


def _filled(operation: str, name: str, array: Any, fill: Fill, pa: Any) -> Any:
    """Without nulls."""
    if not array.null_count:
        return array
    value = fill.get(name) if isinstance(fill, Mapping) else fill
    is_nested = pa.types.is_nested(array.type)
    if value is None or is_nested:
        row = int(np.argmax(np.asarray(array.is_null().to_numpy(zero_copy_only=False))))
        what = "lists" if is_nested else "values"
        remedy = (
            "Drop those rows first." if is_nested else f"Pass fill={{{name!r}: 0}}, or drop them."
        )
        cause = f"{array.null_count} {what} of the column {name!r} are null, the first in row {row}"
        raise LoadError(operation, cause, remedy)
    try:
        return pa.compute.fill_null(array, pa.scalar(value).cast(array.type))
    except pa.ArrowInvalid as error:
        cause = f"the column {name!r} is {array.type}, which cannot hold {value!r}"
        raise LoadError(operation, cause, "Fill it with another number.") from error


def _refused(operation: str, name: str, type_: Any, pa: Any) -> DTypeError:
    """What a column is that is no array of numbers, and what to do."""
    types = pa.types
    remedy = "Convert it to numbers first, or leave it out: columns=[…]."
    if types.is_temporal(type_):
        remedy = f'Cast it to numbers first: pc.cast(table["{name}"], "int64"), or leave it out.'
    elif types.is_decimal(type_):
        remedy = f'Cast it first: pc.cast(table["{name}"], "float64").'
    elif types.is_struct(type_):
        remedy = "Take its fields as columns first: table.flatten()."
    elif not types.is_nested(type_):
        remedy = ENCODE
    return DTypeError(operation, f"the column {name!r} is {type_}, not numbers", remedy)


def check_type(operation: str, name: str, type_: Any) -> None:
    """That a column can be an array, from its type alone: before any row is read."""
    pa = pyarrow(operation)
    while True:
        if isinstance(type_, pa.BaseExtensionType):
            if isinstance(type_, pa.FixedShapeTensorType):
                _axes(operation, name, type_)
            type_ = type_.storage_type
        elif any(
            is_kind(type_)
            for is_kind in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        ):
            type_ = type_.value_type
        else:
            break
    numbers = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)
    if not any(is_kind(type_) for is_kind in numbers):
        raise _refused(operation, name, type_, pa)
