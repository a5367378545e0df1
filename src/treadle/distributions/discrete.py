"""Distributions of classes and counts."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape
from treadle.distributions.distribution import (
    NOT_NEGATIVE,
    PROBABILITY,
    REAL,
    WHOLE,
    Distribution,
    Domain,
    check,
    common_shape,
    known_values,
    one_of,
    parameters,
    unit_interval,
)
from treadle.distributions.gamma import standard_gamma
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor, broadcast_to, cast, constant
from treadle.frontend.control import scan
from treadle.frontend.functions.activations import log_sigmoid, log_softmax, sigmoid, softplus
from treadle.frontend.functions.arithmetic import (
    abs,
    clamp,
    eq,
    exp,
    floor,
    gt,
    le,
    log,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    lt,
    maximum,
    sqrt,
    stop_gradient,
    where,
)
from treadle.frontend.functions.gamma import lgamma
from treadle.frontend.functions.indexing import one_hot, take_along_axis
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import iota
from treadle.frontend.tensor import Operand, Tensor

BINARY = Domain("0 or 1", lambda x: (x == 0) | (x == 1))
ONE_HOT = Domain(
    "one 1 and otherwise 0 along the last axis",
    lambda x: ((x == 0) | (x == 1)).all(-1) & (x.sum(-1) == 1),
)
SMALL_RATE = 10.0  # below it Poisson counts are found by adding up probabilities
MOST_SMALL_COUNTS = 64  # the probability of a larger count at that rate is below 1e-28
ATTEMPTS = 16  # of Hörmann's rejection, each accepted with a probability of at least 0.78


class Binary(Distribution):
    """Independent trials, given by the probability of success or its logit."""

    probs: Tensor
    logits: Tensor

    def _trials(self, probs: Operand | None, logits: Operand | None) -> None:
        one_of(self._name, probs, logits)
        if probs is not None:
            (self.probs,) = parameters(self._name, probs=(probs, PROBABILITY))
            inside = _inside(self.probs)
            self.logits = log(inside) - log1p(-inside)
        else:
            assert logits is not None
            (self.logits,) = parameters(self._name, logits=(logits, REAL))
            self.probs = sigmoid(self.logits)
        Distribution.__init__(self, self.probs.shape, (), self.probs.dtype)


class Bernoulli(Binary):
    """0 or 1, as torch.distributions.Bernoulli."""

    support = BINARY

    def __init__(self, probs: Operand | None = None, logits: Operand | None = None) -> None:
        self._trials(probs, logits)

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def mode(self) -> Tensor:
        found = where(self.probs > 0.5, 1.0, 0.0)
        return where(eq(self.probs, 0.5), math.nan, found)

    @property
    def variance(self) -> Tensor:
        return self.probs * (1 - self.probs)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        drawn = random.bernoulli(stop_gradient(self.probs), self.extended(sample_shape))
        return cast(drawn, self.dtype)

    def log_prob(self, value: Operand) -> Tensor:
        return self._value(value) * self.logits - softplus(self.logits)

    def entropy(self) -> Tensor:
        return softplus(self.logits) - self.logits * sigmoid(self.logits)


class Geometric(Binary):
    """Failures before the first success, as torch.distributions.Geometric."""

    support = WHOLE

    def __init__(self, probs: Operand | None = None, logits: Operand | None = None) -> None:
        self._trials(probs, logits)

    @property
    def mean(self) -> Tensor:
        return 1 / self.probs - 1

    @property
    def mode(self) -> Tensor:
        return self.probs * 0

    @property
    def variance(self) -> Tensor:
        return (1 / self.probs - 1) / self.probs

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        u = unit_interval(self.extended(sample_shape), self.dtype)
        return stop_gradient(floor(log(u) / log1p(-_inside(self.probs))))

    def log_prob(self, value: Operand) -> Tensor:
        return self._value(value) * log_sigmoid(-self.logits) + log_sigmoid(self.logits)

    def entropy(self) -> Tensor:
        binary = softplus(self.logits) - self.logits * sigmoid(self.logits)
        return binary / self.probs


class Binomial(Binary):
    """Successes of a number of trials, as torch.distributions.Binomial.

    The largest `total_count` must be known when a program is traced: that many trials are drawn.
    """

    support = WHOLE

    def __init__(
        self,
        total_count: Operand = 1,
        probs: Operand | None = None,
        logits: Operand | None = None,
    ) -> None:
        self._trials(probs, logits)
        counts = as_tensor(total_count)
        known = known_values(total_count)
        if known is None:
            raise ArgumentError(
                self._name, "total_count is computed inside the program", "Pass numbers."
            )
        check(self._name, "total_count", counts, WHOLE)
        self._most = int(known.max(initial=0))
        shape = common_shape(self._name, {"total_count": counts.shape, "probs": self.probs.shape})
        self.total_count = broadcast_to(cast(counts, self.dtype), shape)
        self.probs, self.logits = broadcast_to(self.probs, shape), broadcast_to(self.logits, shape)
        self.batch_shape = shape

    @property
    def mean(self) -> Tensor:
        return self.total_count * self.probs

    @property
    def mode(self) -> Tensor:
        return clamp(floor((self.total_count + 1) * self.probs), None, self.total_count)

    @property
    def variance(self) -> Tensor:
        return self.total_count * self.probs * (1 - self.probs)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        shape = self.extended(sample_shape)
        trial = iota((*shape, self._most), len(shape), self.dtype)
        total = broadcast_to(self.total_count, shape).reshape((*shape, 1))
        chance = broadcast_to(stop_gradient(self.probs), shape).reshape((*shape, 1))
        succeeds = lt(random.uniform((*shape, self._most)), chance)
        return sum_of(cast(logical_and(succeeds, lt(trial, total)), self.dtype), -1)

    def log_prob(self, value: Operand) -> Tensor:
        x, n = self._value(value), self.total_count
        ways = lgamma(n + 1) - lgamma(x + 1) - lgamma(n - x + 1)
        return ways + x * log_sigmoid(self.logits) + (n - x) * log_sigmoid(-self.logits)

    def entropy(self) -> Tensor:
        shape = (self._most + 1, *(1,) * len(self.batch_shape))
        counts = cast(as_tensor(np.arange(self._most + 1).reshape(shape)), self.dtype)
        is_possible = le(counts, self.total_count)
        found = self.log_prob(where(is_possible, counts, 0.0))
        return -sum_of(where(is_possible, exp(found) * found, 0.0), 0)


class NegativeBinomial(Binary):
    """Successes before `total_count` failures, as torch.distributions.NegativeBinomial."""

    support = WHOLE

    def __init__(
        self, total_count: Operand, probs: Operand | None = None, logits: Operand | None = None
    ) -> None:
        self._trials(probs, logits)
        (count,) = parameters(self._name, total_count=(total_count, NOT_NEGATIVE))
        shape = common_shape(self._name, {"total_count": count.shape, "probs": self.probs.shape})
        self.total_count = broadcast_to(cast(count, self.dtype), shape)
        self.probs, self.logits = broadcast_to(self.probs, shape), broadcast_to(self.logits, shape)
        self.batch_shape = shape

    @property
    def mean(self) -> Tensor:
        return self.total_count * exp(self.logits)

    @property
    def mode(self) -> Tensor:
        return maximum(floor((self.total_count - 1) * exp(self.logits)), 0.0)

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 + exp(self.logits))

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        shape = self.extended(sample_shape)
        rate = standard_gamma(broadcast_to(self.total_count, shape)) * exp(self.logits)
        return poisson(stop_gradient(rate))

    def log_prob(self, value: Operand) -> Tensor:
        x, n = self._value(value), self.total_count
        ways = lgamma(n + x) - lgamma(x + 1) - lgamma(n)
        ways = where(eq(n + x, 0), 0.0, ways)
        return ways + n * log_sigmoid(-self.logits) + x * log_sigmoid(self.logits)


class Poisson(Distribution):
    """Counts with a rate, as torch.distributions.Poisson."""

    support = WHOLE

    def __init__(self, rate: Operand) -> None:
        (self.rate,) = parameters(self._name, rate=(rate, NOT_NEGATIVE))
        super().__init__(self.rate.shape, (), self.rate.dtype)

    @property
    def mean(self) -> Tensor:
        return self.rate

    @property
    def mode(self) -> Tensor:
        return floor(self.rate)

    @property
    def variance(self) -> Tensor:
        return self.rate

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        return poisson(broadcast_to(stop_gradient(self.rate), self.extended(sample_shape)))

    def log_prob(self, value: Operand) -> Tensor:
        x = self._value(value)
        is_nothing = eq(x, 0)
        known = where(is_nothing, 0.0, x * log(where(is_nothing, 1.0, self.rate)))
        return known - self.rate - lgamma(x + 1)


class Categorical(Distribution):
    """Indices of classes, as torch.distributions.Categorical."""

    support = WHOLE

    def __init__(self, probs: Operand | None = None, logits: Operand | None = None) -> None:
        one_of(self._name, probs, logits)
        given = probs if probs is not None else logits
        assert given is not None
        domain = NOT_NEGATIVE if probs is not None else REAL
        (values,) = parameters(
            self._name, **{"probs" if probs is not None else "logits": (given, domain)}
        )
        if not values.shape:
            raise ArgumentError(self._name, "one number is given", "Give an entry per class.")
        if probs is not None:
            self.probs = values / values.sum(-1, keepdims=True)
            self.logits = log(_inside(self.probs))
        else:
            self.logits = log_softmax(values, -1)
            self.probs = exp(self.logits)
        super().__init__(values.shape[:-1], (), values.dtype)

    @property
    def num_events(self) -> int:
        return self.logits.shape[-1]

    @property
    def mean(self) -> Tensor:
        return broadcast_to(constant(math.nan, (), self.dtype), self.batch_shape)

    @property
    def mode(self) -> Tensor:
        return self.probs.argmax(-1)

    @property
    def variance(self) -> Tensor:
        return self.mean

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        shape = (*self.extended(sample_shape), self.num_events)
        return random.categorical(broadcast_to(stop_gradient(self.logits), shape))

    def log_prob(self, value: Operand) -> Tensor:
        index = as_tensor(value)
        check(self._name, "value", index, self.support)
        known = known_values(index)
        if known is not None and known.size and known.max() >= self.num_events:
            raise ArgumentError(
                self._name, f"value = {known.max()}", f"There are {self.num_events} classes."
            )
        shape = common_shape(self._name, {"value": index.shape, "batch": self.batch_shape})
        places = broadcast_to(cast(index, dtypes.int32), shape).reshape((*shape, 1))
        logits = broadcast_to(self.logits, (*shape, self.num_events))
        return take_along_axis(logits, places, -1).reshape(shape)

    def entropy(self) -> Tensor:
        return -(self.probs * self.logits).sum(-1)


class OneHotCategorical(Distribution):
    """Classes as vectors with one 1, as torch.distributions.OneHotCategorical."""

    support = ONE_HOT

    def __init__(self, probs: Operand | None = None, logits: Operand | None = None) -> None:
        self.categorical = Categorical(probs, logits)
        self.probs, self.logits = self.categorical.probs, self.categorical.logits
        super().__init__(self.probs.shape[:-1], self.probs.shape[-1:], self.probs.dtype)

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def mode(self) -> Tensor:
        return one_hot(self.probs.argmax(-1), self.event_shape[0], self.dtype)

    @property
    def variance(self) -> Tensor:
        return self.probs * (1 - self.probs)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        drawn = self.categorical.sample(sample_shape)
        return one_hot(drawn, self.event_shape[0], self.dtype)

    def log_prob(self, value: Operand) -> Tensor:
        x = self._value(value)
        return where(x > 0, self.logits, 0.0).sum(-1)

    def entropy(self) -> Tensor:
        return self.categorical.entropy()


class OneHotCategoricalStraightThrough(OneHotCategorical):
    """One-hot samples whose gradient is that of the probabilities."""

    has_rsample = True

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        return self.sample(sample_shape) + (self.probs - stop_gradient(self.probs))


class Multinomial(Distribution):
    """Counts of each class in a number of draws, as torch.distributions.Multinomial."""

    support = WHOLE

    def __init__(
        self,
        total_count: int = 1,
        probs: Operand | None = None,
        logits: Operand | None = None,
    ) -> None:
        if isinstance(total_count, bool) or not isinstance(total_count, int) or total_count < 0:
            raise ArgumentError(
                self._name, f"total_count = {total_count!r}", "Give a whole number."
            )
        self.total_count = total_count
        self.categorical = Categorical(probs, logits)
        self.probs, self.logits = self.categorical.probs, self.categorical.logits
        super().__init__(self.probs.shape[:-1], self.probs.shape[-1:], self.probs.dtype)

    @property
    def mean(self) -> Tensor:
        return self.probs * self.total_count

    @property
    def variance(self) -> Tensor:
        return self.total_count * self.probs * (1 - self.probs)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        drawn = self.categorical.sample((self.total_count, *sample_shape))
        return sum_of(one_hot(drawn, self.event_shape[0], self.dtype), 0)

    def log_prob(self, value: Operand) -> Tensor:
        x = self._value(value)
        is_nothing = eq(x, 0)
        known = where(is_nothing, 0.0, where(is_nothing, 0.0, self.logits) * x)
        total = x.sum(-1)
        return lgamma(total + 1) - lgamma(x + 1).sum(-1) + known.sum(-1)

    def entropy(self) -> Tensor:
        counts = Binomial(self.total_count, self.probs)
        n = self.total_count
        shape = (n + 1, *(1,) * self.probs.ndim)
        k = cast(as_tensor(np.arange(n + 1).reshape(shape)), self.dtype)
        spread = (exp(counts.log_prob(k)) * lgamma(k + 1)).sum(0).sum(-1)
        return n * self.categorical.entropy() - math.lgamma(n + 1) + spread


def _inside(probs: Tensor) -> Tensor:
    """Probabilities that are neither 0 nor 1, as PyTorch clamps them."""
    eps = float(ml_dtypes.finfo(probs.dtype.numpy).eps)  # type: ignore[no-untyped-call]
    return clamp(probs, eps, 1 - eps)


def poisson(rate: Tensor) -> Tensor:
    """A Poisson number for each rate."""
    is_small = lt(rate, SMALL_RATE)
    small = _poisson_by_sums(where(is_small, rate, 1.0))
    large = _poisson_by_rejection(where(is_small, SMALL_RATE, rate))
    return where(is_small, small, large)


def _poisson_by_sums(rate: Tensor) -> Tensor:
    """How many partial sums of the probabilities are below a uniform number."""
    u = unit_interval(rate.shape, rate.dtype)

    def count(carry: tuple[Tensor, Tensor, Tensor], k: Tensor) -> tuple[tuple[Tensor, ...], None]:
        found, term, total = carry
        after = term * rate / (cast(k, rate.dtype) + 1)
        is_below = gt(u, total)
        return (found + cast(is_below, rate.dtype), after, total + after), None

    first = exp(-rate)
    start = (rate * 0, first, first)
    (found, _, _), _ = scan(count, start, iota((MOST_SMALL_COUNTS,), 0, dtypes.int32))
    return found


def _poisson_by_rejection(rate: Tensor) -> Tensor:
    """Hörmann's transformed rejection (PTRS), the first accepted of a number of attempts."""
    b = 0.931 + 2.53 * sqrt(rate)
    a = -0.059 + 0.02483 * b
    inverse = 1.1239 + 1.1328 / (b - 3.4)
    accepted = 0.9277 - 3.6224 / (b - 2)
    found, is_found = floor(rate), rate < 0
    for _ in range(ATTEMPTS):
        u = unit_interval(rate.shape, rate.dtype) - 0.5
        v = unit_interval(rate.shape, rate.dtype)
        us = 0.5 - abs(u)
        k = floor((2 * a / us + b) * u + rate + 0.43)
        at_once = logical_and(us >= 0.07, le(v, accepted))
        is_out = logical_or(k < 0, logical_and(lt(us, 0.013), gt(v, us)))
        count = maximum(k, 0.0)
        left = log(v) + log(inverse) - log(a / (us * us) + b)
        fits = le(left, count * log(rate) - rate - lgamma(count + 1))
        is_good = logical_or(at_once, logical_and(logical_not(is_out), fits))
        is_taken = logical_and(is_good, logical_not(is_found))
        found = where(is_taken, count, found)
        is_found = logical_or(is_found, is_taken)
    return found
