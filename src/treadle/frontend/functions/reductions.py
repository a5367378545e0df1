"""Reductions, running sums and ordering."""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.binding import summed_shards
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import eq, logical_not, ne, sqrt, where
from treadle.frontend.functions.shaping import (
    axes_of,
    axis_of,
    flatten,
    integer_of,
    number_of,
    reshape,
)
from treadle.frontend.scopes import bind, bind1
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Axes, Operand, Tensor
from treadle.ir import composites as c
from treadle.ir.op import NONE, Op
from treadle.ir.ops import reductions as r


def kept_shape(x: Tensor, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


def _number(x: Operand) -> Tensor:
    """bool counts as int32."""
    x = as_tensor(x)
    return cast_to(x, dtypes.int32) if x.dtype is dtypes.bool_ else x


def _wide(x: Operand) -> Tensor:
    """What is added up or multiplied: bool and integers of 8 bits count as int32."""
    x = as_tensor(x)
    return cast_to(x, dtypes.int32) if x.dtype.bits <= 8 else x


def _reduce(op: Op, name: str, x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
    axes = axes_of(name, axis, x)
    result = bind1(op, r.Reduce(axes), x)
    return reshape(result, kept_shape(x, axes)) if keepdims else result


def _not_empty(name: str, x: Tensor, axis: Axes) -> None:
    if 0 in (x.shape[a] for a in axes_of(name, axis, x)):
        raise ShapeError(
            name, f"{x.type} has no elements along axis {axis}", "An empty one has no value."
        )


@takes_dim
def sum(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Added up over axes, or over all; bool and integers of 8 bits as int32."""
    return _reduce(r.REDUCE_SUM, "sum", _wide(x), axis, keepdims)


def shard_sum(x: Operand) -> Tensor:
    """Added up over the shards of a data-parallel step; x itself where there is one."""
    value = as_tensor(x)
    return value if summed_shards() == 1 else bind1(r.SHARD_SUM, NONE, value)


@takes_dim
def max(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The greatest over axes; ties share the gradient evenly, as torch.amax."""
    x = _number(x)
    _not_empty("max", x, axis)
    return _reduce(r.REDUCE_MAX, "max", x, axis, keepdims)


@takes_dim
def min(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The least over axes; ties share the gradient evenly, as torch.amin."""
    x = _number(x)
    _not_empty("min", x, axis)
    return _reduce(r.REDUCE_MIN, "min", x, axis, keepdims)


@takes_dim
def prod(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Multiplied over axes; the gradient is right with zeros among the factors."""
    return _reduce(r.REDUCE_PROD, "prod", _wide(x), axis, keepdims)


def _real(name: str, x: Operand) -> Tensor:
    x = as_tensor(x)
    if not x.dtype.is_float:
        raise DTypeError(
            name,
            f"{x.type} is not a float",
            "Cast it first, for instance with x.astype(td.float32).",
        )
    return x


@takes_dim
def mean(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The mean over axes."""
    x = _real("mean", x)
    axes = axes_of("mean", axis, x)
    result = bind1(c.MEAN, c.Axes(axes), x)
    return reshape(result, kept_shape(x, axes)) if keepdims else result


@takes_dim
def var(x: Operand, axis: Axes = None, correction: int = 1, keepdims: bool = False) -> Tensor:
    """The variance over axes, divided by n − correction as torch.var does."""
    x = _real("var", x)
    axes = axes_of("var", axis, x)
    freedom = number_of("var", "correction", correction)
    result = bind1(c.VAR, c.Variance(axes, correction if freedom % 1 else int(freedom)), x)
    return reshape(result, kept_shape(x, axes)) if keepdims else result


@takes_dim
def std(x: Operand, axis: Axes = None, correction: int = 1, keepdims: bool = False) -> Tensor:
    """The standard deviation over axes."""
    return _root(var(x, axis, correction, keepdims))


def _root(x: Tensor) -> Tensor:
    """√x whose gradient at 0 is 0, as PyTorch has it for norms and deviations."""
    is_zero = eq(x, 0)
    return where(is_zero, 0, sqrt(where(is_zero, 1, x)))


@takes_dim
def logsumexp(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """log Σ exp x over axes, without overflow."""
    x = _real("logsumexp", x)
    _not_empty("logsumexp", x, axis)
    axes = axes_of("logsumexp", axis, x)
    result = bind1(c.LOGSUMEXP, c.Axes(axes), x)
    return reshape(result, kept_shape(x, axes)) if keepdims else result


@takes_dim
def norm(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The Euclidean norm over axes."""
    x = _real("norm", x)
    return _root(sum(x * x, axis, keepdims))


@takes_dim
def any(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Whether any is true over axes."""
    flags = cast_to(cast_to(as_tensor(x), dtypes.bool_), dtypes.int32)
    return ne(sum(flags, axis, keepdims), 0)


@takes_dim
def all(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Whether all are true over axes."""
    return logical_not(any(logical_not(x), axis, keepdims))


def _arg(op: Op, name: str, x: Operand, axis: int | None, keepdims: bool) -> Tensor:
    x = _number(x)
    if axis is None:
        if x.size == 0:
            raise ShapeError(name, f"{x.type} has no elements", "An empty one has no index.")
        result = bind1(op, r.ArgReduce(0), flatten(x))
        return reshape(result, (1,) * x.ndim) if keepdims else result
    at = axis_of(name, axis, x)
    _not_empty(name, x, at)
    result = bind1(op, r.ArgReduce(at), x)
    return reshape(result, kept_shape(x, (at,))) if keepdims else result


@takes_dim
def argmax(x: Operand, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The int32 index of the greatest: the first of equals; over all elements without an axis."""
    return _arg(r.ARGMAX, "argmax", x, axis, keepdims)


@takes_dim
def argmin(x: Operand, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The int32 index of the least: the first of equals; over all elements without an axis."""
    return _arg(r.ARGMIN, "argmin", x, axis, keepdims)


@takes_dim
def cumsum(x: Operand, axis: int, reverse: bool = False) -> Tensor:
    """Running sums along an axis; `reverse` runs from the end. The shape stays."""
    x = _wide(x)
    return bind1(r.CUMSUM, r.Cumulate(axis_of("cumsum", axis, x), reverse), x)


@takes_dim
def sort(x: Operand, axis: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sorted values and their int32 indices, both of x's shape; stable, NaN is the greatest."""
    x = _number(x)
    values, indices = bind(r.SORT, r.Sort(axis_of("sort", axis, x), descending), x)
    return values, indices


@takes_dim
def argsort(x: Operand, axis: int = -1, descending: bool = False) -> Tensor:
    """The int32 indices that sort along an axis, of x's shape; stable."""
    return sort(x, axis, descending)[1]


@takes_dim
def topk(x: Operand, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k greatest (or least) along an axis in order, and their indices as int32: (…, A) → (…,
    k).
    """
    x = _number(x)
    at = axis_of("topk", axis, x)
    k = integer_of("topk", "k", k)
    if not 0 <= k <= x.shape[at]:
        raise ArgumentError(
            "topk",
            f"k = {k}, but axis {axis} of {x.type} has {x.shape[at]} elements",
            "Choose a smaller k.",
        )
    values, indices = bind(r.TOP_K, r.TopK(k, at, largest), x)
    return values, indices


def count_of(x: Tensor, axes: tuple[int, ...]) -> int:
    """How many elements a reduction over `axes` takes in."""
    return math.prod(x.shape[a] for a in axes)
