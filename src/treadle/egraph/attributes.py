"""Attributes of ops as fields of plain values, which rules speak of, and back.

Dtypes go by their names. A contraction has lists of labels; a constant a number, shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir import literal
from treadle.ir.op import NONE, Attributes, Op
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.ops.linear import CONTRACT, Contraction, canonical_spec
from treadle.ir.types import TensorType

Fields = Mapping[str, Any]


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def fields_of(attributes: Attributes) -> Fields:
    """What rules may say about attributes."""
    if isinstance(attributes, Contraction):
        x, y, out = map(tuple, attributes.labels)
        return {"x": x, "y": y, "out": out, "dtype": attributes.dtype.name}
    if isinstance(attributes, Constant):
        type_ = attributes.type
        value = None if isinstance(attributes.value, literal.ArrayLiteral) else attributes.value
        return {"value": value, "shape": type_.shape, "dtype": type_.dtype.name}
    kind: type = type(attributes)
    return {n: _plain(getattr(attributes, n)) for n in _names(kind)}


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, DType) else value


def attributes_of(op: Op, given: Fields) -> Attributes:
    """The attributes of an op that has these fields."""
    special = _SPECIAL.get(op)
    if special is not None:
        return special(given)
    if not op.has_attributes:
        return NONE
    return op.attributes(**{n: _typed(n, v) for n, v in given.items()})


def _typed(name: str, value: Any) -> Any:
    return dtypes.EVERY[value] if name == "dtype" else value


def _contraction(given: Fields) -> Attributes:
    x, y, out = ("".join(given[n]) for n in ("x", "y", "out"))
    return Contraction(canonical_spec(x, y, out), dtypes.EVERY[given["dtype"]])


def _constant(given: Fields) -> Attributes:
    type_ = TensorType(tuple(given["shape"]), dtypes.EVERY[given["dtype"]])
    return Constant(given["value"], type_)


_SPECIAL: dict[Op, Callable[[Fields], Attributes]] = {
    CONTRACT: _contraction,
    CONSTANT: _constant,
}
