"""Dataclasses of plain facts as JSON, read back by the types of their fields."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from treadle.base.dtypes import EVERY, DType

T = TypeVar("T")


def to_json(value: object) -> str:
    return json.dumps(_plain(value), separators=(",", ":"))


def from_json(type_: type[T], text: str | bytes) -> T:
    """What was written; LookupError, TypeError or ValueError if it is none."""
    kind: Any = type_
    found: T = _reader(kind)(json.loads(text))
    return found


def _plain(value: Any) -> Any:
    """A record as the list of its fields."""
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return [_plain(getattr(value, f.name)) for f in fields(value)]
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


@functools.cache
def _reader(type_: Any) -> Callable[[Any], Any]:
    """The function that reads values of a type."""
    kind, parts = get_origin(type_), get_args(type_)
    if kind is UnionType:
        return lambda data: _reader(_member(parts, data))(data)
    if kind is tuple and parts[-1] is ...:
        each = _reader(parts[0])
        return lambda data: tuple(map(each, data))
    if kind is tuple:
        return lambda data: tuple(_each(parts, data))
    if type_ is DType:
        return EVERY.__getitem__
    if is_dataclass(type_):
        record: Any = type_
        return lambda data: record(*_each(_field_types(record), data))
    if issubclass(type_, Enum) or type_ is float:
        return type_
    return functools.partial(_checked, type_)


def _each(types: tuple[Any, ...], data: Any) -> Iterator[Any]:
    for type_, found in zip(types, data, strict=True):
        yield _reader(type_)(found)


def _checked(type_: type, data: Any) -> Any:
    if type(data) is not type_:
        raise TypeError(f"{data!r} is no {type_.__name__}")
    return data


def _member(types: tuple[Any, ...], data: Any) -> Any:
    """Which of some types was written: None, or the record that has as many fields."""
    if data is None:
        return NoneType
    known = [t for t in types if t is not NoneType]
    if len(known) == 1:
        return known[0]
    return {len(_field_types(t)): t for t in known}[len(data)]


@functools.cache
def _field_types(record: Any) -> tuple[Any, ...]:
    hints = get_type_hints(record)
    return tuple(hints[f.name] for f in fields(record))
