"""Several losses as one, with their parts reported."""

from __future__ import annotations

from typing import Any

from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.frontend.tracing import metric

Part = Tensor | Mean


def weighted(**parts: Part | tuple[float | Operand, Part]) -> Part:
    """The sum of losses, each given as it is or as (weight, loss), and reported by its name.

    Means of one weight add up to a mean, so that accumulation stays exact.
    """
    if not parts:
        raise ArgumentError("weighted", "no losses", "Give them by name: weighted(main=a, aux=b).")
    total: Any = None
    for name, given in parts.items():
        weight, loss = given if isinstance(given, tuple) else (1.0, given)
        if as_tensor(loss).shape != ():
            raise ArgumentError(
                "weighted", f"{name} is {as_tensor(loss).type}, not a scalar", "Reduce it first."
            )
        if isinstance(loss, Mean) and len(loss.terms) == 1:
            metric(name, loss, loss.weight)
        else:
            metric(name, loss)
        term = loss if isinstance(weight, float) and weight == 1 else loss * weight
        total = term if total is None else total + term
    result: Part = total
    return result
