"""Distributions of one real number with a density in closed form."""

from __future__ import annotations

import math

import numpy as np

from treadle.base.shapes import Shape
from treadle.distributions.compound import TransformedDistribution
from treadle.distributions.distribution import (
    INSIDE_UNIT,
    NOT_NEGATIVE,
    POSITIVE,
    REAL,
    Distribution,
    Domain,
    check,
    parameters,
    standard_normal,
    unit_interval,
)
from treadle.distributions.transforms import AffineTransform, ExpTransform
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.activations import log_sigmoid, sigmoid
from treadle.frontend.functions.arithmetic import (
    abs,
    erf,
    exp,
    expm1,
    gt,
    le,
    log,
    log1p,
    logical_and,
    lt,
    maximum,
    minimum,
    pow,
    sign,
    where,
)
from treadle.frontend.functions.elementary import atan, tan
from treadle.frontend.functions.gamma import lgamma
from treadle.frontend.functions.special import erfinv
from treadle.frontend.tensor import Operand, Tensor

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
EULER = float(np.euler_gamma)
UNKNOWN = Domain("", lambda x: np.ones(x.shape, bool))


class LocationScale(Distribution):
    """A standard distribution, times a scale, plus a location."""

    has_rsample = True

    def __init__(self, loc: Operand, scale: Operand) -> None:
        self.loc, self.scale = parameters(self._name, loc=(loc, REAL), scale=(scale, POSITIVE))
        super().__init__(self.loc.shape, (), self.loc.dtype)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    def _standard(self, shape: Shape) -> Tensor:
        raise NotImplementedError

    def _standardised(self, value: Operand) -> Tensor:
        return (self._value(value) - self.loc) / self.scale

    def _probability(self, value: Operand) -> Tensor:
        p = as_tensor(value)
        check(self._name, "value", p, INSIDE_UNIT)
        return cast(p, self.dtype)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        return self._standard(self.extended(sample_shape)) * self.scale + self.loc


class Normal(LocationScale):
    """The normal distribution, as torch.distributions.Normal."""

    @property
    def stddev(self) -> Tensor:
        return self.scale

    @property
    def variance(self) -> Tensor:
        return self.scale * self.scale

    def _standard(self, shape: Shape) -> Tensor:
        return standard_normal(shape, self.dtype)

    def log_prob(self, value: Operand) -> Tensor:
        z = self._standardised(value)
        return -0.5 * z * z - log(self.scale) - HALF_LOG_TAU

    def cdf(self, value: Operand) -> Tensor:
        return 0.5 * (1 + erf(self._standardised(value) * math.sqrt(0.5)))

    def icdf(self, value: Operand) -> Tensor:
        p = self._probability(value)
        return self.loc + self.scale * erfinv(2 * p - 1) * math.sqrt(2)

    def entropy(self) -> Tensor:
        return log(self.scale) + (0.5 + HALF_LOG_TAU)


class Laplace(LocationScale):
    """The Laplace distribution, as torch.distributions.Laplace."""

    @property
    def variance(self) -> Tensor:
        return 2 * self.scale * self.scale

    def _standard(self, shape: Shape) -> Tensor:
        centred = unit_interval(shape, self.dtype) - 0.5
        return -sign(centred) * log1p(-2 * abs(centred))

    def log_prob(self, value: Operand) -> Tensor:
        return -abs(self._standardised(value)) - log(2 * self.scale)

    def cdf(self, value: Operand) -> Tensor:
        z = self._standardised(value)
        return 0.5 - 0.5 * sign(z) * expm1(-abs(z))

    def icdf(self, value: Operand) -> Tensor:
        centred = self._probability(value) - 0.5
        return self.loc - self.scale * sign(centred) * log1p(-2 * abs(centred))

    def entropy(self) -> Tensor:
        return 1 + log(2 * self.scale)


class Cauchy(LocationScale):
    """The Cauchy distribution, as torch.distributions.Cauchy; it has no mean and no variance."""

    @property
    def mean(self) -> Tensor:
        return self.loc * math.nan

    @property
    def variance(self) -> Tensor:
        return self.loc * 0 + math.inf

    def _standard(self, shape: Shape) -> Tensor:
        return tan((unit_interval(shape, self.dtype) - 0.5) * math.pi)

    def log_prob(self, value: Operand) -> Tensor:
        z = self._standardised(value)
        return -math.log(math.pi) - log(self.scale) - log1p(z * z)

    def cdf(self, value: Operand) -> Tensor:
        return atan(self._standardised(value)) * (1 / math.pi) + 0.5

    def icdf(self, value: Operand) -> Tensor:
        return tan((self._probability(value) - 0.5) * math.pi) * self.scale + self.loc

    def entropy(self) -> Tensor:
        return log(self.scale) + math.log(4 * math.pi)


class Gumbel(LocationScale):
    """The Gumbel distribution, as torch.distributions.Gumbel."""

    @property
    def mean(self) -> Tensor:
        return self.loc + self.scale * EULER

    @property
    def variance(self) -> Tensor:
        return self.scale * self.scale * (math.pi**2 / 6)

    def _standard(self, shape: Shape) -> Tensor:
        return -log(-log(unit_interval(shape, self.dtype)))

    def log_prob(self, value: Operand) -> Tensor:
        z = self._standardised(value)
        return -z - exp(-z) - log(self.scale)

    def cdf(self, value: Operand) -> Tensor:
        return exp(-exp(-self._standardised(value)))

    def icdf(self, value: Operand) -> Tensor:
        return self.loc - self.scale * log(-log(self._probability(value)))

    def entropy(self) -> Tensor:
        return log(self.scale) + (1 + EULER)


class Logistic(LocationScale):
    """The logistic distribution: the logit of a uniform number, times a scale, plus a location."""

    @property
    def variance(self) -> Tensor:
        return self.scale * self.scale * (math.pi**2 / 3)

    def _standard(self, shape: Shape) -> Tensor:
        u = unit_interval(shape, self.dtype)
        return log(u) - log1p(-u)

    def log_prob(self, value: Operand) -> Tensor:
        z = self._standardised(value)
        return log_sigmoid(z) + log_sigmoid(-z) - log(self.scale)

    def cdf(self, value: Operand) -> Tensor:
        return sigmoid(self._standardised(value))

    def icdf(self, value: Operand) -> Tensor:
        p = self._probability(value)
        return self.loc + self.scale * (log(p) - log1p(-p))

    def entropy(self) -> Tensor:
        return log(self.scale) + 2.0


class Uniform(Distribution):
    """Uniform between two bounds, as torch.distributions.Uniform."""

    has_rsample = True
    support = UNKNOWN  # depends on the bounds; outside of them the density is 0

    def __init__(self, low: Operand, high: Operand) -> None:
        self.low, self.high = parameters(self._name, low=(low, REAL), high=(high, REAL))
        check(self._name, "high - low", self.high - self.low, POSITIVE)
        super().__init__(self.low.shape, (), self.low.dtype)

    @property
    def mean(self) -> Tensor:
        return (self.low + self.high) * 0.5

    @property
    def mode(self) -> Tensor:
        return self.mean * math.nan

    @property
    def variance(self) -> Tensor:
        width = self.high - self.low
        return width * width * (1 / 12)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        u = unit_interval(self.extended(sample_shape), self.dtype)
        return self.low + u * (self.high - self.low)

    def log_prob(self, value: Operand) -> Tensor:
        x = self._value(value)
        is_inside = logical_and(le(self.low, x), lt(x, self.high))
        return where(is_inside, -log(self.high - self.low), -math.inf)

    def cdf(self, value: Operand) -> Tensor:
        z = (self._value(value) - self.low) / (self.high - self.low)
        return minimum(maximum(z, 0.0), 1.0)

    def icdf(self, value: Operand) -> Tensor:
        return cast(as_tensor(value), self.dtype) * (self.high - self.low) + self.low

    def entropy(self) -> Tensor:
        return log(self.high - self.low)


class Exponential(Distribution):
    """The exponential distribution, as torch.distributions.Exponential."""

    has_rsample = True
    support = NOT_NEGATIVE

    def __init__(self, rate: Operand) -> None:
        (self.rate,) = parameters(self._name, rate=(rate, POSITIVE))
        super().__init__(self.rate.shape, (), self.rate.dtype)

    @property
    def mean(self) -> Tensor:
        return 1 / self.rate

    @property
    def mode(self) -> Tensor:
        return self.rate * 0

    @property
    def variance(self) -> Tensor:
        return 1 / (self.rate * self.rate)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        return -log(unit_interval(self.extended(sample_shape), self.dtype)) / self.rate

    def log_prob(self, value: Operand) -> Tensor:
        return log(self.rate) - self.rate * self._value(value)

    def cdf(self, value: Operand) -> Tensor:
        return -expm1(-self.rate * self._value(value))

    def icdf(self, value: Operand) -> Tensor:
        return -log1p(-cast(as_tensor(value), self.dtype)) / self.rate

    def entropy(self) -> Tensor:
        return 1 - log(self.rate)


class Half(Distribution):
    """The absolute value of a distribution that is symmetric about 0."""

    has_rsample = True
    support = NOT_NEGATIVE

    def __init__(self, base: Normal | Cauchy) -> None:
        self.base, self.scale = base, base.scale
        super().__init__(base.batch_shape, (), base.dtype)

    @property
    def mode(self) -> Tensor:
        return self.scale * 0

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        return abs(self.base.rsample(sample_shape))

    def log_prob(self, value: Operand) -> Tensor:
        x = self._value(value)
        return where(x < 0, -math.inf, self.base.log_prob(x) + math.log(2))

    def cdf(self, value: Operand) -> Tensor:
        return 2 * self.base.cdf(self._value(value)) - 1

    def icdf(self, value: Operand) -> Tensor:
        return self.base.icdf((cast(as_tensor(value), self.dtype) + 1) * 0.5)

    def entropy(self) -> Tensor:
        return self.base.entropy() - math.log(2)


class HalfNormal(Half):
    """The absolute value of a normal number with mean 0, as torch.distributions.HalfNormal."""

    def __init__(self, scale: Operand) -> None:
        super().__init__(Normal(0.0, scale))

    @property
    def mean(self) -> Tensor:
        return self.scale * math.sqrt(2 / math.pi)

    @property
    def variance(self) -> Tensor:
        return self.scale * self.scale * (1 - 2 / math.pi)


class HalfCauchy(Half):
    """The absolute value of a Cauchy number about 0, as torch.distributions.HalfCauchy."""

    def __init__(self, scale: Operand) -> None:
        super().__init__(Cauchy(0.0, scale))

    @property
    def mean(self) -> Tensor:
        return self.scale * 0 + math.inf

    @property
    def variance(self) -> Tensor:
        return self.base.variance


class LogNormal(TransformedDistribution):
    """The exponential of a normal number, as torch.distributions.LogNormal."""

    support = POSITIVE

    def __init__(self, loc: Operand, scale: Operand) -> None:
        base = Normal(loc, scale)
        super().__init__(base, ExpTransform())
        self.loc, self.scale = base.loc, base.scale

    @property
    def mean(self) -> Tensor:
        return exp(self.loc + 0.5 * self.scale * self.scale)

    @property
    def mode(self) -> Tensor:
        return exp(self.loc - self.scale * self.scale)

    @property
    def variance(self) -> Tensor:
        square = self.scale * self.scale
        return expm1(square) * exp(2 * self.loc + square)

    def entropy(self) -> Tensor:
        return self.base_dist.entropy() + self.loc


class Weibull(Distribution):
    """The Weibull distribution, as torch.distributions.Weibull."""

    has_rsample = True
    support = POSITIVE

    def __init__(self, scale: Operand, concentration: Operand) -> None:
        self.scale, self.concentration = parameters(
            self._name, scale=(scale, POSITIVE), concentration=(concentration, POSITIVE)
        )
        super().__init__(self.scale.shape, (), self.scale.dtype)

    @property
    def mean(self) -> Tensor:
        return self.scale * exp(lgamma(1 + 1 / self.concentration))

    @property
    def mode(self) -> Tensor:
        has_peak = gt(self.concentration, 1)
        k = where(has_peak, self.concentration, 2.0)
        return where(has_peak, self.scale * pow((k - 1) / k, 1 / k), 0.0)

    @property
    def variance(self) -> Tensor:
        first = exp(2 * lgamma(1 + 1 / self.concentration))
        return self.scale * self.scale * (exp(lgamma(1 + 2 / self.concentration)) - first)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        drawn = -log(unit_interval(self.extended(sample_shape), self.dtype))
        return self.scale * pow(drawn, 1 / self.concentration)

    def log_prob(self, value: Operand) -> Tensor:
        k, z = self.concentration, self._value(value) / self.scale
        return log(k / self.scale) + (k - 1) * log(z) - pow(z, k)

    def cdf(self, value: Operand) -> Tensor:
        return -expm1(-pow(self._value(value) / self.scale, self.concentration))

    def icdf(self, value: Operand) -> Tensor:
        p = cast(as_tensor(value), self.dtype)
        return self.scale * pow(-log1p(-p), 1 / self.concentration)

    def entropy(self) -> Tensor:
        k = self.concentration
        return EULER * (1 - 1 / k) + log(self.scale / k) + 1


class Pareto(TransformedDistribution):
    """The Pareto distribution of type 1, as torch.distributions.Pareto."""

    support = UNKNOWN  # from the scale on

    def __init__(self, scale: Operand, alpha: Operand) -> None:
        self.scale, self.alpha = parameters(
            self._name, scale=(scale, POSITIVE), alpha=(alpha, POSITIVE)
        )
        base = Exponential(self.alpha)
        super().__init__(base, [ExpTransform(), AffineTransform(0.0, self.scale)])

    @property
    def mean(self) -> Tensor:
        is_finite = gt(self.alpha, 1)
        alpha = where(is_finite, self.alpha, 2.0)
        return where(is_finite, alpha * self.scale / (alpha - 1), math.inf)

    @property
    def mode(self) -> Tensor:
        return self.scale

    @property
    def variance(self) -> Tensor:
        is_finite = gt(self.alpha, 2)
        alpha = where(is_finite, self.alpha, 3.0)
        ratio = self.scale / (alpha - 1)
        return where(is_finite, ratio * ratio * alpha / (alpha - 2), math.inf)

    def entropy(self) -> Tensor:
        return log(self.scale / self.alpha) + (1 + 1 / self.alpha)
