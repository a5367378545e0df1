"""SGD, Adam, AdamW, AdaGrad, RMSProp and AdaDelta: PyTorch's formulas and defaults."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FRACTION, NOT_NEGATIVE, check_betas, check_flag, numbers
from treadle.frontend.functions.arithmetic import maximum, sqrt, where
from treadle.frontend.tensor import Tensor
from treadle.optim.building import Decay, One, Parts, Rate, filled, per_parameter, zeros
from treadle.optim.optimizer import Optimizer
from treadle.optim.selecting import Selector

New = tuple[Tensor, Mapping[str, Tensor]]


def sgd(
    lr: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    decay: Selector | None = None,
) -> Optimizer:
    """Gradient descent with momentum, dampening and Nesterov's step, as torch.optim.SGD.

    `decay` selects the parameters that weight decay applies to.
    """
    given = numbers(
        "sgd",
        momentum=(momentum, NOT_NEGATIVE),
        dampening=(dampening, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )
    check_flag("sgd", nesterov=nesterov)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ArgumentError(
            "sgd",
            f"nesterov with momentum = {momentum} and dampening = {dampening}",
            "Nesterov's step needs a positive momentum and no dampening.",
        )
    has_momentum = momentum != 0

    def rule(one: One) -> New:
        if not has_momentum:
            return one.p - one.g * one.rate, {}
        hyper = one.hyper
        running = one.state["momentum"] * hyper["momentum"] + one.g * (1 - hyper["dampening"])
        # The first buffer is the gradient itself, without dampening.
        buffer = where(one.is_first, one.g, running)
        step = one.g + buffer * hyper["momentum"] if nesterov else buffer
        return one.p - step * one.rate, {"momentum": buffer}

    slots = {"momentum": zeros} if has_momentum else {}
    return per_parameter("sgd", lr, given, rule, Parts(slots, Decay.COUPLED), decay)


def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam, as torch.optim.Adam: weight decay is added to the gradient."""
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, decay, Decay.COUPLED)


def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay, as torch.optim.AdamW."""
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, decay, Decay.DECOUPLED)


def _adam(
    name: str,
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decay: Selector | None,
    how: Decay,
) -> Optimizer:
    given = numbers(
        name,
        **check_betas(name, betas),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )
    check_flag(name, amsgrad=amsgrad)
    slots = dict.fromkeys(("m", "v", "v_max") if amsgrad else ("m", "v"), zeros)

    def rule(one: One) -> New:
        m, v = moments(one)
        new = {"m": m, "v": v}
        if amsgrad:
            v = new["v_max"] = maximum(one.state["v_max"], v)
        step = m / (corrected_root(one, v) + one.hyper["eps"])
        return one.p - step * (one.rate / one.correction("beta1")), new

    return per_parameter(name, lr, given, rule, Parts(slots, how), decay)


def moments(one: One) -> tuple[Tensor, Tensor]:
    """Moving averages of the gradient and of its square."""
    return one.average("m", one.g, "beta1"), one.average("v", one.g * one.g, "beta2")


def corrected_root(one: One, v: Tensor) -> Tensor:
    """√(v / (1 − β₂ᵗ))"""
    return sqrt(v) * (1.0 / sqrt(one.correction("beta2")))


def adagrad(
    lr: Rate = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    decay: Selector | None = None,
) -> Optimizer:
    """Steps divided by the root of all squares so far, as torch.optim.Adagrad."""
    given = numbers(
        "adagrad",
        lr_decay=(lr_decay, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        eps=(eps, NOT_NEGATIVE),
    )
    first = numbers("adagrad", initial_accumulator_value=(initial_accumulator_value, NOT_NEGATIVE))

    def rule(one: One) -> New:
        total = one.state["sum"] + one.g * one.g
        rate = one.rate / (1 + (one.t - 1) * one.hyper["lr_decay"])
        return one.p - one.g / (sqrt(total) + one.hyper["eps"]) * rate, {"sum": total}

    slots = {"sum": filled(first.hyper["initial_accumulator_value"])}
    return per_parameter("adagrad", lr, given, rule, Parts(slots, Decay.COUPLED), decay)


def rmsprop(
    lr: Rate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    decay: Selector | None = None,
) -> Optimizer:
    """Steps divided by the root of a mean of squares, as torch.optim.RMSprop."""
    given = numbers(
        "rmsprop",
        alpha=(alpha, FRACTION),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        momentum=(momentum, NOT_NEGATIVE),
    )
    check_flag("rmsprop", centered=centered)
    slots = {"v": zeros}
    if centered:
        slots["mean"] = zeros
    if momentum > 0:
        slots["momentum"] = zeros

    def rule(one: One) -> New:
        v = one.average("v", one.g * one.g, "alpha")
        new = {"v": v}
        if centered:
            mean = new["mean"] = one.average("mean", one.g, "alpha")
            v = maximum(v - mean * mean, 0.0)  # rounding may pass zero
        step = one.g / (sqrt(v) + one.hyper["eps"])
        if momentum > 0:
            step = new["momentum"] = one.state["momentum"] * one.hyper["momentum"] + step
        return one.p - step * one.rate, new

    return per_parameter("rmsprop", lr, given, rule, Parts(slots, Decay.COUPLED), decay)


def adadelta(
    lr: Rate = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
) -> Optimizer:
    """Steps as large as those before, relative to gradients, as torch.optim.Adadelta."""
    given = numbers(
        "adadelta",
        rho=(rho, FRACTION),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )

    def rule(one: One) -> New:
        eps = one.hyper["eps"]
        v = one.average("v", one.g * one.g, "rho")
        step = sqrt(one.state["steps"] + eps) / sqrt(v + eps) * one.g
        return one.p - step * one.rate, {"v": v, "steps": one.average("steps", step * step, "rho")}

    parts = Parts({"v": zeros, "steps": zeros}, Decay.COUPLED)
    return per_parameter("adadelta", lr, given, rule, parts, decay)
