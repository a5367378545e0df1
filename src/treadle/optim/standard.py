"""SGD, ASGD, Rprop, Adam, AdamW, AdaGrad, RMSProp and AdaDelta, with PyTorch's formulas."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.base.errors import ArgumentError
from treadle.base.numbers import (
    ABOVE_ONE,
    COUNT,
    FRACTION,
    INNER_UNIT,
    NOT_NEGATIVE,
    check_betas,
    check_flag,
    check_pair,
    numbers,
)
from treadle.frontend.functions.arithmetic import (
    clamp,
    eq,
    lt,
    maximum,
    pow,
    sign,
    sqrt,
    where,
)
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
    maximize: bool = False,
) -> Optimizer:
    """Gradient descent with momentum, dampening and Nesterov's step, as torch.optim.SGD.

    `decay` selects the parameters that weight decay applies to. `maximize=True` climbs.
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
    parts = Parts(slots, Decay.COUPLED, flags={"momentum": has_momentum, "nesterov": nesterov})
    return per_parameter("sgd", lr, given, rule, parts, decay, maximize)


def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adam, as torch.optim.Adam: weight decay is added to the gradient."""
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, decay, Decay.COUPLED, maximize)


def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay, as torch.optim.AdamW."""
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, decay, Decay.DECOUPLED, maximize)


def _adam(
    name: str,
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decay: Selector | None,
    how: Decay,
    maximize: bool,
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

    parts = Parts(slots, how, flags={"amsgrad": amsgrad})
    return per_parameter(name, lr, given, rule, parts, decay, maximize)


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
    maximize: bool = False,
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
    parts = Parts(slots, Decay.COUPLED, flags={})
    return per_parameter("adagrad", lr, given, rule, parts, decay, maximize)


def rmsprop(
    lr: Rate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    decay: Selector | None = None,
    maximize: bool = False,
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

    flags = {"centered": centered, "momentum": momentum > 0}
    parts = Parts(slots, Decay.COUPLED, flags=flags)
    return per_parameter("rmsprop", lr, given, rule, parts, decay, maximize)


def adadelta(
    lr: Rate = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
    maximize: bool = False,
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

    parts = Parts({"v": zeros, "steps": zeros}, Decay.COUPLED, flags={})
    return per_parameter("adadelta", lr, given, rule, parts, decay, maximize)


def asgd(
    lr: Rate = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Averaged SGD, as torch.optim.ASGD: the rate falls as lr / (1 + lambd · lr · t)^alpha.

    The average of the parameters since update `t0` is in the state, as PyTorch's `ax`. Evaluation
    uses the parameters; `optim.swa` evaluates an average.
    """
    given = numbers(
        "asgd",
        lambd=(lambd, NOT_NEGATIVE),
        alpha=(alpha, NOT_NEGATIVE),
        t0=(t0, COUNT),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )

    def rule(one: One) -> New:
        hyper, earlier = one.hyper, one.t - 1
        rate = one.rate / pow(1 + hyper["lambd"] * one.rate * earlier, hyper["alpha"])
        p = one.p * (1 - hyper["lambd"] * rate) - one.g * rate
        mean = one.state["average"]
        weight = 1.0 / maximum(earlier - hyper["t0"], 1.0)
        return p, {"average": mean + (p - mean) * weight}

    parts = Parts({"average": zeros}, Decay.COUPLED)
    return per_parameter("asgd", lr, given, rule, parts, decay, maximize)


def rprop(
    lr: Rate = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    weight_decay: float = 0.0,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Steps by the sign of the gradient, as torch.optim.Rprop; for full batches.

    Each element has a step size: `lr` at first, times `etas[1]` while the sign stays, times
    `etas[0]` and no move where it changes, within `step_sizes`. Weight decay is decoupled.
    """
    shrink, grow = check_pair("rprop", "etas", etas)
    least, most = check_pair("rprop", "step_sizes", step_sizes)
    given = numbers(
        "rprop",
        eta_minus=(shrink, INNER_UNIT),
        eta_plus=(grow, ABOVE_ONE),
        step_size_min=(least, NOT_NEGATIVE),
        step_size_max=(most, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )

    if given.hyper["step_size_min"] > given.hyper["step_size_max"]:
        cause = f"step_sizes = {step_sizes!r}"
        raise ArgumentError("rprop", cause, "Give the least size first: (1e-6, 50).")

    def rule(one: One) -> New:
        hyper = one.hyper
        agreement = sign(one.g) * sign(one.state["g"])
        has_turned = lt(agreement, 0)
        factor = where(has_turned, hyper["eta_minus"], hyper["eta_plus"])
        factor = where(eq(agreement, 0), 1.0, factor)
        size = where(one.is_first, one.rate, one.state["step_size"])
        size = clamp(size * factor, hyper["step_size_min"], hyper["step_size_max"])
        g = where(has_turned, 0.0, one.g)
        return one.p - sign(g) * size, {"g": g, "step_size": size}

    parts = Parts({"g": zeros, "step_size": zeros})
    return per_parameter("rprop", lr, given, rule, parts, decay, maximize)
