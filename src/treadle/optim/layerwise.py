"""Steps in proportion to the size of each parameter: LARS and LAMB."""

from __future__ import annotations

from treadle.base.numbers import NOT_NEGATIVE, POSITIVE, check_betas, numbers
from treadle.frontend.functions.arithmetic import gt, logical_and, where
from treadle.frontend.functions.reductions import length as norm
from treadle.frontend.tensor import Tensor
from treadle.optim.building import Decay, One, Parts, Rate, per_parameter, zeros
from treadle.optim.optimizer import Optimizer
from treadle.optim.selecting import Selector, check_selector, selects
from treadle.optim.standard import New, corrected_root, moments


def lars(
    lr: Rate = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    trust: float = 1e-3,
    decay: Selector | None = None,
    adapt: Selector | None = None,
) -> Optimizer:
    """Momentum with a rate per parameter, trust · ‖p‖ / (‖g‖ + λ‖p‖) (You and others, 2017).

    `adapt` selects the parameters that have it; a parameter or gradient of zeros has none.
    """
    given = numbers(
        "lars",
        momentum=(momentum, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        trust=(trust, POSITIVE),
    )
    check_selector("lars", "adapt", adapt)

    def rule(one: One) -> New:
        size, slope, g = norm(one.p), norm(one.g), one.g
        wanted = slope
        if one.decay is not None:
            g, wanted = g + one.p * one.decay, slope + size * one.decay
        rate = one.rate
        if adapt is None or selects(adapt, one.name):
            rate = rate * trust_ratio(size * one.hyper["trust"], wanted, (size, slope))
        buffer = one.state["momentum"] * one.hyper["momentum"] + g * rate
        return one.p - buffer, {"momentum": buffer}

    parts = Parts({"momentum": zeros}, Decay.OWN)
    return per_parameter("lars", lr, given, rule, parts, decay)


def lamb(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    decay: Selector | None = None,
    adapt: Selector | None = None,
) -> Optimizer:
    """Adam's direction and decay, as long as the parameter itself (You and others, 2020).

    `adapt` selects the parameters whose step is scaled so. One of zeros, or with a step of zeros,
    is not.
    """
    given = numbers(
        "lamb",
        **check_betas("lamb", betas),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )
    check_selector("lamb", "adapt", adapt)

    def rule(one: One) -> New:
        m, v = moments(one)
        step = m / one.correction("beta1") / (corrected_root(one, v) + one.hyper["eps"])
        if one.decay is not None:
            step = step + one.p * one.decay
        rate = one.rate
        if adapt is None or selects(adapt, one.name):
            size, length = norm(one.p), norm(step)
            rate = rate * trust_ratio(size, length, (size, length))
        return one.p - step * rate, {"m": m, "v": v}

    parts = Parts({"m": zeros, "v": zeros}, Decay.OWN)
    return per_parameter("lamb", lr, given, rule, parts, decay)


def trust_ratio(above: Tensor, below: Tensor, needed: tuple[Tensor, Tensor]) -> Tensor:
    """above / below where both of two norms are there, else 1."""
    is_there = logical_and(gt(needed[0], 0), gt(needed[1], 0))
    return where(is_there, above / where(is_there, below, 1.0), 1.0)
