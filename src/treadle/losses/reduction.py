"""How losses become one number."""

from __future__ import annotations

from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.shapes import broadcast_shapes
from treadle.frontend.coerce import as_tensor, common_dtype
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor


def reduced(
    name: str, values: Tensor, reduction: str, weight: Operand | None = None
) -> Tensor | Mean:
    """Values as they are ("none"), added up ("sum"), or their mean over `weight` ("mean")."""
    if reduction == "none":
        return values
    if reduction == "sum":
        return sum_of(values)
    if reduction == "mean":
        return Mean(sum_of(values), values.size if weight is None else weight)
    raise ArgumentError(name, f"reduction is {reduction!r}", 'Use "mean", "sum" or "none".')


def weighted(name: str, values: Tensor, weight: Operand | None) -> Tensor:
    """Each value times its weight; weights broadcast to the values, never the other way round.

    Shapes: losses of shape () → ().
    """
    return values if weight is None else values * fitting(name, "weight", weight, values)


def fitting(name: str, label: str, given: Operand, values: Tensor) -> Tensor:
    """An argument that broadcasts to the values, in their dtype."""
    found = cast_to(as_tensor(given), values.dtype)
    if broadcast_shapes(found.shape, values.shape) != values.shape:
        raise ShapeError(
            name,
            f"the {label} {found.type} does not broadcast to {values.type}",
            "Sizes must be equal or 1, counted from the last axis.",
        )
    return found


def pair(name: str, input: Operand, target: Operand) -> tuple[Tensor, Tensor]:
    """Two float tensors of one shape and dtype."""
    dtype = common_dtype((input, target))
    x, y = cast_to(as_tensor(input), dtype), cast_to(as_tensor(target), dtype)
    if not dtype.is_float:
        raise DTypeError(name, f"input {x.type} and target {y.type} are not floats", "Cast them.")
    if x.shape != y.shape:
        raise ShapeError(
            name,
            f"input {x.type} and target {y.type} differ in shape",
            "Reshape one; they do not broadcast.",
        )
    return x, y
