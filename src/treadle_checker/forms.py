"""What makes two uses of an op the same over the reals: the op and its attributes, as one number.

Floats of all widths are one kind. Names that mean nothing (of a call, of what an op was before it
was recorded by what it reads) take no part; names of leaves are compared as text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping
from typing import Any

from treadle_checker.field import is_float
from treadle_checker.index import Index
from treadle_checker.types import Graph, Literal, Node, Read, Type

_NAMELESS = frozenset(["move", "order", "call", "adjoint"])
_known: dict[Hashable, int] = {}


def key_of(op: str, attributes: Mapping[str, Any]) -> int:
    """Equal numbers for equal uses, as long as this process runs."""
    names = sorted(attributes.keys() - {"recompute", "backward"})
    if op in _NAMELESS or op.startswith("reduce_"):
        names.remove("name") if "name" in names else None
    kinds = ((n, same_kind(attributes[n]) if n == "dtype" else _form(attributes[n])) for n in names)
    return _known.setdefault((op, *kinds), len(_known))


def same_kind(dtype: str) -> str:
    return "float" if is_float(dtype) else dtype


def _form(value: Any) -> Hashable:
    """What is compared of an attribute."""
    match value:
        case Graph():
            assert value.digest != ""
            return value.digest
        case Type():
            return same_kind(value.dtype), value.shape
        case Literal():
            return _form(value.type), hashlib.sha256(value.array.tobytes()).digest()
        case Read():
            guards = tuple((_index(i), low, high) for i, low, high in value.guards)
            return guards, _index(value.address)
        case Node():
            kinds = ((same_kind(t.dtype), t.shape) for t in value.types)
            return key_of(value.op, value.attributes), *kinds
        case tuple():
            return tuple(map(_form, value))
        case str() | bool() | None:
            return value
    is_finite = value == value and abs(value) != math.inf
    return value.as_integer_ratio() if is_finite else str(value)  # 1 and 1.0 are one number


def _index(index: Index) -> Hashable:
    return index.offset, frozenset(index.terms)
