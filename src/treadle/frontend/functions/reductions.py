"""Reductions, running sums and ordering."""

from __future__ import annotations

import math
from typing import Any

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.binding import summed_shards
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import (
    abs,
    eq,
    logical_not,
    maximum,
    minimum,
    ne,
    pow,
    sqrt,
    where,
)
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
from treadle.frontend.tensor import Axes, Operand, Placeholder, Tensor
from treadle.ir import composites as c
from treadle.ir.op import NONE, Op
from treadle.ir.ops import reductions as r
from treadle.ir.types import as_dtype


def kept_shape(x: Tensor, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


def _number(x: Operand) -> Tensor:
    """bool counts as int32."""
    x = as_tensor(x)
    return cast_to(x, dtypes.int32) if x.dtype is dtypes.bool_ else x


def accumulated(x: Operand, dtype: object = None) -> Tensor:
    """The operand of a sum or product in the dtype of its result.

    Floats keep theirs. Integers and bool become int64, as in PyTorch, unless a dtype is given.
    """
    x = as_tensor(x)
    if dtype is not None:
        wanted = as_dtype(dtype)
        return cast_to(x, dtypes.int32 if wanted is dtypes.bool_ else wanted)
    return x if x.dtype.is_float else cast_to(x, dtypes.int64)


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
def sum(x: Operand, axis: Axes = None, keepdims: bool = False, dtype: object = None) -> Tensor:
    """Added up over axes, or over all. Sums of integers and bool are int64, as PyTorch's.

    `dtype` casts x before it is added up.
    """
    return _reduce(r.REDUCE_SUM, "sum", accumulated(x, dtype), axis, keepdims)


def shard_sum(x: Operand) -> Tensor:
    """Added up over the shards of a data-parallel step; x itself where there is one."""
    value = as_tensor(x)
    return value if summed_shards() == 1 else bind1(r.SHARD_SUM, NONE, value)


@takes_dim
def max(x: Operand, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The greatest over axes; ties share the gradient evenly, as torch.amax.

    `max(x, y)` of two tensors is `maximum`, as in PyTorch.
    """
    if isinstance(axis, (Tensor, Placeholder)):
        return maximum(x, axis)
    return _extreme(r.REDUCE_MAX, "max", x, axis, keepdims)


@takes_dim
def min(x: Operand, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The least over axes; ties share the gradient evenly, as torch.amin.

    `min(x, y)` of two tensors is `minimum`, as in PyTorch.
    """
    if isinstance(axis, (Tensor, Placeholder)):
        return minimum(x, axis)
    return _extreme(r.REDUCE_MIN, "min", x, axis, keepdims)


def _extreme(op: Op, name: str, x: Operand, axis: Axes, keepdims: bool) -> Tensor:
    given = as_tensor(x)
    _not_empty(name, given, axis)
    return cast_to(_reduce(op, name, _number(given), axis, keepdims), given.dtype)


@takes_dim
def prod(x: Operand, axis: Axes = None, keepdims: bool = False, dtype: object = None) -> Tensor:
    """Multiplied over axes; the gradient is right with zeros among the factors.

    Products of integers and bool are int64, as PyTorch's. `dtype` casts x first.
    """
    return _reduce(r.REDUCE_PROD, "prod", accumulated(x, dtype), axis, keepdims)


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
def mean(x: Operand, axis: Axes = None, keepdims: bool = False, dtype: object = None) -> Tensor:
    """The mean over axes. `dtype` casts x first."""
    x = _real("mean", x if dtype is None else cast_to(as_tensor(x), as_dtype(dtype)))
    axes = axes_of("mean", axis, x)
    result = bind1(c.MEAN, c.Axes(axes), x)
    return reshape(result, kept_shape(x, axes)) if keepdims else result


@takes_dim
def var(
    x: Operand,
    axis: Axes = None,
    correction: int | None = 1,
    keepdims: bool = False,
    unbiased: bool | None = None,
) -> Tensor:
    """The variance over axes, divided by n − correction as torch.var does.

    `unbiased` is PyTorch's name for a correction of 1 or 0; `x.var(False)` is that too.
    """
    if isinstance(axis, bool):
        axis, unbiased = None, axis
    correction = 1 if correction is None else correction
    if unbiased is not None:
        if not isinstance(unbiased, bool):
            raise ArgumentError("var", f"unbiased is {unbiased!r}", "It is True or False.")
        correction = int(unbiased)
    x = _real("var", x)
    axes = axes_of("var", axis, x)
    freedom = number_of("var", "correction", correction)
    result = bind1(c.VAR, c.Variance(axes, correction if freedom % 1 else int(freedom)), x)
    return reshape(result, kept_shape(x, axes)) if keepdims else result


@takes_dim
def std(
    x: Operand,
    axis: Axes = None,
    correction: int | None = 1,
    keepdims: bool = False,
    unbiased: bool | None = None,
) -> Tensor:
    """The standard deviation over axes. Its arguments are those of `var`."""
    return _root(var(x, axis, correction, keepdims, unbiased))


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
def norm(
    x: Operand, axis: Axes = None, keepdims: bool = False, p: float | str | None = 2.0
) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) over axes, or over all: the Euclidean norm unless p is given.

    p may be ±inf, 0 (how many are not 0) or "fro" (2). The second argument is the axis, where
    torch.norm has p: pass `p=` by name. The method has PyTorch's order. Norms of matrices are in
    td.linalg.
    """
    given: object = axis
    if isinstance(given, float) or given in ("fro", "nuc"):
        raise ArgumentError("norm", f"the axis is {axis!r}", f"Pass it by name: p={axis!r}.")
    if p == "nuc":
        raise ArgumentError("norm", "p is 'nuc'", 'It is td.linalg.matrix_norm(x, "nuc").')
    if isinstance(p, (bool, str)) and p != "fro":
        raise ArgumentError("norm", f"p is {p!r}", 'It is a number, or "fro".')
    return norm_over(_real("norm", x), 2.0 if p in (None, "fro") else p, axis, keepdims)


def norm_over(x: Tensor, p: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The p-norm over axes; its slope where all elements are 0 is 0."""
    order = p if p in (math.inf, -math.inf) else number_of("norm", "p", p)
    if order == 2:
        return length(x, axis, keepdims)
    size = abs(x)
    if order == math.inf:
        return max(size, axis, keepdims)
    if order == -math.inf:
        return min(size, axis, keepdims)
    if order == 0:
        return sum(cast_to(ne(x, 0), x.dtype), axis, keepdims)
    if order == 1:
        return sum(size, axis, keepdims)
    if order < 0:  # an element of 0 gives ∞, whose root is 0
        has_zero = any(eq(size, 0), axis, keepdims)
        total = sum(pow(where(eq(size, 0), 1, size), order), axis, keepdims)
        return where(has_zero, 0, pow(total, 1 / order))
    total = sum(_powered(size, order), axis, keepdims)
    is_zero = eq(total, 0)
    return where(is_zero, 0, pow(where(is_zero, 1, total), 1 / order))


def _powered(x: Tensor, p: float) -> Tensor:
    """xᵖ whose slope at 0 is 0."""
    is_zero = eq(x, 0)
    return where(is_zero, 0, pow(where(is_zero, 1, x), p))


def length(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The Euclidean norm over axes."""
    return _root(sum(x * x, axis, keepdims))


@takes_dim
def any(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Whether any is true over axes."""
    flags = cast_to(cast_to(as_tensor(x), dtypes.bool_), dtypes.int32)
    return ne(sum(flags, axis, keepdims, dtypes.int32), 0)


@takes_dim
def all(x: Operand, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Whether all are true over axes."""
    return logical_not(any(logical_not(x), axis, keepdims))


def _arg(op: Op, name: str, x: Operand, axis: int | None, keepdims: bool) -> Tensor:
    x = _number(x)
    if axis is None or (x.ndim == 0 and axis in (0, -1)):
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
def cumsum(x: Operand, axis: int, reverse: bool = False, dtype: object = None) -> Tensor:
    """Running sums along an axis; `reverse` runs from the end. The shape stays.

    Those of integers and bool are int64, as PyTorch's. `dtype` casts x first.
    """
    x = accumulated(x, dtype)
    return bind1(r.CUMSUM, r.Cumulate(axis_of("cumsum", axis, x), reverse), x)


@takes_dim
def sort(
    x: Operand, axis: int = -1, descending: bool = False, stable: bool = True
) -> tuple[Tensor, Tensor]:
    """Sorted values and their int32 indices, both of x's shape; NaN is the greatest.

    Every sort is stable; `stable` is there because PyTorch has it.
    """
    given, x = as_tensor(x), _number(x)
    values, indices = bind(r.SORT, r.Sort(axis_of("sort", axis, x), descending), x)
    return cast_to(values, given.dtype), indices


@takes_dim
def argsort(x: Operand, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The int32 indices that sort along an axis, of x's shape; stable."""
    return sort(x, axis, descending)[1]


@takes_dim
def topk(
    x: Operand, k: int, axis: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The k greatest (or least) along an axis in order, and their indices as int32: (…, A) → (…,
    k).

    They are always in order; `sorted` is there because PyTorch has it.
    """
    given, x = as_tensor(x), _number(x)
    at = axis_of("topk", axis, x)
    k = integer_of("topk", "k", k)
    if not 0 <= k <= x.shape[at]:
        raise ArgumentError(
            "topk",
            f"k = {k}, but axis {axis} of {x.type} has {x.shape[at]} elements",
            "Choose a smaller k.",
        )
    values, indices = bind(r.TOP_K, r.TopK(k, at, largest), x)
    return cast_to(values, given.dtype), indices


def count_of(x: Tensor, axes: tuple[int, ...]) -> int:
    """How many elements a reduction over `axes` takes in."""
    return math.prod(x.shape[a] for a in axes)
