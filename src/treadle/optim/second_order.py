"""Optimizers that ask for another gradient: SAM nearby, Sophia for the curvature."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.autodiff.transforms import jvp
from treadle.base.errors import ArgumentError
from treadle.base.numbers import (
    NOT_NEGATIVE,
    POSITIVE,
    STEPS,
    check_betas,
    check_choice,
    check_flag,
    numbers,
)
from treadle.base.trees import Tree
from treadle.frontend import random
from treadle.frontend.functions.arithmetic import abs, clamp, eq, maximum, remainder, where
from treadle.frontend.tensor import Tensor
from treadle.optim.building import One, Parts, Rate, per_parameter, zeros
from treadle.optim.clipping import global_norm
from treadle.optim.optimizer import Context, Optimizer, Params, check_inner, wrap
from treadle.optim.selecting import Selector
from treadle.optim.standard import New

ESTIMATORS = ("hutchinson", "gauss_newton")
# The paper's γ for each estimator.
PAPER_RHO = {"hutchinson": 0.01, "gauss_newton": 0.05}


def sam(optimizer: Optimizer, rho: float = 0.05, adaptive: bool = False) -> Optimizer:
    """The optimizer with gradients from the steepest point within `rho` (Foret and others, 2021).

    `adaptive` measures distances relative to each weight (Kwon and others, 2021). Gradients are
    computed twice.
    """
    check_inner("sam", optimizer)
    check_flag("sam", adaptive=adaptive)
    given = numbers("sam", rho=(rho, POSITIVE))

    def init(params: Params) -> Tree:
        return {"inner": optimizer.init(params)}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        sizes = {n: abs(params[n]) for n in grads} if adaptive else {}
        slopes = {n: g * sizes[n] if adaptive else g for n, g in grads.items()}
        scale = context.hyper["sam.rho"] / (global_norm(slopes.values()) + 1e-12)
        uphill = {
            n: params[n] + (s * sizes[n] if adaptive else s) * scale for n, s in slopes.items()
        }
        there = context.grad_at(uphill)
        sharp = context.clip({n: there[n] for n in grads})
        after, inner = optimizer.update(sharp, state["inner"], params, context)
        return after, {"inner": inner}

    return wrap(optimizer, "sam", given, init, update)


def sophia(
    lr: Rate = 1e-4,
    betas: tuple[float, float] = (0.96, 0.99),
    rho: float | None = None,
    eps: float = 1e-12,
    weight_decay: float = 0.2,
    interval: int = 10,
    estimator: str = "hutchinson",
    decay: Selector | None = None,
) -> Optimizer:
    """Momentum over a moving average of the Hessian's diagonal, clipped to 1 (Liu, 2023).

    "hutchinson" estimates it by products of the Hessian with signs, for any loss; "gauss_newton" by
    gradients for labels drawn from the model, for cross-entropy of class indices. The estimate
    counts every `interval` updates. `rho` is the paper's γ: by default 0.01 and 0.05.
    """
    check_choice("sophia", "estimator", estimator, ESTIMATORS)
    given = numbers(
        "sophia",
        **check_betas("sophia", betas),
        rho=(PAPER_RHO[estimator] if rho is None else rho, POSITIVE),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        interval=(interval, STEPS),
    )
    estimated = _hutchinson if estimator == "hutchinson" else _gauss_newton

    def rule(one: One) -> New:
        assert one.extra is not None
        m = one.average("m", one.g, "beta1")
        is_turn = eq(remainder(one.t - 1, one.hyper["interval"]), 0)
        h = where(is_turn, one.average("h", one.extra, "beta2"), one.state["h"])
        step = clamp(m / maximum(h * one.hyper["rho"], one.hyper["eps"]), -1.0, 1.0)
        return one.p - step * one.rate, {"m": m, "h": h}

    parts = Parts({"m": zeros, "h": zeros}, extra=estimated)
    return per_parameter("sophia", lr, given, rule, parts, decay)


def _hutchinson(grads: Params, params: Params, context: Context) -> Mapping[str, Tensor]:
    """u · Hu for random signs u: the diagonal, on average."""
    here = {n: params[n] for n in grads}
    signs = {n: _signs(p) for n, p in here.items()}

    def gradient(values: Params) -> Params:
        found = context.grad_at(values)
        return {n: found[n] for n in grads}

    _, products = jvp(gradient, (here,), (signs,))
    return {n: products[n] * u for n, u in signs.items()}


def _signs(p: Tensor) -> Tensor:
    chosen: Tensor = where(random.bernoulli(0.5, p.shape), 1.0, -1.0)
    return chosen.astype(p.dtype)


def _gauss_newton(grads: Params, params: Params, context: Context) -> Mapping[str, Tensor]:
    """B · g² for the mean gradient g of B labels drawn from the model."""
    found, drawn = context.sampled_grad_at({n: params[n] for n in grads})
    missing = [n for n in grads if n not in found]
    if missing:
        raise ArgumentError(
            "sophia",
            f"no cross-entropy depends on {', '.join(missing)}",
            'Use estimator="hutchinson".',
        )
    return {n: found[n] * found[n] * drawn for n in grads}
