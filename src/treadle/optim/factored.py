"""Adafactor: second moments of matrices as a column times a row."""

from __future__ import annotations

import math

import ml_dtypes

from treadle.base.errors import ArgumentError
from treadle.base.numbers import AT_LEAST_ONE, NOT_NEGATIVE, NOT_POSITIVE, Given, numbers
from treadle.frontend.coerce import constant
from treadle.frontend.functions.arithmetic import maximum, minimum, pow, rsqrt
from treadle.frontend.functions.reductions import mean, norm
from treadle.frontend.tensor import Tensor
from treadle.optim.building import Decay, One, Parts, Rate, Slot, per_parameter, zeros
from treadle.optim.optimizer import Optimizer
from treadle.optim.selecting import Selector
from treadle.optim.standard import New


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adafactor with PyTorch's formulas, as torch.optim.Adafactor.

    The second moment of a matrix is kept as its means over rows and columns, so the state takes
    almost no memory. Steps are relative to the size of the parameter, at least `eps[1]`, and are
    scaled down where their root mean square exceeds `d`. `eps[0]` is by default the distance of 1
    to the next number of the parameter's dtype.
    """
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise ArgumentError("adafactor", f"eps = {eps!r}", "Give two numbers: (None, 1e-3).")
    least: dict[str, Given] = {} if eps[0] is None else {"eps1": (eps[0], NOT_NEGATIVE)}
    given = numbers(
        "adafactor",
        beta2_decay=(beta2_decay, NOT_POSITIVE),
        eps2=(eps[1], NOT_NEGATIVE),
        d=(d, AT_LEAST_ONE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        **least,
    )

    def rule(one: One) -> New:
        hyper, weight = one.hyper, pow(one.t, one.hyper["beta2_decay"])
        eps1 = hyper["eps1"] if least else _epsilon(one.p)
        squares, new = one.g * one.g, {}
        if one.p.ndim > 1:
            rows = new["rows"] = _towards(one.state["rows"], mean(squares, -1, True), weight)
            columns = new["columns"] = _towards(
                one.state["columns"], mean(squares, -2, True), weight
            )
            estimate = rows * columns / maximum(mean(rows, -2, True), eps1)
        else:
            estimate = new["v"] = _towards(one.state["v"], squares, weight)
        step = one.g * rsqrt(maximum(estimate, eps1 * eps1))
        length = maximum(root_mean_square(step) / hyper["d"], 1.0)
        size = maximum(root_mean_square(one.p), hyper["eps2"])
        rate = size * minimum(one.rate, rsqrt(one.t)) / length
        p = one.p if one.decay is None else one.p * (1 - one.rate * one.decay)
        return p - step * rate, new

    slots = {"rows": _mean_of(-1), "columns": _mean_of(-2), "v": _unfactored}
    return per_parameter("adafactor", lr, given, rule, Parts(slots, Decay.OWN), decay, maximize)


def _towards(old: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    return old + (new - old) * weight


def root_mean_square(x: Tensor) -> Tensor:
    return norm(x) * (1 / math.sqrt(max(math.prod(x.shape), 1)))


def _epsilon(p: Tensor) -> Tensor:
    eps = ml_dtypes.finfo(p.dtype.numpy).eps  # type: ignore[no-untyped-call]
    return constant(float(eps), (), p.dtype)


def _mean_of(axis: int) -> Slot:
    """Zeros for the means of a matrix over one of its last two axes; nothing for a vector."""

    def first(p: Tensor) -> Tensor | None:
        if p.ndim < 2:
            return None
        shape = list(p.shape)
        shape[axis] = 1
        return constant(0, tuple(shape), p.dtype)

    return first


def _unfactored(p: Tensor) -> Tensor | None:
    return zeros(p) if p.ndim < 2 else None
