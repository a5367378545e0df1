"""Losses between numbers."""

from __future__ import annotations

from treadle.base.numbers import POSITIVE, check_number
from treadle.frontend.functions.arithmetic import abs, where
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.losses.reduction import pair, reduced


def mse(input: Operand, target: Operand, reduction: str = "mean") -> Tensor | Mean:
    """(x − y)².

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("mse", input, target)
    return reduced("mse", (x - y) * (x - y), reduction)


def l1(input: Operand, target: Operand, reduction: str = "mean") -> Tensor | Mean:
    """|x − y|.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("l1", input, target)
    return reduced("l1", abs(x - y), reduction)


def huber(
    input: Operand, target: Operand, reduction: str = "mean", delta: float = 1.0
) -> Tensor | Mean:
    """½ (x − y)² within delta, delta · (|x − y| − ½ delta) beyond.

    Shapes: two of one shape → (), or that shape for "none".
    """
    check_number("huber", "delta", delta, POSITIVE)
    x, y = pair("huber", input, target)
    distance = abs(x - y)
    inside, outside = distance * distance * 0.5, (distance - 0.5 * delta) * delta
    return reduced("huber", where(distance < delta, inside, outside), reduction)
