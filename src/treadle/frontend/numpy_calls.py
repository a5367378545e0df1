"""NumPy's functions called with tensors: those that have a counterpart are that counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from treadle.base.errors import TraceError
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import (
    elementary,
    indexing,
    linear,
    powers,
    reductions,
    sequences,
    shaping,
)
from treadle.frontend.tensor import Operators, Placeholder, Tensor

_SAME = "exp expm1 log log1p log2 sqrt square reciprocal sin cos tanh sign floor ceil isnan"
_SAME += " isfinite maximum minimum remainder floor_divide"
_SAME += " logical_and logical_or logical_xor logical_not"
_ELEMENTARY = "log10 tan sinh cosh trunc isinf logaddexp hypot"

UFUNCS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(a, name) for name in _SAME.split()},
    **{name: getattr(elementary, name) for name in _ELEMENTARY.split()},
    "add": a.add,
    "subtract": a.sub,
    "multiply": a.mul,
    "divide": a.div,
    "mod": a.remainder,
    "power": powers.pow,
    "float_power": a.pow,
    "matmul": linear.matmul,
    "negative": a.neg,
    "positive": lambda x: a.mul(x, 1),
    "absolute": a.abs,
    "fabs": a.abs,
    "rint": a.round,
    "equal": a.eq,
    "not_equal": a.ne,
    "less": a.lt,
    "less_equal": a.le,
    "greater": a.gt,
    "greater_equal": a.ge,
    "bitwise_and": a.bitwise_and,
    "bitwise_or": a.bitwise_or,
    "bitwise_xor": a.bitwise_xor,
    "invert": a.bitwise_not,
    "arctan2": a.atan2,
    "arctan": elementary.atan,
    "arcsin": elementary.asin,
    "arccos": elementary.acos,
    "arcsinh": elementary.asinh,
    "arccosh": elementary.acosh,
    "arctanh": elementary.atanh,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": reductions.sum,
    "mean": reductions.mean,
    "max": reductions.max,
    "amax": reductions.max,
    "min": reductions.min,
    "amin": reductions.min,
    "prod": reductions.prod,
    "argmax": reductions.argmax,
    "argmin": reductions.argmin,
    "cumsum": reductions.cumsum,
    "cumprod": sequences.cumprod,
    "any": reductions.any,
    "all": reductions.all,
    "reshape": shaping.reshape,
    "concatenate": shaping.concat,
    "stack": shaping.stack,
    "squeeze": shaping.squeeze,
    "expand_dims": shaping.unsqueeze,
    "moveaxis": shaping.moveaxis,
    "flip": shaping.flip,
    "where": a.where,
    "clip": a.clamp,
    "take": indexing.take,
    "take_along_axis": indexing.take_along_axis,
    "einsum": linear.einsum,
    "dot": linear.matmul,
    "outer": sequences.outer,
    "zeros_like": shaping.zeros_like,
    "ones_like": shaping.ones_like,
    "nan_to_num": elementary.nan_to_num,
    "tril": shaping.tril,
    "triu": shaping.triu,
}


def call_ufunc(self: Any, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """`np.sin(x)`, and operators with a NumPy array on the left."""
    if "out" in options:
        return NotImplemented  # an array cannot hold what is traced
    found = UFUNCS.get(ufunc.__name__) if method == "__call__" and not options else None
    if found is None:
        raise _without_counterpart(ufunc.__name__, method)
    return found(*inputs)


def call_function(
    self: Any,
    function: Callable[..., Any],
    types: Any,
    given: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """`np.sum(x)`: NumPy's own for eager tensors, its counterpart for traced ones."""
    if not any(_is_traced(leaf) for leaf in _leaves([*given, *named.values()])):
        arrays = [_as_arrays(x) for x in given]
        return function(*arrays, **{n: _as_arrays(x) for n, x in named.items()})
    found = FUNCTIONS.get(function.__name__)
    if found is None:
        raise _without_counterpart(function.__name__, "__call__")
    return found(*given, **named)


def _without_counterpart(name: str, method: str) -> TraceError:
    shown = f"np.{name}" if method == "__call__" else f"np.{name}.{method}"
    return TraceError(
        shown,
        "NumPy computes with numbers, and a tensor that is traced has none yet",
        "Use a function of td, or a method of the tensor; docs/functions.md lists them.",
    )


def _leaves(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, (list, tuple)) else [value]
    return found


def _is_traced(value: Any) -> bool:
    tensor = value.tensor() if isinstance(value, Placeholder) else value
    return isinstance(tensor, Tensor) and not isinstance(tensor.handle, np.ndarray)


def _as_arrays(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_arrays, value))
    return np.asarray(value) if isinstance(value, (Tensor, Placeholder)) else value


def attach() -> None:
    setattr(Operators, "__array_ufunc__", call_ufunc)  # noqa: B010
    setattr(Operators, "__array_function__", call_function)  # noqa: B010


attach()
