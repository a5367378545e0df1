"""Readers of what a file says: every value is checked, every size limited before it is used.

A reader takes a part of the data and gives what is made of it, or refuses. Small readers are put
together to larger ones; a class whose fields have annotations is read as these say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

Reader = Callable[[Any], Any]

MOST_ITEMS = 2**20  # of a list
MOST_DEPTH = 64  # of lists in lists
MOST_BYTES = 2**26  # of a file
MOST_VALUES = 2**23  # in a file
MOST_ELEMENTS = 2**40  # of a tensor: nothing of that size is ever made


# What hostile values may raise where no reader thought of them; whoever catches it refuses.
UNEXPECTED = ArithmeticError, LookupError, TypeError, ValueError, RecursionError, AssertionError


class Rejected(Exception):  # noqa: N818
    """What a certificate says is wrong, or not what a certificate may say."""


class Unreadable(Rejected):
    """It is no certificate, or one that nobody should spend time on."""


class NotEstablished(Exception):  # noqa: N818
    """Nothing is known to be wrong; the reason says why it is not known to be right."""


def need(holds: object, given: object, wanted: str) -> None:
    if not holds:
        raise Unreadable(f"{_short(given)} is not {wanted}")


def integer(least: int = 0, most: int = 2**60) -> Reader:
    wanted = f"an integer from {least} to {most}"

    def read(given: Any) -> Any:
        need(type(given) is int and least <= given <= most, given, wanted)
        return given

    return read


def text(most: int = 10_000) -> Reader:
    wanted = f"a string of at most {most} characters"

    def read(given: Any) -> Any:
        need(type(given) is str and len(given) <= most, given, wanted)
        return given

    return read


def flag(given: Any) -> Any:
    need(type(given) is bool, given, "true or false")
    return given


def among(known: Iterable[str]) -> Reader:
    """One of some names: an unknown one is refused."""
    names = frozenset(known)

    def read(given: Any) -> Any:
        need(type(given) is str and given in names, given, "a name that this checker knows here")
        return given

    return read


def several(reader: Reader, most: int = MOST_ITEMS) -> Reader:
    def read(given: Any) -> tuple[Any, ...]:
        need(type(given) is list and len(given) <= most, given, f"a list of at most {most}")
        return tuple([reader(x) for x in given])

    return read


def maybe(reader: Reader) -> Reader:
    return lambda given: None if given is None else reader(given)


def pair(*parts: Any) -> tuple[Any, ...]:
    return parts


def row(make: Callable[..., Any], *readers: Reader) -> Reader:
    """A list of parts, each with its reader."""

    def read(given: Any) -> Any:
        need(type(given) is list and len(given) == len(readers), given, f"{len(readers)} items")
        return make(*[reader(part) for reader, part in zip(readers, given, strict=True)])

    return read


def record(make: Callable[..., Any] = dict, **readers: Reader) -> Reader:
    """An object of exactly these fields, each with its reader."""

    def read(given: Any) -> Any:
        has_all = type(given) is dict and given.keys() == readers.keys()
        need(has_all, given, f"an object of {', '.join(readers)}")
        found = {}
        for name, reader in readers.items():
            try:
                found[name] = reader(given[name])
            except Unreadable as wrong:
                raise Unreadable(f"{name}: {wrong}") from wrong
        return make(**found)

    return read


def declared(make: type, as_record: bool = False) -> Reader:
    """A class from a list or an object of its fields, which are read as their annotations say."""
    readers: dict[str, Reader] = {}

    def read(given: Any) -> Any:
        if not readers:  # once all classes that are named are there
            plain = {str: text(), int: integer(), bool: flag}
            for name, hint in get_type_hints(make, include_extras=True).items():
                readers[name] = getattr(hint, "__metadata__", [plain.get(hint)])[0]
        reader = record(make, **readers) if as_record else row(make, *readers.values())
        return reader(given)

    return read


def one_of_kinds(kinds: dict[str, Reader]) -> Reader:
    """A list whose first item says how the others are read."""
    known = among(kinds)

    def read(given: Any) -> Any:
        need(type(given) is list and given, given, "a list that begins with its kind")
        return kinds[known(given[0])](given[1:])

    return read


def parsed(data: bytes) -> Any:
    """JSON of bounded size and depth. Duplicate fields, NaN and huge numbers are refused."""
    need(len(data) <= MOST_BYTES, len(data), f"a size of at most {MOST_BYTES} bytes")
    # Every value of a document but one stands behind a comma or a bracket: counting is cheap.
    count = sum(map(data.count, (b",", b"[", b"{")))
    need(count <= MOST_VALUES, count, f"a number of values up to {MOST_VALUES}")
    hooks: Any = {"object_pairs_hook": _unique, "parse_int": _whole, "parse_constant": _constant}
    try:
        found = json.loads(data, **hooks)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"it is not JSON: {_short(str(error))}") from error
    level, depth = [found], 0
    while level:
        depth += 1
        need(depth <= MOST_DEPTH, depth, f"a depth of at most {MOST_DEPTH} lists in lists")
        inner = [v.values() if type(v) is dict else v for v in level if type(v) in (list, dict)]
        level = [w for v in inner for w in v]
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field stands twice in an object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > 400:
        raise ValueError("a number of too many digits")
    return int(digits)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _short(value: object) -> str:
    """A few characters of anything."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    told = repr(value[:60] if isinstance(value, str) else value)
    return told if len(told) <= 80 else told[:77] + "..."
