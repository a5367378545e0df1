"""Relatives of Adam: NAdam, RAdam, AdaMax as PyTorch has them; AdaBelief, AdEMAMix and others."""

from __future__ import annotations

import math

from treadle.base.errors import ArgumentError
from treadle.base.numbers import (
    NOT_NEGATIVE,
    STEPS,
    UNIT,
    Given,
    Numbers,
    check_betas,
    check_flag,
    check_whole,
    numbers,
)
from treadle.frontend.functions.arithmetic import (
    abs,
    exp,
    gt,
    log,
    lt,
    maximum,
    minimum,
    pow,
    sign,
    sqrt,
    where,
)
from treadle.frontend.functions.reductions import length as norm
from treadle.frontend.functions.reductions import max as max_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import reshape
from treadle.frontend.tensor import Tensor
from treadle.optim.building import (
    Decay,
    Hyper,
    One,
    Parts,
    Rate,
    Shared,
    per_parameter,
    zeros,
)
from treadle.optim.optimizer import Optimizer
from treadle.optim.selecting import Selector
from treadle.optim.standard import New, corrected_root, moments

RADAM_LEAST_LENGTH = 5.0


def _numbers(name: str, betas: object, eps: float, weight_decay: float, **more: Given) -> Numbers:
    """What all of them have."""
    return numbers(
        name,
        **check_betas(name, betas),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        **more,
    )


def _coupling(name: str, is_decoupled: bool) -> Decay:
    check_flag(name, decoupled_weight_decay=is_decoupled)
    return Decay.DECOUPLED if is_decoupled else Decay.COUPLED


def nadam(
    lr: Rate = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adam with Nesterov's momentum, as torch.optim.NAdam."""
    given = _numbers(
        "nadam", betas, eps, weight_decay, momentum_decay=(momentum_decay, NOT_NEGATIVE)
    )

    def mu(hyper: Hyper, t: Tensor) -> Tensor:
        return hyper["beta1"] * (1 - 0.5 * pow(0.96, t * hyper["momentum_decay"]))

    def advance(shared: Shared, hyper: Hyper, rate: Tensor, t: Tensor) -> Shared:
        return {"mu_product": shared["mu_product"] * mu(hyper, t)}

    def rule(one: One) -> New:
        m, v = moments(one)
        now, next_ = mu(one.hyper, one.t), mu(one.hyper, one.t + 1)
        product = one.shared["mu_product"]
        root = corrected_root(one, v) + one.hyper["eps"]
        step = one.g * ((1 - now) / (1 - product)) + m * (next_ / (1 - product * next_))
        return one.p - step / root * one.rate, {"m": m, "v": v}

    how = _coupling("nadam", decoupled_weight_decay)
    parts = Parts({"m": zeros, "v": zeros}, how, {"mu_product": 1.0}, advance)
    return per_parameter("nadam", lr, given, rule, parts, decay, maximize)


def radam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adam whose second moment counts once it is long enough, as torch.optim.RAdam.

    The length ρ is 1 + 2 · the mean age of what the second moment averages. Its weights and their
    ages are summed as they come: the closed form is a difference of large numbers, and in float32
    wrong by more than what ρ is compared with.
    """
    given = _numbers("radam", betas, eps, weight_decay)

    def advance(shared: Shared, hyper: Hyper, rate: Tensor, t: Tensor) -> Shared:
        beta = hyper["beta2"]
        weight, age = shared["weight"], shared["age"]
        return {"weight": 1 + weight * beta, "age": (age + weight) * beta}

    def rule(one: One) -> New:
        m, v = moments(one)
        length = 1 + 2 * one.shared["age"] / one.shared["weight"]
        limit = 2 / (1 - one.hyper["beta2"]) - 1
        above = (length - 4) * (length - 2) * limit
        below = (limit - 4) * (limit - 2) * length
        is_long = gt(length, RADAM_LEAST_LENGTH)
        rectified = sqrt(where(is_long, above / below, 1.0))
        scale = rectified * sqrt(one.correction("beta2")) / (sqrt(v) + one.hyper["eps"])
        step = m * where(is_long, scale, 1.0)
        return one.p - step * (one.rate / one.correction("beta1")), {"m": m, "v": v}

    how = _coupling("radam", decoupled_weight_decay)
    parts = Parts({"m": zeros, "v": zeros}, how, {"weight": 0.0, "age": 0.0}, advance)
    return per_parameter("radam", lr, given, rule, parts, decay, maximize)


def adamax(
    lr: Rate = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adam with the greatest gradient in place of the second moment, as torch.optim.Adamax."""
    given = _numbers("adamax", betas, eps, weight_decay)

    def rule(one: One) -> New:
        m = one.average("m", one.g, "beta1")
        u = maximum(one.state["u"] * one.hyper["beta2"], abs(one.g) + one.hyper["eps"])
        return one.p - m / u * (one.rate / one.correction("beta1")), {"m": m, "u": u}

    parts = Parts({"m": zeros, "u": zeros}, Decay.COUPLED)
    return per_parameter("adamax", lr, given, rule, parts, decay, maximize)


def adabelief(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-16,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam with the variance of the gradient in place of its square (Zhuang and others, 2020)."""
    given = _numbers("adabelief", betas, eps, weight_decay)

    def rule(one: One) -> New:
        m = one.average("m", one.g, "beta1")
        surprise = one.g - m
        s = one.average("s", surprise * surprise, "beta2") + one.hyper["eps"]
        step = m / (corrected_root(one, s) + one.hyper["eps"])
        return one.p - step * (one.rate / one.correction("beta1")), {"m": m, "s": s}

    return per_parameter("adabelief", lr, given, rule, Parts({"m": zeros, "s": zeros}), decay)


def ademamix(
    lr: Rate = 1e-3,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    alpha: float = 5.0,
    t_alpha_beta3: int | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
) -> Optimizer:
    """AdamW with a second, slower average of the gradient (Pagliardini and others, 2024).

    The step is (m̂₁ + alpha · m₂) / (√v̂ + eps). With `t_alpha_beta3`, usually the number of updates,
    alpha grows from 0 and the slow β from β₁ to their values over that many updates.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 3:
        given = f"betas = {betas!r}"
        raise ArgumentError("ademamix", given, "Give three numbers: (0.9, 0.999, 0.9999).")
    warmup: dict[str, Given] = {}
    if t_alpha_beta3 is not None:
        check_whole("ademamix", "t_alpha_beta3", t_alpha_beta3)
        warmup = {"warmup": (t_alpha_beta3, STEPS)}
    numbers_ = _numbers(
        "ademamix",
        betas[:2],
        eps,
        weight_decay,
        beta3=(betas[2], UNIT),
        alpha=(alpha, NOT_NEGATIVE),
        **warmup,
    )

    def slow(hyper: Hyper, t: Tensor) -> tuple[Tensor, Tensor]:
        """Alpha and the slow β of an update: their half-lives grow linearly."""
        if not warmup:
            return hyper["alpha"], hyper["beta3"]
        done = minimum(t / hyper["warmup"], 1.0)
        start, end = log(hyper["beta1"]), log(hyper["beta3"])
        beta = exp(start * end / ((1 - done) * end + done * start))
        return hyper["alpha"] * done, where(lt(done, 1), beta, hyper["beta3"])

    def rule(one: One) -> New:
        m, v = moments(one)
        amount, beta = slow(one.hyper, one.t)
        m2 = one.state["m2"] * beta + one.g * (1 - beta)
        step = m / one.correction("beta1") + m2 * amount
        new = {"m": m, "m2": m2, "v": v}
        return one.p - step / (corrected_root(one, v) + one.hyper["eps"]) * one.rate, new

    parts = Parts({"m": zeros, "m2": zeros, "v": zeros})
    return per_parameter("ademamix", lr, numbers_, rule, parts, decay)


def laprop(
    lr: Rate = 4e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-15,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
) -> Optimizer:
    """Momentum of gradients that are divided by their root mean square first (Ziyin, 2020)."""
    given = _numbers("laprop", betas, eps, weight_decay)

    def rule(one: One) -> New:
        v = one.average("v", one.g * one.g, "beta2")
        m = one.average("m", one.g / (corrected_root(one, v) + one.hyper["eps"]), "beta1")
        return one.p - m * (one.rate / one.correction("beta1")), {"m": m, "v": v}

    return per_parameter("laprop", lr, given, rule, Parts({"m": zeros, "v": zeros}), decay)


def lion(
    lr: Rate = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    decay: Selector | None = None,
) -> Optimizer:
    """The sign of an interpolated momentum (Chen and others, 2023)."""
    given = numbers("lion", **check_betas("lion", betas), weight_decay=(weight_decay, NOT_NEGATIVE))

    def rule(one: One) -> New:
        step = sign(one.average("m", one.g, "beta1"))
        return one.p - step * one.rate, {"m": one.average("m", one.g, "beta2")}

    return per_parameter("lion", lr, given, rule, Parts({"m": zeros}, flags={}), decay)


def adamp(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    delta: float = 0.1,
    wd_ratio: float = 0.1,
    nesterov: bool = False,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam without the part of a step that only lengthens scale-invariant weights (Heo, 2021).

    A weight counts as scale-invariant where its gradient is nearly orthogonal to it: by channel, or
    as a whole. Weight decay is `wd_ratio` times weaker there.
    """
    given = _numbers(
        "adamp",
        betas,
        eps,
        weight_decay,
        delta=(delta, NOT_NEGATIVE),
        wd_ratio=(wd_ratio, NOT_NEGATIVE),
    )
    check_flag("adamp", nesterov=nesterov)

    def rule(one: One) -> New:
        m, v = moments(one)
        beta1 = one.hyper["beta1"]
        ahead = m * beta1 + one.g * (1 - beta1) if nesterov else m
        step = ahead / (corrected_root(one, v) + one.hyper["eps"])
        step, ratio = _projected(one, step)
        p = one.p if one.decay is None else one.p * (1 - one.rate * one.decay * ratio)
        return p - step * (one.rate / one.correction("beta1")), {"m": m, "v": v}

    parts = Parts({"m": zeros, "v": zeros}, Decay.OWN)
    return per_parameter("adamp", lr, given, rule, parts, decay)


def _projected(one: One, step: Tensor) -> tuple[Tensor, Tensor | float]:
    """The step without its radial part where it counts as such, and the factor on the decay."""
    if one.p.ndim < 2:
        return step, 1.0
    eps = one.hyper["eps"]
    by_channel = _rows(one, step, (one.p.shape[0], -1), eps)
    as_whole = _rows(one, step, (1, -1), eps)
    is_channel, is_whole = (lt(found[0], one.hyper["delta"]) for found in (by_channel, as_whole))
    chosen = where(is_channel, by_channel[1], where(is_whole, as_whole[1], step))
    ratio = where(is_channel | is_whole, one.hyper["wd_ratio"], 1.0)
    return chosen, ratio


def _rows(one: One, step: Tensor, rows: tuple[int, int], eps: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest cosine of gradient and weight over rows, times √size; the tangential step."""
    p, g, s = (reshape(x, rows) for x in (one.p, one.g, step))
    length = norm(p, 1, keepdims=True)
    cosine = abs(sum_of(g * p, 1, keepdims=True)) / maximum(norm(g, 1, keepdims=True) * length, eps)
    unit = p / (length + eps)
    flat = s - unit * sum_of(unit * s, 1, keepdims=True)
    return max_of(cosine) * math.sqrt(p.shape[1]), reshape(flat, step.shape)
