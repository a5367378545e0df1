"""Losses between numbers."""

from __future__ import annotations

from treadle.base.numbers import POSITIVE, check_number
from treadle.frontend.coerce import broadcast_to
from treadle.frontend.functions.arithmetic import abs, where
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.losses.reduction import fitting, pair, reduced, weighted


def mse(
    input: Operand, target: Operand, reduction: str = "mean", weight: Operand | None = None
) -> Tensor | Mean:
    """(x − y)²; a mean is over `weight`, which broadcasts to them.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("mse", input, target)
    return _averaged("mse", (x - y) * (x - y), reduction, weight)


def l1(
    input: Operand, target: Operand, reduction: str = "mean", weight: Operand | None = None
) -> Tensor | Mean:
    """|x − y|; a mean is over `weight`, which broadcasts to them.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("l1", input, target)
    return _averaged("l1", abs(x - y), reduction, weight)


def _averaged(name: str, values: Tensor, reduction: str, weight: Operand | None) -> Tensor | Mean:
    if weight is None:
        return reduced(name, values, reduction)
    amounts = broadcast_to(fitting(name, "weight", weight, values), values.shape)
    return reduced(name, values * amounts, reduction, sum_of(amounts))


def huber(
    input: Operand,
    target: Operand,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Operand | None = None,
) -> Tensor | Mean:
    """½ (x − y)² within delta, delta · (|x − y| − ½ delta) beyond, each times its weight.

    Shapes: two of one shape → (), or that shape for "none".
    """
    check_number("huber", "delta", delta, POSITIVE)
    x, y = pair("huber", input, target)
    difference = x - y
    distance = abs(difference)
    # Of the difference: a square of |x − y| would have no curvature at 0.
    inside, outside = difference * difference * 0.5, (distance - 0.5 * delta) * delta
    values = where(distance < delta, inside, outside)
    return reduced("huber", weighted("huber", values, weight), reduction)
