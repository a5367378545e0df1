"""Leaves: where values come from."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, AxisError, ShapeError
from treadle.base.shapes import Shape
from treadle.ir.contract import Contract, Determinism, Exact
from treadle.ir.literal import ArrayLiteral, Number, number_key
from treadle.ir.op import Attributes, Op, Precision, Types, declare
from treadle.ir.types import TensorType

MOVE = Contract(Exact(), determinism=Determinism.EVERYWHERE)


@dataclass(frozen=True, slots=True)
class Leaf(Attributes):
    """A value that is given by name when the graph runs."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Attributes):
    """A number spread over a shape, or an array. Exact until it is lowered."""

    value: Number | ArrayLiteral
    type: TensorType

    def _key(self) -> tuple[object, TensorType]:
        value = self.value
        return (value if isinstance(value, ArrayLiteral) else number_key(value)), self.type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Iota(Attributes):
    """0, 1, 2, … along one axis."""

    axis: int
    shape: Shape
    dtype: DType


def _leaf_type(attributes: Leaf) -> Types:
    return (attributes.type,)


def _constant_type(attributes: Constant) -> Types:
    value, type_ = attributes.value, attributes.type
    if isinstance(value, ArrayLiteral):
        if value.array.shape != type_.shape or value.dtype is not type_.dtype:
            raise ShapeError("constant", f"an array {value!r} cannot have the type {type_}")
    elif type_.dtype.is_integer:
        low, high = type_.dtype.range()
        if (
            value != value
            or value in (float("inf"), float("-inf"))
            or not low <= value <= high
            or value % 1
        ):
            cause = f"{value!r} is not a {type_.dtype} (integers from {low} to {high})"
            raise ArgumentError("constant", cause, "Use a wider dtype or a value that fits.")
    elif type_.dtype.is_float and not isinstance(value, float):
        _check_float(value)
    return (type_,)


def _check_float(value: int | Fraction) -> None:
    """Whole numbers and fractions have no limit in Python, floats have one."""
    try:
        float(value)
    except OverflowError as error:
        digits = f"a number of about 2^{int(value).bit_length() - 1}"
        raise ArgumentError(
            "constant", f"{digits} is beyond every float", "Use a value that fits."
        ) from error


def _iota_type(attributes: Iota) -> Types:
    if not 0 <= attributes.axis < len(attributes.shape):
        raise AxisError("iota", f"axis {attributes.axis} of the shape {attributes.shape}")
    if attributes.dtype is dtypes.bool_:
        raise ArgumentError("iota", "bool cannot count", "Use an integer or a float dtype.")
    return (TensorType(attributes.shape, attributes.dtype),)


INPUT = declare(Op("input", Leaf, _leaf_type, Precision.FOLLOW, MOVE))
PARAMETER = declare(Op("parameter", Leaf, _leaf_type, Precision.FOLLOW, MOVE))
STATE = declare(Op("state", Leaf, _leaf_type, Precision.FOLLOW, MOVE))
CONSTANT = declare(
    Op(
        "constant",
        Constant,
        _constant_type,
        Precision.FOLLOW,
        Contract(Exact(), "rounded once, to nearest even", determinism=Determinism.EVERYWHERE),
    )
)
IOTA = declare(Op("iota", Iota, _iota_type, Precision.FOLLOW, MOVE))

NAMED_LEAVES = (INPUT, PARAMETER, STATE)
