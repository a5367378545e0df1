"""Prodigy: Adam that finds its own rate."""

from __future__ import annotations

from treadle.base.numbers import NOT_NEGATIVE, POSITIVE, STEPS, check_betas, numbers
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import abs, gt, maximum, minimum, sqrt, where
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.tensor import Tensor
from treadle.optim.building import Rate, schedule_beside, zeros
from treadle.optim.optimizer import Context, Optimizer, Params
from treadle.optim.selecting import Selector, check_selector, check_selects, decays


def prodigy(
    lr: Rate = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    d0: float = 1e-6,
    growth_rate: float = 1e30,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam times an estimate d of the distance to the solution (Mishchenko and Defazio, 2023).

    `lr` is a factor that stays 1, or a schedule of it. d starts at `d0` and grows by at most the
    factor `growth_rate` in an update.
    """
    given = numbers(
        "prodigy",
        **check_betas("prodigy", betas),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        growth_rate=(growth_rate, STEPS),
    )
    first = numbers("prodigy", d0=(d0, POSITIVE)).hyper["d0"]
    schedule = schedule_beside("prodigy", lr, given)
    check_selector("prodigy", "decay", decay)

    def init(params: Params) -> Tree:
        check_selects("prodigy", decay, params)
        moments = {slot: {n: zeros(p) for n, p in params.items()} for slot in ("m", "v", "s")}
        scalars = {"d": as_tensor(first), "r": as_tensor(0.0)}
        return moments | {"start": dict(params)} | scalars

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        rate, hyper, d = context.rate(schedule), context.hyper, state["d"]
        beta1, beta2, root_beta = hyper["beta1"], hyper["beta2"], sqrt(hyper["beta2"])
        after, new = dict(params), {slot: dict(state[slot]) for slot in ("m", "v", "s")}
        r = state["r"] * root_beta
        for name, g in grads.items():
            p, far = params[name], (1 - root_beta) * rate * d * d
            r = r + far * sum_of(g * (state["start"][name] - p))
            new["s"][name] = state["s"][name] * root_beta + g * far
            m = new["m"][name] = state["m"][name] * beta1 + g * ((1 - beta1) * d)
            v = new["v"][name] = state["v"][name] * beta2 + g * g * ((1 - beta2) * d * d)
            if decays(decay, context, name):
                p = p * (1 - rate * d * hyper["weight_decay"])
            after[name] = p - m / (sqrt(v) + d * hyper["eps"]) * (rate * d)
        new_d = minimum(maximum(d, _estimate(r, new["s"])), d * hyper["growth_rate"])
        return after, new | {"start": state["start"], "d": new_d, "r": r}

    return Optimizer(
        "prodigy",
        init,
        update,
        dict(schedule.hyper) | given.hyper,
        {"": schedule},
        domains=dict(schedule.domains) | given.domains,
    )


def _estimate(r: Tensor, s: Params) -> Tensor:
    """r / ‖s‖₁; 0 before there was any gradient."""
    total = as_tensor(0.0)
    for value in s.values():
        total = total + sum_of(abs(value))
    is_there = gt(total, 0)
    return where(is_there, r / where(is_there, total, 1.0), 0.0)
