"""SGD, Adam and AdamW: PyTorch's formulas and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.frontend.functions.arithmetic import eq, log, maximum, sqrt, tanh, where
from treadle.frontend.functions.shaping import zeros_like
from treadle.frontend.tensor import Tensor
from treadle.optim.optimizer import Context, Optimizer, Params, Selector, check_selects, selects
from treadle.optim.schedules import Schedule, as_schedule, check_rate

Rate = float | Schedule


def _check_unit(operation: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ArgumentError(operation, f"{name} = {value}", "It lies in [0, 1).")


def _zeros(params: Params) -> Params:
    return {name: zeros_like(p) for name, p in params.items()}


def _decays(decay: Selector | None, context: Context, name: str) -> bool:
    """Whether weight decay applies: the parameter allows it, and the filter if there is one."""
    return context.decays.get(name, True) and (decay is None or selects(decay, name))


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
    schedule = as_schedule(lr)
    check_rate("sgd", momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ArgumentError("sgd", "nesterov without momentum, or with dampening")
    has_momentum = momentum != 0

    def init(params: Params) -> Tree:
        check_selects("sgd", decay, params)
        return {"momentum": _zeros(params)} if has_momentum else {}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        rate, hyper = context.rate(schedule), context.hyper
        is_first = eq(context.count, 0)
        after, buffers = dict(params), dict(state.get("momentum", {}))
        for name, g in grads.items():
            p = params[name]
            if _decays(decay, context, name):
                g = g + p * hyper["weight_decay"]
            if has_momentum:
                # The first buffer is the gradient itself, without dampening.
                running = buffers[name] * hyper["momentum"] + g * (1 - hyper["dampening"])
                buffers[name] = buffer = where(is_first, g, running)
                g = g + buffer * hyper["momentum"] if nesterov else buffer
            after[name] = p - g * rate
        return after, {"momentum": buffers} if has_momentum else {}

    hyper = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    return Optimizer("sgd", init, update, dict(schedule.hyper) | hyper, {"": schedule})


def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam, as torch.optim.Adam: weight decay is added to the gradient."""

    def coupled(p: Tensor, g: Tensor, amount: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        return p, g + p * amount

    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, decay, coupled)


def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay, as torch.optim.AdamW."""

    def decoupled(p: Tensor, g: Tensor, amount: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        return p * (1 - rate * amount), g

    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, decay, decoupled)


Decay = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _adam(
    name: str,
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decay: Selector | None,
    decayed: Decay,
) -> Optimizer:
    schedule = as_schedule(lr)
    check_rate(name, eps=eps, weight_decay=weight_decay)
    _check_unit(name, beta1=betas[0], beta2=betas[1])
    moments = ("m", "v", "v_max") if amsgrad else ("m", "v")

    def init(params: Params) -> Tree:
        check_selects(name, decay, params)
        return {moment: _zeros(params) for moment in moments}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        rate, hyper = context.rate(schedule), context.hyper
        correction = _bias_corrections(context)
        after, new = dict(params), {moment: dict(state[moment]) for moment in moments}
        for key, g in grads.items():
            p = params[key]
            if _decays(decay, context, key):
                p, g = decayed(p, g, hyper["weight_decay"], rate)
            m = state["m"][key] * hyper["beta1"] + g * (1 - hyper["beta1"])
            v = state["v"][key] * hyper["beta2"] + g * g * (1 - hyper["beta2"])
            new["m"][key], new["v"][key] = m, v
            if amsgrad:
                v = new["v_max"][key] = maximum(state["v_max"][key], v)
            root = sqrt(v) / sqrt(correction["beta2"]) + hyper["eps"]
            after[key] = p - m / root * (rate / correction["beta1"])
        return after, new

    hyper = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    return Optimizer(name, init, update, dict(schedule.hyper) | hyper, {"": schedule})


def _bias_corrections(context: Context) -> Mapping[str, Tensor]:
    """1 − βᵗ, t the number of this update counted from 1."""
    t = context.count + 1
    return {beta: _bias_correction(context.hyper[beta], t) for beta in ("beta1", "beta2")}


def _bias_correction(beta: Tensor, t: Tensor) -> Tensor:
    """1 − βᵗ, without the digits that the difference would lose: −expm1(t log β) by tanh."""
    half = tanh(t * log(beta) * -0.5)
    return 2 * half / (1 + half)
