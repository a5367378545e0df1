"""Gamma, beta and Dirichlet distributions and their relatives."""

from __future__ import annotations

import math

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape
from treadle.distributions.distribution import (
    INSIDE_UNIT,
    POSITIVE,
    REAL,
    SIMPLEX,
    Distribution,
    parameters,
    standard_normal,
    unit_interval,
)
from treadle.frontend.coerce import broadcast_to
from treadle.frontend.functions.arithmetic import (
    as_real,
    exp,
    gt,
    log,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    lt,
    maximum,
    pow,
    sqrt,
    stop_gradient,
    where,
)
from treadle.frontend.functions.gamma import digamma, lgamma
from treadle.frontend.functions.incomplete_gamma import igamma, igammac
from treadle.frontend.tensor import Operand, Tensor

# Each attempt of Marsaglia and Tsang is accepted with a probability of at least 0.95.
ATTEMPTS = 8
SERIES_TERMS = 64
QUADRATURE_POINTS = 32
LARGE = 100.0  # from here on the gradient of a sample is that of an expansion in 1 / √α
TINY = 2.0**-126


class Gamma(Distribution):
    """The gamma distribution with a shape and a rate, as torch.distributions.Gamma."""

    has_rsample = True
    support = POSITIVE

    def __init__(self, concentration: Operand, rate: Operand) -> None:
        self.concentration, self.rate = parameters(
            self._name, concentration=(concentration, POSITIVE), rate=(rate, POSITIVE)
        )
        super().__init__(self.rate.shape, (), self.rate.dtype)

    @property
    def mean(self) -> Tensor:
        return self.concentration / self.rate

    @property
    def mode(self) -> Tensor:
        return maximum(self.concentration - 1, 0.0) / self.rate

    @property
    def variance(self) -> Tensor:
        return self.concentration / (self.rate * self.rate)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        alpha = broadcast_to(self.concentration, self.extended(sample_shape))
        return maximum(standard_gamma(alpha) / self.rate, TINY)

    def log_prob(self, value: Operand) -> Tensor:
        x, alpha = self._value(value), self.concentration
        return alpha * log(self.rate) + (alpha - 1) * log(x) - self.rate * x - lgamma(alpha)

    def cdf(self, value: Operand) -> Tensor:
        place = self.rate * self._value(value)
        return igamma(broadcast_to(self.concentration, place.shape), place)

    def entropy(self) -> Tensor:
        alpha = self.concentration
        return alpha - log(self.rate) + lgamma(alpha) + (1 - alpha) * digamma(alpha)


class Chi2(Gamma):
    """The χ² distribution, as torch.distributions.Chi2."""

    def __init__(self, df: Operand) -> None:
        (self.df,) = parameters(self._name, df=(df, POSITIVE))
        super().__init__(0.5 * self.df, 0.5)


class InverseGamma(Distribution):
    """The reciprocal of a gamma number, as torch.distributions.InverseGamma."""

    has_rsample = True
    support = POSITIVE

    def __init__(self, concentration: Operand, rate: Operand) -> None:
        self.base_dist = Gamma(concentration, rate)
        self.concentration, self.rate = self.base_dist.concentration, self.base_dist.rate
        super().__init__(self.rate.shape, (), self.rate.dtype)

    @property
    def mean(self) -> Tensor:
        is_finite = gt(self.concentration, 1)
        alpha = where(is_finite, self.concentration, 2.0)
        return where(is_finite, self.rate / (alpha - 1), math.inf)

    @property
    def mode(self) -> Tensor:
        return self.rate / (self.concentration + 1)

    @property
    def variance(self) -> Tensor:
        is_finite = gt(self.concentration, 2)
        alpha = where(is_finite, self.concentration, 3.0)
        ratio = self.rate / (alpha - 1)
        return where(is_finite, ratio * ratio / (alpha - 2), math.inf)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        return 1 / self.base_dist.rsample(sample_shape)

    def log_prob(self, value: Operand) -> Tensor:
        x, alpha = self._value(value), self.concentration
        return alpha * log(self.rate) - (alpha + 1) * log(x) - self.rate / x - lgamma(alpha)

    def cdf(self, value: Operand) -> Tensor:
        place = self.rate / self._value(value)
        return igammac(broadcast_to(self.concentration, place.shape), place)

    def entropy(self) -> Tensor:
        alpha = self.concentration
        return alpha + log(self.rate) + lgamma(alpha) - (1 + alpha) * digamma(alpha)


class Beta(Distribution):
    """The beta distribution, as torch.distributions.Beta."""

    has_rsample = True
    support = INSIDE_UNIT

    def __init__(self, concentration1: Operand, concentration0: Operand) -> None:
        self.concentration1, self.concentration0 = parameters(
            self._name,
            concentration1=(concentration1, POSITIVE),
            concentration0=(concentration0, POSITIVE),
        )
        super().__init__(self.concentration1.shape, (), self.concentration1.dtype)

    @property
    def _total(self) -> Tensor:
        return self.concentration1 + self.concentration0

    @property
    def mean(self) -> Tensor:
        return self.concentration1 / self._total

    @property
    def mode(self) -> Tensor:
        a, b = self.concentration1, self.concentration0
        has_peak = logical_and(gt(a, 1), gt(b, 1))
        inside = (a - 1) / where(has_peak, self._total - 2, 1.0)
        at_an_end = where(gt(a, b), 1.0, 0.0)
        is_open = logical_or(gt(a, 1), gt(b, 1))
        no_peak = where(
            logical_or(is_open, logical_not(a >= b) | logical_not(a <= b)), at_an_end, math.nan
        )
        return where(has_peak, inside, no_peak)

    @property
    def variance(self) -> Tensor:
        total = self._total
        return self.concentration1 * self.concentration0 / (total * total * (total + 1))

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        shape = self.extended(sample_shape)
        a = log_gamma_sample(broadcast_to(self.concentration1, shape))
        b = log_gamma_sample(broadcast_to(self.concentration0, shape))
        return 1 / (1 + exp(b - a))

    def log_prob(self, value: Operand) -> Tensor:
        x, a, b = self._value(value), self.concentration1, self.concentration0
        return (a - 1) * log(x) + (b - 1) * log1p(-x) - log_beta(a, b)

    def entropy(self) -> Tensor:
        a, b, total = self.concentration1, self.concentration0, self._total
        slopes = (a - 1) * digamma(a) + (b - 1) * digamma(b) - (total - 2) * digamma(total)
        return log_beta(a, b) - slopes


class Dirichlet(Distribution):
    """The Dirichlet distribution over the last axis, as torch.distributions.Dirichlet."""

    has_rsample = True
    support = SIMPLEX

    def __init__(self, concentration: Operand) -> None:
        (self.concentration,) = parameters(self._name, concentration=(concentration, POSITIVE))
        shape = self.concentration.shape
        if not shape:
            raise ArgumentError(
                self._name, "concentration is one number", "Give a vector: an entry per class."
            )
        super().__init__(shape[:-1], shape[-1:], self.concentration.dtype)

    @property
    def _total(self) -> Tensor:
        return self.concentration.sum(-1, keepdims=True)

    @property
    def mean(self) -> Tensor:
        return self.concentration / self._total

    @property
    def mode(self) -> Tensor:
        above = maximum(self.concentration - 1, 0.0)
        total = above.sum(-1, keepdims=True)
        is_inside = gt(total, 0)
        largest = self.concentration.argmax(-1)
        classes = np.arange(self.event_shape[0], dtype=np.int32)
        corner = (largest.reshape((*self.batch_shape, 1)) == classes).astype(self.dtype)
        return where(is_inside, above / where(is_inside, total, 1.0), corner)

    @property
    def variance(self) -> Tensor:
        alpha, total = self.concentration, self._total
        return alpha * (total - alpha) / (total * total * (total + 1))

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        drawn = log_gamma_sample(broadcast_to(self.concentration, self.extended(sample_shape)))
        weights = exp(drawn - stop_gradient(drawn.max(-1, keepdims=True)))
        return weights / weights.sum(-1, keepdims=True)

    def log_prob(self, value: Operand) -> Tensor:
        alpha = self.concentration
        norm = lgamma(alpha).sum(-1) - lgamma(alpha.sum(-1))
        return ((alpha - 1) * log(self._value(value))).sum(-1) - norm

    def entropy(self) -> Tensor:
        alpha, total = self.concentration, self.concentration.sum(-1)
        norm = lgamma(alpha).sum(-1) - lgamma(total)
        slopes = (total - alpha.shape[-1]) * digamma(total) - ((alpha - 1) * digamma(alpha)).sum(-1)
        return norm + slopes


class StudentT(Distribution):
    """Student's t, as torch.distributions.StudentT."""

    has_rsample = True

    def __init__(self, df: Operand, loc: Operand = 0.0, scale: Operand = 1.0) -> None:
        self.df, self.loc, self.scale = parameters(
            self._name, df=(df, POSITIVE), loc=(loc, REAL), scale=(scale, POSITIVE)
        )
        super().__init__(self.df.shape, (), self.df.dtype)

    @property
    def mean(self) -> Tensor:
        return where(gt(self.df, 1), self.loc, math.nan)

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        is_finite = gt(self.df, 2)
        df = where(is_finite, self.df, 3.0)
        found = self.scale * self.scale * df / (df - 2)
        return where(is_finite, found, where(gt(self.df, 1), math.inf, math.nan))

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        from_gamma = Chi2(self.df).rsample(sample_shape)
        z = standard_normal(self.extended(sample_shape), self.dtype)
        return self.loc + self.scale * z * pow(from_gamma / self.df, -0.5)

    def log_prob(self, value: Operand) -> Tensor:
        z = (self._value(value) - self.loc) / self.scale
        half = 0.5 * self.df
        norm = log(self.scale) + 0.5 * log(self.df * math.pi) + lgamma(half) - lgamma(half + 0.5)
        return -(half + 0.5) * log1p(z * z / self.df) - norm

    def entropy(self) -> Tensor:
        half = 0.5 * self.df
        log_beta = lgamma(half) + 0.5 * math.log(math.pi) - lgamma(half + 0.5)
        shape = (half + 0.5) * (digamma(half + 0.5) - digamma(half))
        return log(self.scale) + shape + 0.5 * log(self.df) + log_beta


def log_beta(a: Tensor, b: Tensor) -> Tensor:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def standard_gamma(alpha: Tensor) -> Tensor:
    """A gamma number with rate 1 for each α, with its gradient."""
    return exp(log_gamma_sample(alpha))


def log_gamma_sample(alpha: Tensor) -> Tensor:
    """The logarithm of a gamma number, which stays finite for small α."""
    alpha = as_real(alpha)
    is_small = lt(alpha, 1)
    raised = where(is_small, alpha + 1, alpha)
    x = stop_gradient(_accepted(stop_gradient(raised)))
    # Γ(α) is Γ(α + 1) times a uniform number to the power of 1 / α.
    boost = log(unit_interval(alpha.shape, alpha.dtype))
    found = log(x) + where(is_small, boost / where(is_small, alpha, 1.0), 0.0)
    # The value of x stays, and its slope with respect to α is added.
    slope = stop_gradient(_slope(raised, x) / x)
    return found + slope * (raised - stop_gradient(raised))


def _accepted(alpha: Tensor) -> Tensor:
    """Marsaglia and Tsang's samples for α ≥ 1: the first accepted of a fixed number of attempts."""
    d = alpha - 1 / 3
    c = 1 / sqrt(9 * d)
    found, is_found = d, alpha < 0
    for _ in range(ATTEMPTS):
        z = standard_normal(alpha.shape, alpha.dtype)
        u = unit_interval(alpha.shape, alpha.dtype)
        root = 1 + c * z
        is_positive = gt(root, 0)
        v = where(is_positive, root * root * root, 1.0)
        fits = lt(log(u), 0.5 * z * z + d * (1 - v + log(v)))
        is_taken = logical_and(logical_and(is_positive, fits), logical_not(is_found))
        found = where(is_taken, d * v, found)
        is_found = logical_or(is_found, is_taken)
    return found


def _slope(alpha: Tensor, x: Tensor) -> Tensor:
    """dx/dα of a gamma number at a fixed probability: −(∂P(α, x)/∂α) / density."""
    alpha, x = stop_gradient(alpha), stop_gradient(x)
    is_large, is_low = gt(alpha, LARGE), lt(x, maximum(alpha, 2.0))
    middle = where(is_large, 1.0, alpha)
    low = _slope_below(middle, where(logical_or(is_large, logical_not(is_low)), 0.5 * middle, x))
    high = _slope_above(middle, where(logical_or(is_large, is_low), 2.0 * middle + 2.0, x))
    expanded = _slope_expanded(where(is_large, alpha, LARGE), where(is_large, x, LARGE))
    return where(is_large, expanded, where(is_low, low, high))


def _slope_below(alpha: Tensor, x: Tensor) -> Tensor:
    """By the series of the incomplete gamma function: terms fall quickly where x < max(α, 2)."""
    term, total = alpha * 0 + 1, alpha * 0 + 1
    harmonic, weighted = alpha * 0, alpha * 0
    for k in range(1, SERIES_TERMS):
        term = term * x / (alpha + k)
        harmonic = harmonic + 1 / (alpha + k)
        total = total + term
        weighted = weighted + term * harmonic
    return -(x / alpha) * (total * (log(x) - digamma(alpha + 1)) - weighted)


def _slope_above(alpha: Tensor, x: Tensor) -> Tensor:
    """∫ (log t − ψ(α)) (t/x)^(α−1) e^(x−t) dt over t > x, where the integrand changes no sign."""
    nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE_POINTS)
    # The integrand has fallen by e⁻²⁵ or more at the end of the interval.
    width = (25 + 5 * sqrt(alpha) * 2).reshape((*alpha.shape, 1))
    s = width * (0.5 * (nodes + 1)).astype(np.float32)
    start, shape = x.reshape((*x.shape, 1)), alpha.reshape((*alpha.shape, 1))
    logs = log(start + s) - digamma(shape)
    density = exp((shape - 1) * log1p(s / start) - s)
    return (logs * density * width * (0.5 * weights).astype(np.float32)).sum(-1)


def _slope_expanded(alpha: Tensor, x: Tensor) -> Tensor:
    """By Cornish and Fisher's expansion of x in a normal number z, for large α."""
    root = sqrt(alpha)
    z = 3 * root * (pow(x / alpha, 1 / 3) - 1 + 1 / (9 * alpha))
    z2 = z * z
    third = z * (z2 - 7) / (72 * alpha * root)
    fourth = (3 * z2 * z2 + 7 * z2 - 16) / (810 * alpha * alpha)
    return 1 + z / (2 * root) - third + fourth
