"""Gives tensors their operators and methods, once the functions exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend import numpy_calls as numpy_calls
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import (
    activations,
    arranging,
    distances,
    elementary,
    gamma,
    incomplete_gamma,
    indexing,
    linear,
    moments,
    powers,
    reductions,
    scattering,
    segments,
    sequences,
    shaping,
    special,
    statistics,
)
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.mean import Mean
from treadle.frontend.spelling import ANSWERS, takes_dim
from treadle.frontend.tensor import Axes, Operand, Operators, Tensor


def _swapped(function: Callable[[Operand, Operand], Tensor]) -> Callable[[Tensor, Operand], Tensor]:
    return lambda self, other: function(other, self)


_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "add": a.add,
    "sub": a.sub,
    "mul": a.mul,
    "truediv": a.div,
    "floordiv": a.floor_divide,
    "mod": a.remainder,
    "pow": powers.pow,
    "matmul": linear.matmul,
    "and": a.bitwise_and,
    "or": a.bitwise_or,
    "xor": a.bitwise_xor,
}
_METHODS: dict[str, Callable[..., Any]] = {
    "astype": a.cast,
    "reshape": shaping.reshape,
    "permute": shaping.permute,
    "transpose": shaping.transpose,
    "flatten": shaping.flatten,
    "squeeze": shaping.squeeze,
    "unsqueeze": shaping.unsqueeze,
    "sum": reductions.sum,
    "mean": reductions.mean,
    "var": reductions.var,
    "max": reductions.max,
    "min": reductions.min,
    "prod": reductions.prod,
    "argmax": reductions.argmax,
    "argmin": reductions.argmin,
    "__getitem__": indexing.getitem,
    "__neg__": a.neg,
    "__abs__": a.abs,
    "__invert__": a.bitwise_not,
    "__eq__": a.eq,
    "__ne__": a.ne,
    "__lt__": a.lt,
    "__le__": a.le,
    "__gt__": a.gt,
    "__ge__": a.ge,
}


# Functions of a tensor that are methods of it too, by the same name.
_ALSO: dict[Any, str] = {
    a: "exp expm1 log log1p log2 sqrt rsqrt square reciprocal sin cos tanh erf abs neg sign floor "
    "ceil round clamp maximum minimum atan2 add sub mul div floor_divide remainder "
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isfinite cast",
    elementary: "log10 tan atan asin acos sinh cosh asinh acosh atanh trunc frac isinf "
    "nan_to_num logaddexp lerp addcmul addcdiv hypot masked_fill "
    "fmax fmin fmod copysign signbit",
    moments: "nansum nanmean count_nonzero cov corrcoef",
    arranging: "rot90 tensor_split",
    powers: "pow",
    gamma: "lgamma digamma",
    incomplete_gamma: "igamma igammac",
    special: "erfc erfinv logit xlogy",
    activations: "relu sigmoid softmax log_softmax",
    reductions: "std logsumexp any all cumsum sort argsort topk",
    sequences: "cumprod cummax cummin logcumsumexp diag diagonal kron outer repeat_interleave",
    statistics: "diff median quantile",
    segments: "scatter bincount",
    scattering: "scatter_reduce index_add index_copy index_fill index_put masked_scatter",
    shaping: "expand split chunk flip roll repeat moveaxis tril triu",
    indexing: "take take_along_axis",
    linear: "matmul cross",
    distances: "cdist",
}


def _view(self: Operand, *shape: Any) -> Tensor:
    """`reshape` by PyTorch's other name: memory is the compiler's business."""
    return shaping.reshape(self, *shape)


def _contiguous(self: Operand) -> Tensor:
    """x itself: every tensor is."""
    return as_tensor(self)


@takes_dim
def _to(self: Operand, dtype: object) -> Tensor:
    """Another dtype, or that of another tensor; devices are chosen when a program is compiled."""
    if isinstance(dtype, str) and dtype.partition(":")[0] in ("cpu", "cuda", "mps", "meta"):
        raise ArgumentError("to", f"{dtype!r} is a device", ANSWERS["device"])
    return _type_as(self, dtype) if isinstance(dtype, Tensor) else a.cast(self, dtype)


def _as(dtype: dtypes.DType) -> Callable[[Operand], Tensor]:
    """A method that gives another dtype, by PyTorch's name."""

    def method(self: Operand) -> Tensor:
        return a.cast(self, dtype)

    method.__doc__ = f"`cast` to {dtype.name}."
    method.__name__ = dtype.name
    return takes_dim(method)


@takes_dim
def _gather(self: Operand, axis: int, index: Operand) -> Tensor:
    """`take_along_axis` by PyTorch's name and order of arguments."""
    return indexing.take_along_axis(self, index, axis)


@takes_dim
def _index_select(self: Operand, axis: int, index: Operand) -> Tensor:
    """`take` by PyTorch's name and order of arguments."""
    return indexing.take(self, index, axis)


@takes_dim
def _unbind(self: Operand, axis: int = 0) -> tuple[Tensor, ...]:
    """The entries along an axis, without it."""
    x = as_tensor(self)
    at = shaping.axis_of("unbind", axis, x)
    parts = shaping.split(x, 1, at) if x.shape[at] else ()
    return tuple(shaping.squeeze(part, at) for part in parts)


@takes_dim
def _unflatten(self: Operand, axis: int, sizes: Sequence[int]) -> Tensor:
    """One axis as several; one size may be −1."""
    x = as_tensor(self)
    at = shaping.axis_of("unflatten", axis, x)
    return shaping.reshape(x, (*x.shape[:at], *sizes, *x.shape[at + 1 :]))


def _tile(self: Operand, *times: Any) -> Tensor:
    """`repeat`, where axes in front may be left out."""
    x = as_tensor(self)
    given = tuple(times[0]) if len(times) == 1 and isinstance(times[0], Sequence) else times
    return shaping.repeat(x, *(1,) * (x.ndim - len(given)), *given)


def _numel(self: Operand) -> int:
    """How many elements there are."""
    return as_tensor(self).size


def _dim(self: Operand) -> int:
    """How many axes there are."""
    return as_tensor(self).ndim


def _expand_as(self: Operand, other: Operand) -> Tensor:
    """Repeated to the shape of another tensor."""
    return shaping.expand(self, as_tensor(other).shape)


def _view_as(self: Operand, other: Operand) -> Tensor:
    """`reshape` to the shape of another tensor."""
    return shaping.reshape(self, as_tensor(other).shape)


def _type_as(self: Operand, other: Operand) -> Tensor:
    """`cast` to the dtype of another tensor."""
    return a.cast(self, as_tensor(other).dtype)


def _polygamma(self: Operand, n: int) -> Tensor:
    """`polygamma` with PyTorch's order of arguments."""
    return gamma.polygamma(n, self)


@takes_dim
def _norm(self: Operand, p: Any = 2.0, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """`norm` with PyTorch's order of arguments."""
    return reductions.norm(self, axis, keepdims, p)


def _where(self: Operand, condition: Operand, other: Operand) -> Tensor:
    """x where the condition holds, otherwise the other."""
    return a.where(condition, self, other)


def _reversed_axes(self: Operand) -> Tensor:
    """All axes in reverse order, as NumPy's T."""
    x = as_tensor(self)
    return shaping.permute(x, tuple(reversed(range(x.ndim)))) if x.ndim else x


def _t(self: Operand) -> Tensor:
    """A matrix transposed; a vector or a scalar as it is, as PyTorch's t."""
    x = as_tensor(self)
    if x.ndim > 2:
        raise ShapeError("t", f"{x.type} has more than two axes", "Use x.transpose(i, j) or x.mT.")
    return _reversed_axes(x)


def _transposed_matrices(self: Operand) -> Tensor:
    """The last two axes exchanged, as PyTorch's mT."""
    return shaping.transpose(self, -2, -1)


_MORE: dict[str, Callable[..., Any]] = {
    "norm": _norm,
    "numel": _numel,
    "dim": _dim,
    "clone": _contiguous,
    "clip": a.clamp,
    "swapaxes": shaping.transpose,
    "movedim": shaping.moveaxis,
    "unbind": _unbind,
    "unflatten": _unflatten,
    "tile": _tile,
    "where": _where,
    "polygamma": _polygamma,
    "expand_as": _expand_as,
    "view_as": _view_as,
    "type_as": _type_as,
    "view": _view,
    "contiguous": _contiguous,
    "to": _to,
    "float": _as(dtypes.float32),
    "double": _as(dtypes.float64),
    "half": _as(dtypes.float16),
    "bfloat16": _as(dtypes.bfloat16),
    "int": _as(dtypes.int32),
    "long": _as(dtypes.int64),
    "bool": _as(dtypes.bool_),
    "detach": a.stop_gradient,
    "gather": _gather,
    "index_select": _index_select,
    "scatter_add": segments.scatter_add_along,
    "mm": linear.matmul,
    "bmm": linear.matmul,
    "amax": reductions.max,
    "amin": reductions.min,
    "t": _t,
}


def _unless_mean(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Leave a mean on the right to its own operator, which keeps its weight."""

    def method(self: Operand, other: Operand) -> Tensor:
        return NotImplemented if isinstance(other, Mean) else function(self, other)

    return method


def attach() -> None:
    for name, function in _BINARY.items():
        setattr(Operators, f"__{name}__", _unless_mean(function))
        setattr(Operators, f"__r{name}__", _swapped(function))
    also = {n: getattr(module, n) for module, names in _ALSO.items() for n in names.split()}
    for name, method in (also | _MORE | _METHODS).items():
        setattr(Operators, name, method)
    setattr(Operators, "T", property(_reversed_axes))  # noqa: B010
    setattr(Operators, "mT", property(_transposed_matrices))  # noqa: B010


attach()
