"""Sums and means that skip NaN, counts, covariances and integrals of samples."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.coerce import as_tensor, constant
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import (
    as_real,
    clamp,
    isnan,
    logical_not,
    ne,
    sqrt,
    where,
)
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.reductions import cumsum
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.sequences import diagonal
from treadle.frontend.functions.shaping import (
    axis_of,
    number_of,
    reshape,
    slice_along,
    transpose,
    unsqueeze,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Axes, Operand, Tensor
from treadle.ir.types import as_dtype


@takes_dim
def nansum(x: Operand, axis: Axes = None, keepdims: bool = False, dtype: object = None) -> Tensor:
    """Added up over axes, NaN counting as 0."""
    value = _in_dtype(x, dtype)
    return sum_of(_without_nan(value), axis, keepdims, dtype)


@takes_dim
def nanmean(x: Operand, axis: Axes = None, keepdims: bool = False, dtype: object = None) -> Tensor:
    """The mean over axes of the elements that are not NaN; NaN where there is none."""
    value = _in_dtype(x, dtype)
    if not value.dtype.is_float:
        raise DTypeError("nanmean", f"{value.type} is not a float", "Pass dtype=td.float32.")
    wide = cast_to(value, dtypes.promote(value.dtype, dtypes.float32))
    count = sum_of(cast_to(logical_not(isnan(wide)), wide.dtype), axis, keepdims)
    return cast_to(sum_of(_without_nan(wide), axis, keepdims) / count, value.dtype)


def _in_dtype(x: Operand, dtype: object) -> Tensor:
    value = as_tensor(x)
    return value if dtype is None else cast_to(value, as_dtype(dtype))


def _without_nan(x: Tensor) -> Tensor:
    return where(isnan(x), 0, x) if x.dtype.is_float else x


@takes_dim
def count_nonzero(x: Operand, axis: Axes = None) -> Tensor:
    """The number of elements that are not 0, over axes or over all: (A, B) → (A,) for axis 1."""
    value = as_tensor(x)
    return sum_of(value if value.dtype is dtypes.bool_ else ne(value, 0), axis)


# Covariances


def cov(
    x: Operand,
    correction: int = 1,
    fweights: Operand | None = None,
    aweights: Operand | None = None,
) -> Tensor:
    """The covariance of rows, each a variable and each column a sample: (A, n) → (A, A).

    A vector is one variable: (n,) → (). The divisor is n − correction.
    """
    value = as_real(x)
    if value.ndim > 2:
        raise ShapeError("cov", f"{value.type}", "Give a vector, or a matrix of a row a variable.")
    rows = reshape(value, (1, -1)) if value.ndim < 2 else value
    n, taken = rows.shape[1], number_of("cov", "correction", correction)
    weights = _weights(n, fweights, aweights, value)
    total: Tensor | float = float(n) if weights is None else sum_of(weights)
    weighted = rows if weights is None else rows * weights
    centred = rows - sum_of(weighted, 1, keepdims=True) / total
    if aweights is not None and weights is not None and taken:
        share = sum_of(weights * as_tensor(aweights)) / total
        freedom: Tensor | float = total - share * taken
    else:
        freedom = total - taken
    divisor = clamp(freedom, min=0.0) if isinstance(freedom, Tensor) else max(0.0, freedom)
    right = centred if weights is None else centred * weights
    # A divisor of 0 gives NaN or an infinity, as in PyTorch.
    found = matmul(centred, transpose(right, 0, 1)) / constant_or(divisor, value)
    return reshape(found, ()) if rows.shape[0] == 1 else found


def constant_or(x: Tensor | float, like: Tensor) -> Tensor:
    """A number as a tensor of a dtype; a tensor in it."""
    return cast_to(x, like.dtype) if isinstance(x, Tensor) else constant(x, (), like.dtype)


def _weights(
    n: int, fweights: Operand | None, aweights: Operand | None, like: Tensor
) -> Tensor | None:
    """The product of the weights of the samples, where there are any."""
    found: Tensor | None = None
    for name, given in (("fweights", fweights), ("aweights", aweights)):
        if given is None:
            continue
        weights = as_tensor(given)
        if weights.shape != (n,):
            raise ShapeError("cov", f"{name} is {weights.type}", f"Give one of {n} samples each.")
        if weights.dtype.is_integer != (name == "fweights"):
            kind = "integers" if name == "fweights" else "floats"
            raise DTypeError("cov", f"{name} is {weights.type}", f"They are {kind}.")
        own = cast_to(weights, like.dtype)
        found = own if found is None else found * own
    return found


def corrcoef(x: Operand) -> Tensor:
    """The correlation of rows, each a variable and each column a sample: (A, n) → (A, A)."""
    found = cov(x)
    if found.ndim == 0:
        return found / found
    deviation = sqrt(diagonal(found))
    return clamp(found / unsqueeze(deviation, 1) / unsqueeze(deviation, 0), -1.0, 1.0)


# Integrals


@takes_dim
def trapezoid(
    y: Operand, x: Operand | None = None, dx: float | None = None, axis: int = -1
) -> Tensor:
    """The integral along an axis by trapezoids, of samples `dx` apart or at x: (…, A) → (…)."""
    areas, at = _trapezoids("trapezoid", y, x, dx, axis)
    return sum_of(areas, at)


@takes_dim
def cumulative_trapezoid(
    y: Operand, x: Operand | None = None, dx: float | None = None, axis: int = -1
) -> Tensor:
    """The running integral along an axis by trapezoids: (…, A) → (…, A − 1)."""
    areas, at = _trapezoids("cumulative_trapezoid", y, x, dx, axis)
    return cumsum(areas, at)


def _trapezoids(
    name: str, y: Operand, x: Operand | None, dx: float | None, axis: int
) -> tuple[Tensor, int]:
    """The area between neighbouring samples, and the axis along which they are neighbours."""
    values = as_real(y)
    at = axis_of(name, axis, values)
    if x is not None and dx is not None:
        raise ArgumentError(name, "x and dx are both given", "Give one of them.")
    heights = (_later(values, at) + _earlier(values, at)) * 0.5
    if x is None:
        return heights * (1.0 if dx is None else number_of(name, "dx", dx)), at
    places = as_real(x)
    if places.ndim == 1:
        n = values.shape[at]
        if places.shape[0] != n:
            raise ShapeError(
                name, f"x is {places.type}", f"Axis {axis} of y has {n} samples: give as many."
            )
        places = reshape(places, (n, *(1,) * (values.ndim - at - 1)))
    if places.ndim < values.ndim:
        places = reshape(places, ((1,) * (values.ndim - places.ndim) + places.shape))
    steps = _later(places, at) - _earlier(places, at)
    return heights * steps, at


def _later(x: Tensor, axis: int) -> Tensor:
    n = x.shape[axis]
    return slice_along(x, axis, min(1, n), n)


def _earlier(x: Tensor, axis: int) -> Tensor:
    return slice_along(x, axis, 0, max(0, x.shape[axis] - 1))
