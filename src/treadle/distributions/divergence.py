"""Kullback–Leibler divergences in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.base.errors import ArgumentError
from treadle.distributions.compound import Independent, TransformedDistribution
from treadle.distributions.continuous import (
    Exponential,
    Gumbel,
    HalfNormal,
    Laplace,
    LogNormal,
    Normal,
    Pareto,
    Uniform,
)
from treadle.distributions.discrete import (
    Bernoulli,
    Binomial,
    Categorical,
    Geometric,
    OneHotCategorical,
    Poisson,
)
from treadle.distributions.distribution import Distribution, summed
from treadle.distributions.gamma import Beta, Dirichlet, Gamma, log_beta
from treadle.distributions.multivariate import MultivariateNormal
from treadle.frontend.coerce import broadcast_to
from treadle.frontend.functions.activations import log_sigmoid
from treadle.frontend.functions.arithmetic import abs, eq, exp, gt, le, log, logical_and, where
from treadle.frontend.functions.gamma import digamma, lgamma
from treadle.frontend.tensor import Tensor
from treadle.linalg.triangular import solve_triangular

Formula = Callable[..., Tensor]
FORMULAS: dict[tuple[type, type], Formula] = {}
EULER = 0.5772156649015329


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """The divergence ∫ p log(p / q) in nats: → the broadcast batch shape."""
    for first in type(p).__mro__:
        for second in type(q).__mro__:
            if (first, second) in FORMULAS:
                return FORMULAS[first, second](p, q)
    raise NotImplementedError(
        f"kl_divergence has no formula for {type(p).__name__} and {type(q).__name__}. "
        "Estimate it by (p.log_prob(x) - q.log_prob(x)).mean() for samples x of p."
    )


def formula(first: type, second: type) -> Callable[[Formula], Formula]:
    def put(function: Formula) -> Formula:
        assert (first, second) not in FORMULAS, (first, second)
        FORMULAS[first, second] = function
        return function

    return put


@formula(Normal, Normal)
def _normals(p: Normal, q: Normal) -> Tensor:
    ratio, apart = p.scale / q.scale, (p.loc - q.loc) / q.scale
    square = ratio * ratio
    return 0.5 * (square + apart * apart - 1 - log(square))


@formula(HalfNormal, HalfNormal)
def _half_normals(p: HalfNormal, q: HalfNormal) -> Tensor:
    return _normals(p.base, q.base)


@formula(LogNormal, LogNormal)
def _log_normals(p: LogNormal, q: LogNormal) -> Tensor:
    return _normals(p.base_dist, q.base_dist)


@formula(Laplace, Laplace)
def _laplaces(p: Laplace, q: Laplace) -> Tensor:
    ratio, apart = p.scale / q.scale, abs(p.loc - q.loc)
    return -log(ratio) + apart / q.scale + ratio * exp(-apart / p.scale) - 1


@formula(Exponential, Exponential)
def _exponentials(p: Exponential, q: Exponential) -> Tensor:
    ratio = q.rate / p.rate
    return ratio - 1 - log(ratio)


@formula(Gumbel, Gumbel)
def _gumbels(p: Gumbel, q: Gumbel) -> Tensor:
    ratio, apart = p.scale / q.scale, (q.loc - p.loc) / q.scale
    overlap = exp(apart + lgamma(1 + ratio))
    return -log(ratio) - apart + overlap - 1 + EULER * (ratio - 1)


@formula(Uniform, Uniform)
def _uniforms(p: Uniform, q: Uniform) -> Tensor:
    is_inside = logical_and(le(q.low, p.low), le(p.high, q.high))
    return where(is_inside, log((q.high - q.low) / (p.high - p.low)), math.inf)


@formula(Uniform, Normal)
def _uniform_normal(p: Uniform, q: Normal) -> Tensor:
    width, apart = p.high - p.low, (p.high + p.low) * 0.5 - q.loc
    spread = (width * width / 12 + apart * apart) / (q.scale * q.scale)
    return 0.5 * spread + log(q.scale / width) + 0.5 * math.log(2 * math.pi)


@formula(Pareto, Pareto)
def _paretos(p: Pareto, q: Pareto) -> Tensor:
    ratio = q.alpha / p.alpha
    found = q.alpha * log(p.scale / q.scale) - log(ratio) + ratio - 1
    return where(p.scale < q.scale, math.inf, found)


@formula(Gamma, Gamma)
def _gammas(p: Gamma, q: Gamma) -> Tensor:
    a, b = p.concentration, q.concentration
    rates = b * log(p.rate / q.rate) + a * (q.rate / p.rate - 1)
    return rates + lgamma(b) - lgamma(a) + (a - b) * digamma(a)


@formula(Exponential, Gamma)
def _exponential_gamma(p: Exponential, q: Gamma) -> Tensor:
    return _gammas(Gamma(p.rate * 0 + 1, p.rate), q)


@formula(Gamma, Exponential)
def _gamma_exponential(p: Gamma, q: Exponential) -> Tensor:
    return _gammas(p, Gamma(q.rate * 0 + 1, q.rate))


@formula(Beta, Beta)
def _betas(p: Beta, q: Beta) -> Tensor:
    a, b, c, d = p.concentration1, p.concentration0, q.concentration1, q.concentration0
    slopes = (a - c) * digamma(a) + (b - d) * digamma(b) + (c + d - a - b) * digamma(a + b)
    return log_beta(c, d) - log_beta(a, b) + slopes


@formula(Dirichlet, Dirichlet)
def _dirichlets(p: Dirichlet, q: Dirichlet) -> Tensor:
    a, b = p.concentration, q.concentration
    total = a.sum(-1)
    norms = lgamma(total) - lgamma(b.sum(-1)) - (lgamma(a) - lgamma(b)).sum(-1)
    slopes = digamma(a) - digamma(total).reshape((*total.shape, 1))
    return norms + ((a - b) * slopes).sum(-1)


@formula(Bernoulli, Bernoulli)
def _bernoullis(p: Bernoulli, q: Bernoulli) -> Tensor:
    succeeds = p.probs * (log_sigmoid(p.logits) - log_sigmoid(q.logits))
    fails = (1 - p.probs) * (log_sigmoid(-p.logits) - log_sigmoid(-q.logits))
    found = succeeds + fails
    found = where(logical_and(eq(q.probs, 0), gt(p.probs, 0)), math.inf, found)
    return where(logical_and(eq(q.probs, 1), p.probs < 1), math.inf, found)


@formula(Binomial, Binomial)
def _binomials(p: Binomial, q: Binomial) -> Tensor:
    each = p.probs * (p.logits - q.logits) + log_sigmoid(-p.logits) - log_sigmoid(-q.logits)
    found = where(gt(p.total_count, q.total_count), math.inf, p.total_count * each)
    return where(p.total_count < q.total_count, math.nan, found)


@formula(Geometric, Geometric)
def _geometrics(p: Geometric, q: Geometric) -> Tensor:
    fails = (1 - p.probs) / p.probs * (log_sigmoid(-p.logits) - log_sigmoid(-q.logits))
    return fails + log_sigmoid(p.logits) - log_sigmoid(q.logits)


@formula(Poisson, Poisson)
def _poissons(p: Poisson, q: Poisson) -> Tensor:
    return p.rate * (log(p.rate) - log(q.rate)) - (p.rate - q.rate)


@formula(Categorical, Categorical)
def _categoricals(p: Categorical, q: Categorical) -> Tensor:
    each = p.probs * (p.logits - q.logits)
    each = where(eq(p.probs, 0), 0.0, where(eq(q.probs, 0), math.inf, each))
    return each.sum(-1)


@formula(OneHotCategorical, OneHotCategorical)
def _one_hots(p: OneHotCategorical, q: OneHotCategorical) -> Tensor:
    return _categoricals(p.categorical, q.categorical)


@formula(MultivariateNormal, MultivariateNormal)
def _vectors(p: MultivariateNormal, q: MultivariateNormal) -> Tensor:
    apart = q.loc - p.loc
    batch, size = apart.shape[:-1], apart.shape[-1]
    triangle = broadcast_to(q.scale_tril, (*batch, size, size))
    ratio = solve_triangular(triangle, broadcast_to(p.scale_tril, triangle.shape), upper=False)
    z = solve_triangular(triangle, apart.reshape((*apart.shape, 1)), upper=False)
    squares = (ratio * ratio).sum((-2, -1)) + (z * z).sum((-2, -1))
    return q.half_log_det() - p.half_log_det() + 0.5 * (squares - size)


@formula(Independent, Independent)
def _independents(p: Independent, q: Independent) -> Tensor:
    if p.reinterpreted_batch_ndims != q.reinterpreted_batch_ndims:
        raise ArgumentError(
            "kl_divergence",
            f"{p.reinterpreted_batch_ndims} and {q.reinterpreted_batch_ndims} independent axes",
            "Make both independent over the same axes.",
        )
    return summed(kl_divergence(p.base_dist, q.base_dist), p.reinterpreted_batch_ndims)


@formula(TransformedDistribution, TransformedDistribution)
def _transformed(p: TransformedDistribution, q: TransformedDistribution) -> Tensor:
    same = [repr(t) for t in p.transforms] == [repr(t) for t in q.transforms]
    if not same or any(vars(t) for t in (*p.transforms, *q.transforms)):
        raise NotImplementedError("kl_divergence: the two transforms are not known to be equal.")
    return kl_divergence(p.base_dist, q.base_dist)
