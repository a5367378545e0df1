"""Evaluation at other weights than those trained: EMA, SWA, Lookahead, schedule-free AdamW."""

from __future__ import annotations

import dataclasses

from treadle.base.numbers import (
    COUNT,
    FRACTION,
    INNER_UNIT,
    NOT_NEGATIVE,
    STEPS,
    check_betas,
    numbers,
)
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import (
    clamp,
    eq,
    ge,
    gt,
    logical_and,
    maximum,
    pow,
    remainder,
    sqrt,
    where,
)
from treadle.frontend.tensor import Tensor
from treadle.optim.building import (
    Decay,
    Hyper,
    One,
    Parts,
    Rate,
    Shared,
    itself,
    per_parameter,
    zeros,
)
from treadle.optim.optimizer import Context, Optimizer, Params, check_inner, wrap
from treadle.optim.selecting import Selector
from treadle.optim.standard import New


def ema(optimizer: Optimizer, decay: float = 0.999) -> Optimizer:
    """Evaluation uses an exponential moving average of the parameters.

    It starts with those after the first update, as torch's AveragedModel does.
    """
    check_inner("ema", optimizer)
    given = numbers("ema", decay=(decay, FRACTION))

    def init(params: Params) -> Tree:
        return {"inner": optimizer.init(params), "mean": dict(params)}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        after, inner = optimizer.update(grads, state["inner"], params, context)
        keep = where(eq(context.updates, 0), 0.0, context.hyper["ema.decay"])
        mean = {n: _toward(m, after.get(n, params[n]), 1 - keep) for n, m in state["mean"].items()}
        return after, {"inner": inner, "mean": mean}

    return wrap(optimizer, "ema", given, init, update, lambda state, params: state["mean"])


def _toward(old: Tensor, new: Tensor, part: Tensor) -> Tensor:
    return old + (new - old) * part


def swa(optimizer: Optimizer, start: int, every: int = 1) -> Optimizer:
    """Evaluation uses the mean of the parameters from update `start` on, each `every` updates.

    Before that it uses what the optimizer inside would.
    """
    check_inner("swa", optimizer)
    given = numbers("swa", start=(start, COUNT), every=(every, STEPS))

    def init(params: Params) -> Tree:
        return {"inner": optimizer.init(params), "mean": dict(params), "taken": as_tensor(0.0)}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        after, inner = optimizer.update(grads, state["inner"], params, context)
        past = context.updates + 1 - context.hyper["swa.start"]
        is_turn = logical_and(ge(past, 0), eq(remainder(past, context.hyper["swa.every"]), 0))
        taken = where(is_turn, state["taken"] + 1, state["taken"])
        part = where(is_turn, 1 / maximum(taken, 1.0), 0.0)
        mean = {n: _toward(m, after.get(n, params[n]), part) for n, m in state["mean"].items()}
        return after, {"inner": inner, "mean": mean, "taken": taken}

    def eval_params(state: Tree, params: Params) -> Params:
        inner, is_there = optimizer.eval_params(state["inner"], params), gt(state["taken"], 0)
        return {n: where(is_there, m, inner[n]) for n, m in state["mean"].items()}

    return wrap(optimizer, "swa", given, init, update, eval_params)


def lookahead(optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> Optimizer:
    """Every k updates slow weights go `alpha` of the way to the fast ones, which start from there.

    Evaluation uses the slow weights (Zhang and others, 2019).
    """
    check_inner("lookahead", optimizer)
    given = numbers("lookahead", k=(k, STEPS), alpha=(alpha, FRACTION))

    def init(params: Params) -> Tree:
        return {"inner": optimizer.init(params), "slow": dict(params)}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        fast, inner = optimizer.update(grads, state["inner"], params, context)
        fast = dict(params) | fast
        is_turn = eq(remainder(context.updates + 1, context.hyper["lookahead.k"]), 0)
        part = where(is_turn, context.hyper["lookahead.alpha"], 0.0)
        slow = {n: _toward(s, fast[n], part) for n, s in state["slow"].items()}
        after = {n: where(is_turn, slow[n], p) for n, p in fast.items()}
        return after, {"inner": inner, "slow": slow}

    return wrap(optimizer, "lookahead", given, init, update, lambda state, params: state["slow"])


def schedule_free_adamw(
    lr: Rate = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
    decay: Selector | None = None,
) -> Optimizer:
    """AdamW that averages instead of following a schedule (Defazio and others, 2024).

    The parameters are y, where gradients are taken; the state has z, which moves by them; x, their
    average, with y = (1 − β₁) z + β₁ x, is what evaluation uses.
    """
    name = "schedule_free_adamw"
    given = numbers(
        name,
        **check_betas(name, betas, INNER_UNIT),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        warmup_steps=(warmup_steps, COUNT),
        r=(r, COUNT),
        weight_lr_power=(weight_lr_power, COUNT),
    )

    def warmed(hyper: Hyper, rate: Tensor, t: Tensor) -> Tensor:
        return rate * clamp(t / maximum(hyper["warmup_steps"], 1.0), 0, 1)

    def weight(shared: Shared, hyper: Hyper, t: Tensor) -> Tensor:
        return pow(t, hyper["r"]) * pow(shared["greatest_rate"], hyper["weight_lr_power"])

    def advance(shared: Shared, hyper: Hyper, rate: Tensor, t: Tensor) -> Shared:
        greatest = maximum(shared["greatest_rate"], warmed(hyper, rate, t))
        total = shared["weights"] + weight({"greatest_rate": greatest}, hyper, t)
        # The β₁ that y was made with is kept: x is found from y and z by that one.
        return {
            "weights": total,
            "greatest_rate": greatest,
            "beta1": hyper["beta1"],
            "old_beta1": shared["beta1"],
        }

    def rule(one: One) -> New:
        rate, total = warmed(one.hyper, one.rate, one.t), one.shared["weights"]
        is_there = gt(total, 0)
        part = where(
            is_there, weight(one.shared, one.hyper, one.t) / where(is_there, total, 1.0), 0.0
        )
        v = one.average("v", one.g * one.g, "beta2")
        root = sqrt(v / one.correction("beta2")) + one.hyper["eps"]
        step = one.g / root
        if one.decay is not None:
            step = step + one.p * one.decay
        x = _averaged(one.p, one.state["z"], one.shared["old_beta1"])
        z = one.state["z"] - step * rate
        return _toward(z, _toward(x, z, part), one.hyper["beta1"]), {"z": z, "v": v}

    def eval_params(state: Tree, params: Params) -> Params:
        return {n: _averaged(y, state["z"][n], state["beta1"]) for n, y in params.items()}

    shared = {"weights": 0.0, "greatest_rate": 0.0, "beta1": given.hyper["beta1"]}
    parts = Parts({"z": itself, "v": zeros}, Decay.OWN, shared, advance)
    made = per_parameter(name, lr, given, rule, parts, decay)
    return dataclasses.replace(made, eval_params=eval_params)


def _averaged(y: Tensor, z: Tensor, beta: Tensor) -> Tensor:
    """x of y = (1 − β) z + β x"""
    return _toward(y, z, 1 - 1 / beta)
