"""Readers of what a file says: every value is checked, every size limited before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 2**62  # of an integer
MOST_ITEMS = 2**20  # of a list
MOST_DEPTH = 64  # of lists in lists, and of graphs in graphs
MOST_BYTES = 2**26  # of a file
MOST_VALUES = 2**23  # in a file
MOST_ELEMENTS = 2**40  # of a tensor: nothing of that size is ever made


class Rejected(Exception):  # noqa: N818
    """What a certificate says is wrong, or not what a certificate may say."""


class Unreadable(Rejected):
    """It is no certificate, or one that nobody should spend time on."""


class NotEstablished(Exception):  # noqa: N818
    """Nothing is known to be wrong; the reason says why it is not known to be right."""


def integer(value: object, least: int = 0, most: int = LARGEST, what: str = "a number") -> int:
    if type(value) is not int or not least <= value <= most:
        raise Unreadable(f"{what} is {_short(value)}, not an integer from {least} to {most}")
    return value


def string(value: object, most: int = 10_000, what: str = "a name") -> str:
    if type(value) is not str or len(value) > most:
        raise Unreadable(f"{what} is {_short(value)}, not a string of at most {most} characters")
    return value


def boolean(value: object, what: str = "a flag") -> bool:
    if type(value) is not bool:
        raise Unreadable(f"{what} is {_short(value)}, not true or false")
    return value


def items(value: object, most: int = MOST_ITEMS, what: str = "a list") -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise Unreadable(f"{what} is {_short(value)}, not a list of at most {most}")
    return value


def row(value: object, length: int, what: str = "a row") -> list[Any]:
    """A list of exactly so many items."""
    if type(value) is not list or len(value) != length:
        raise Unreadable(f"{what} is {_short(value)}, not a list of {length}")
    return value


def integers(
    value: object, least: int = 0, most: int = LARGEST, what: str = "numbers"
) -> tuple[int, ...]:
    return tuple([integer(v, least, most, what) for v in items(value, MOST_ITEMS, what)])


def record(value: object, *fields: str, what: str = "a record") -> dict[str, Any]:
    """An object of exactly these fields."""
    if type(value) is not dict or value.keys() != set(fields):
        found = f"the fields {_short(sorted(value))}" if type(value) is dict else _short(value)
        raise Unreadable(f"{what} has {found}, not {', '.join(fields)}")
    return value


def one_of(value: object, allowed: Mapping[str, T], what: str = "a name") -> T:
    """What a name stands for: an unknown one is refused."""
    name = string(value, 100, what)
    if name not in allowed:
        raise Unreadable(f"{what} is {_short(name)}, which this checker does not know")
    return allowed[name]


def each(
    value: object, read: Callable[[Any], T], most: int = MOST_ITEMS, what: str = "a list"
) -> list[T]:
    return [read(v) for v in items(value, most, what)]


def parsed(text: bytes) -> Any:
    """JSON of bounded size and depth. Duplicate fields, NaN and huge numbers are refused."""
    if len(text) > MOST_BYTES:
        raise Unreadable(f"{len(text)} bytes, more than {MOST_BYTES}")
    # Every value of a document but one stands behind a comma or a bracket: counting is cheap.
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise Unreadable(f"more than {MOST_VALUES} values")
    try:
        found = json.loads(
            text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=_constant
        )
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"it is not JSON: {_short(str(error))}") from error
    _check_depth(found)
    return found


def _check_depth(found: object) -> None:
    level, depth = [found], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise Unreadable(f"lists in lists of more than {MOST_DEPTH} levels")
        nested = [v for v in level if type(v) in (list, dict)]
        level = [w for v in nested for w in (v.values() if type(v) is dict else v)]  # type: ignore[attr-defined]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field stands twice in an object")
    return found


def _integer(text: str) -> int:
    if len(text) > 400:
        raise ValueError("a number of too many digits")
    return int(text)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _short(value: object) -> str:
    """A few characters of anything."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."
