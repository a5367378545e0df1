"""Gives tensors their operators and methods, once the functions exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import indexing, linear, reductions, shaping
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Operators, Tensor


def _swapped(function: Callable[[Operand, Operand], Tensor]) -> Callable[[Tensor, Operand], Tensor]:
    return lambda self, other: function(other, self)


_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "add": a.add,
    "sub": a.sub,
    "mul": a.mul,
    "truediv": a.div,
    "floordiv": a.floor_divide,
    "mod": a.remainder,
    "pow": a.pow,
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


def _reversed_axes(self: Operand) -> Tensor:
    """All axes in reverse order, as NumPy's T."""
    x = as_tensor(self)
    return shaping.permute(x, tuple(reversed(range(x.ndim)))) if x.ndim else x


def _unless_mean(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Leave a mean on the right to its own operator, which keeps its weight."""

    def method(self: Operand, other: Operand) -> Tensor:
        return NotImplemented if isinstance(other, Mean) else function(self, other)

    return method


def attach() -> None:
    for name, function in _BINARY.items():
        setattr(Operators, f"__{name}__", _unless_mean(function))
        setattr(Operators, f"__r{name}__", _swapped(function))
    for name, method in _METHODS.items():
        setattr(Operators, name, method)
    setattr(Operators, "T", property(_reversed_axes))  # noqa: B010


attach()
