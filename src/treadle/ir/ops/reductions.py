"""Reductions, scans along an axis, and ordering."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, AxisError, DTypeError, ShapeError
from treadle.base.shapes import without
from treadle.ir.contract import Contract, Determinism, Exact, ProductError, SumError
from treadle.ir.op import Attributes, NoAttributes, Op, Precision, TypeRule, Types, declare
from treadle.ir.types import TensorType

_EXACT = Determinism.EVERYWHERE


@dataclass(frozen=True, slots=True)
class Reduce(Attributes):
    """The axes that disappear, ascending."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArgReduce(Attributes):
    """The axis that disappears; the result is int32."""

    axis: int


@dataclass(frozen=True, slots=True)
class Cumulate(Attributes):
    """Running sums along an axis; `reverse` runs from the end."""

    axis: int
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Sort(Attributes):
    """Stable; NaN counts as the greatest."""

    axis: int
    descending: bool = False


@dataclass(frozen=True, slots=True)
class TopK(Attributes):
    """The `k` greatest (or least) along an axis, in order; the lower index first at a tie."""

    k: int
    axis: int
    largest: bool = True


def check_axis(name: str, axis: int, x: TensorType) -> None:
    if not 0 <= axis < x.rank:
        raise AxisError(name, f"axis {axis} of {x}, which has {x.rank} axes")


def _number(name: str, x: TensorType) -> None:
    if x.dtype is dtypes.bool_:
        raise DTypeError(name, f"{x} is bool", "Cast it first, for instance to int32.")


def _reduce_type(name: str, needs_elements: bool) -> TypeRule:
    def infer(attributes: Reduce, x: TensorType) -> Types:
        _number(name, x)
        axes = attributes.axes
        for axis in axes:
            check_axis(name, axis, x)
        if list(axes) != sorted(set(axes)):
            raise AxisError(name, f"axes {axes} are not ascending and distinct")
        if needs_elements and any(x.shape[a] == 0 for a in axes):
            raise ShapeError(
                name, f"{x} has no elements along {axes}", "An empty maximum has no value."
            )
        return (x.with_shape(without(x.shape, axes)),)

    return infer


def _arg_type(name: str) -> TypeRule:
    def infer(attributes: ArgReduce, x: TensorType) -> Types:
        _number(name, x)
        check_axis(name, attributes.axis, x)
        if x.shape[attributes.axis] == 0:
            raise ShapeError(name, f"{x} has no elements along axis {attributes.axis}")
        return (TensorType(without(x.shape, (attributes.axis,)), dtypes.int32),)

    return infer


def _cumsum_type(attributes: Cumulate, x: TensorType) -> Types:
    _number("cumsum", x)
    check_axis("cumsum", attributes.axis, x)
    return (x,)


def _sort_type(attributes: Sort, x: TensorType) -> Types:
    _number("sort", x)
    check_axis("sort", attributes.axis, x)
    return x, x.with_dtype(dtypes.int32)


def _top_k_type(attributes: TopK, x: TensorType) -> Types:
    _number("top_k", x)
    check_axis("top_k", attributes.axis, x)
    size = x.shape[attributes.axis]
    if not 0 <= attributes.k <= size:
        raise ArgumentError(
            "top_k", f"k = {attributes.k}, but axis {attributes.axis} of {x} has {size} elements"
        )
    shape = tuple(attributes.k if i == attributes.axis else n for i, n in enumerate(x.shape))
    return x.with_shape(shape), TensorType(shape, dtypes.int32)


def _shard_sum_type(x: TensorType) -> Types:
    """Over the shards of a data-parallel step, each of which has an x."""
    if not x.is_float:
        raise DTypeError("shard_sum", f"{x} is not float", "Cast the operand first.")
    return (x,)


_NAN = "NaN if any is; at least one element"

REDUCE_SUM = declare(
    Op(
        "reduce_sum",
        Reduce,
        _reduce_type("reduce_sum", False),
        Precision.WIDEN,
        Contract(SumError(), "all values; integers wrap; narrow floats accumulate in float32"),
    )
)
SHARD_SUM = declare(
    Op(
        "shard_sum",
        NoAttributes,
        _shard_sum_type,
        Precision.WIDEN,
        Contract(Exact(), "all values; x itself where the step has one shard", "linear", _EXACT),
    )
)
REDUCE_MAX = declare(
    Op(
        "reduce_max",
        Reduce,
        _reduce_type("reduce_max", True),
        Precision.FOLLOW,
        Contract(Exact(), _NAN, "shared evenly among ties", _EXACT),
    )
)
REDUCE_MIN = declare(
    Op(
        "reduce_min",
        Reduce,
        _reduce_type("reduce_min", True),
        Precision.FOLLOW,
        Contract(Exact(), _NAN, "shared evenly among ties", _EXACT),
    )
)
REDUCE_PROD = declare(
    Op(
        "reduce_prod",
        Reduce,
        _reduce_type("reduce_prod", False),
        Precision.WIDEN,
        Contract(
            ProductError(),
            "all values; integers wrap; one rounding a factor",
            "exact with zeros among the factors",
        ),
    )
)
ARGMAX = declare(
    Op(
        "argmax",
        ArgReduce,
        _arg_type("argmax"),
        Precision.FOLLOW,
        Contract(Exact(), "the first of equals; the first NaN if any", "zero everywhere", _EXACT),
    )
)
ARGMIN = declare(
    Op(
        "argmin",
        ArgReduce,
        _arg_type("argmin"),
        Precision.FOLLOW,
        Contract(Exact(), "the first of equals; the first NaN if any", "zero everywhere", _EXACT),
    )
)
CUMSUM = declare(
    Op(
        "cumsum",
        Cumulate,
        _cumsum_type,
        Precision.WIDEN,
        Contract(SumError(), "all values; integers wrap"),
    )
)
SORT = declare(
    Op(
        "sort",
        Sort,
        _sort_type,
        Precision.FOLLOW,
        Contract(Exact(), "all values; NaN last when ascending", "follows the permutation", _EXACT),
    )
)
TOP_K = declare(
    Op(
        "top_k",
        TopK,
        _top_k_type,
        Precision.FOLLOW,
        Contract(
            Exact(), "all values; NaN counts as the greatest", "follows the chosen elements", _EXACT
        ),
    )
)
