"""Configurations: frozen values with the names of config.json, checked by the types of fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from treadle.base.errors import ArgumentError

MOST = 2**31 - 1  # the greatest size, count or token that a configuration may name
FAR = 1e30  # NaN and infinities are not nearer
MOST_LAYERS = 10_000  # blocks and experts together: each is a Python object before any is loaded

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """What `transformers` calls a configuration. Keys that are not fields are left alone."""

    model_type: str = ""

    @classmethod
    def read(cls, given: Json) -> Self:
        """From the content of config.json; what is not there has its default."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: _as_field(v) for k, v in given.items() if k in known})

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in _hints(kind).items():
            value = getattr(self, name)
            if not any(_fits(value, kind) for kind in _kinds(hint)):
                raise self.wrong(name, f"It is {_shown(hint)}.")
        self.check()

    def check(self) -> None:
        """Refuse what the fields' types allow and the model does not."""

    def json(self) -> dict[str, Any]:
        """What config.json says of this model."""
        return {f.name: _as_json(getattr(self, f.name)) for f in fields(self)}

    def wrong(self, name: str, remedy: str) -> ArgumentError:
        value = getattr(self, name)
        return ArgumentError(type(self).__name__, f"{name} = {_short(value)}", remedy)

    def need(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            raise self.wrong(name, remedy)

    def need_divisor(self, whole: str, part: str) -> None:
        """One size is a multiple of another."""
        a, b = getattr(self, whole), getattr(self, part)
        self.need(a % b == 0, whole, f"It is a multiple of {part}, {b}.")

    def need_layers(self, count: int, name: str) -> None:
        self.need(count <= MOST_LAYERS, name, f"At most {MOST_LAYERS} blocks are built.")


def _as_field(value: Any) -> Any:
    return tuple(_as_field(v) for v in value) if isinstance(value, list) else value


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _as_json(v) for k, v in value.items()}
    return [_as_json(v) for v in value] if isinstance(value, tuple) else value


@cache
def _hints(config: Any) -> dict[str, Any]:
    named = {f.name for f in fields(config)}
    return {n: h for n, h in get_type_hints(config).items() if n in named}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is UnionType else (hint,)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is one of a kind; whole numbers are sizes, from 0."""
    if kind is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and -FAR < value < FAR  # type: ignore[operator]
    if kind is int:
        return type(value) is int and 0 <= value <= MOST
    if get_origin(kind) is tuple:
        each = get_args(kind)[0]
        return isinstance(value, tuple) and all(_fits(v, each) for v in value)
    if kind is NoneType:
        return value is None
    return isinstance(value, get_origin(kind) or kind)


def _shown(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    names |= {NoneType: "null"}
    return " or ".join(
        names.get(k, "a list" if get_origin(k) is tuple else "an object") for k in _kinds(hint)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
