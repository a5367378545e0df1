"""Several losses as one, with their parts reported."""

from __future__ import annotations

from typing import Any

from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import exp
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.frontend.tracing import capture_part, metric

Part = Tensor | Mean


def weighted(**parts: Part | tuple[float | Operand, Part]) -> Part:
    """The sum of losses, each given as it is or as (weight, loss), and reported by its name.

    Means of one weight add up to a mean, so that accumulation stays exact. `optim.pcgrad` and
    `optim.gradnorm` look at the parts.
    """
    if not parts:
        raise ArgumentError("weighted", "no losses", "Give them by name: weighted(main=a, aux=b).")
    total: Any = None
    for name, given in parts.items():
        weight, loss = given if isinstance(given, tuple) else (1.0, given)
        _report("weighted", name, loss)
        term = loss if isinstance(weight, float) and weight == 1 else loss * weight
        capture_part(name, term)
        total = term if total is None else total + term
    result: Part = total
    return result


def uncertainty(log_variances: Operand, **parts: Part) -> Part:
    """Σ exp(−s) · loss + s of losses by name, with a learned logarithm of a variance s for each.

    Weighting by uncertainty (Kendall, Gal and Cipolla, 2018): `log_variances` is a parameter of
    the model, (losses,), that begins at 0. The losses are reported, and s as "log_variance/NAME".
    """
    logs = as_tensor(log_variances)
    if not parts or logs.shape != (len(parts),) or not logs.dtype.is_float:
        raise ArgumentError(
            "uncertainty",
            f"log variances {logs.type} for {len(parts)} losses",
            "Declare one for each, nn.Parameter((losses,)), and give the losses by name.",
        )
    total: Any = None
    for i, (name, loss) in enumerate(parts.items()):
        _report("uncertainty", name, loss)
        metric(f"log_variance/{name}", logs[i])
        term = loss * exp(-logs[i]) + logs[i]
        capture_part(name, term)
        total = term if total is None else total + term
    result: Part = total
    return result


def _report(operation: str, name: str, loss: Part) -> None:
    value = as_tensor(loss)
    if value.shape != ():
        raise ArgumentError(operation, f"{name} is {value.type}, not a scalar", "Reduce it first.")
    has_weight = isinstance(loss, Mean) and len(loss.terms) == 1
    metric(name, loss, loss.weight if isinstance(loss, Mean) and has_weight else 1)
