"""Medians, quantiles and differences along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FRACTION, check_choice, check_number
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import as_real, isnan, where
from treadle.frontend.functions.reductions import any as any_of
from treadle.frontend.functions.reductions import sort
from treadle.frontend.functions.shaping import (
    axis_of,
    concat,
    integer_of,
    reshape,
    slice_along,
    squeeze,
    stack,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor

INTERPOLATIONS = ("linear", "lower", "higher", "nearest", "midpoint")


@takes_dim
def median(x: Operand, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The element in the middle, the lower one of two; NaN where there is one.

    Without `axis` that of all elements.
    """
    x = as_tensor(x)
    line, at = _line("median", x, axis)
    found = _with_nan(line, _element(sort(line, at)[0], at, (line.shape[at] - 1) // 2), at)
    return _kept(found, x, axis, at, keepdims)


@takes_dim
def quantile(
    x: Operand,
    q: float | Sequence[float],
    axis: int | None = None,
    keepdims: bool = False,
    interpolation: str = "linear",
) -> Tensor:
    """Below which a part q of the elements lies, between two of them if need be; NaN where there is
    one.

    Several q give a new first axis. Without `axis` it is of all elements.
    """
    check_choice("quantile", "interpolation", interpolation, INTERPOLATIONS)
    x = as_real(x)
    line, at = _line("quantile", x, axis)
    ordered, last = sort(line, at)[0], line.shape[at] - 1
    parts = list(q) if isinstance(q, (list, tuple, np.ndarray)) else None
    found = []
    for part in [q] if parts is None else parts:
        place = check_number("quantile", "q", part, FRACTION) * last
        value = _with_nan(line, _between(ordered, at, place, interpolation), at)
        found.append(_kept(value, x, axis, at, keepdims))
    return found[0] if parts is None else stack(found)


def _between(ordered: Tensor, axis: int, place: float, interpolation: str) -> Tensor:
    """What stands at a place that need not be whole."""
    low, high = math.floor(place), math.ceil(place)
    part = place - low
    if interpolation == "nearest":
        return _element(ordered, axis, round(place))  # to the even one of two, as PyTorch does
    if interpolation == "lower" or low == high:
        return _element(ordered, axis, low)
    if interpolation == "higher":
        return _element(ordered, axis, high)
    part = 0.5 if interpolation == "midpoint" else part
    below, above = (_element(ordered, axis, i) for i in (low, high))
    # From the nearer end, as PyTorch: exact there, and infinities stay.
    step = above - below
    return below + step * part if part < 0.5 else above - step * (1 - part)


@takes_dim
def diff(
    x: Operand,
    n: int = 1,
    axis: int = -1,
    prepend: Operand | None = None,
    append: Operand | None = None,
) -> Tensor:
    """Differences of neighbours along an axis, n times over: (…, A) → (…, A − n).

    `prepend` and `append` are put before and after x first.
    """
    count = integer_of("diff", "n", n)
    if count < 0:
        raise ArgumentError("diff", f"n = {count}", "It is 0 or more.")
    found = as_tensor(x)
    at = axis_of("diff", axis, found)
    if count == 0:
        return found
    parts = [as_tensor(t) for t in (prepend, found, append) if t is not None]
    found = concat(parts, at) if len(parts) > 1 else found
    for _ in range(min(count, found.shape[at])):
        size = found.shape[at]
        found = slice_along(found, at, 1, size) - slice_along(found, at, 0, size - 1)
    return found


def _line(name: str, x: Tensor, axis: int | None) -> tuple[Tensor, int]:
    """What is ordered, and along which axis."""
    line = reshape(x, -1) if axis is None else x
    at = 0 if axis is None else axis_of(name, axis, x)
    if line.shape[at] == 0:
        raise ArgumentError(name, f"{x.type} has no elements", "There is none in the middle.")
    return line, at


def _element(x: Tensor, axis: int, number: int) -> Tensor:
    return squeeze(slice_along(x, axis, number, number + 1), axis)


def _with_nan(line: Tensor, found: Tensor, axis: int) -> Tensor:
    if not line.dtype.is_float:
        return found
    return where(any_of(isnan(line), axis), math.nan, found)


def _kept(found: Tensor, x: Tensor, axis: int | None, at: int, keepdims: bool) -> Tensor:
    if not keepdims:
        return found
    shape = [1] * x.ndim if axis is None else [*x.shape[:at], 1, *x.shape[at + 1 :]]
    return reshape(found, tuple(shape))
