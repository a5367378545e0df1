"""Distributions made of others: transformed, mixed, and with axes that belong to the event."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.shapes import Shape
from treadle.distributions.discrete import Categorical
from treadle.distributions.distribution import Distribution, Domain, common_shape, summed
from treadle.distributions.transforms import ComposeTransform, Transform
from treadle.frontend.coerce import broadcast_to
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.reductions import logsumexp
from treadle.frontend.tensor import Operand, Tensor


class TransformedDistribution(Distribution):
    """A distribution whose samples go through transforms, as PyTorch's."""

    support = Domain("", lambda x: x == x)  # the transform decides

    def __init__(
        self, base_distribution: Distribution, transforms: Transform | Sequence[Transform]
    ) -> None:
        if not isinstance(base_distribution, Distribution):
            cause = f"the base is {base_distribution!r}"
            raise ArgumentError("TransformedDistribution", cause, "Pass a distribution first.")
        parts = [transforms] if isinstance(transforms, Transform) else list(transforms)
        self.base_dist, self.transforms = base_distribution, parts
        self.transform = ComposeTransform(parts)
        self.has_rsample = base_distribution.has_rsample
        super().__init__(
            base_distribution.batch_shape, base_distribution.event_shape, base_distribution.dtype
        )

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        return self.transform(self.base_dist.sample(sample_shape))

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        return self.transform(self.base_dist.rsample(sample_shape))

    def log_prob(self, value: Operand) -> Tensor:
        y = self._value(value)
        x = self.transform.inv(y)
        slope = summed(self.transform.log_abs_det_jacobian(x, y), len(self.event_shape))
        return self.base_dist.log_prob(x) - slope

    def cdf(self, value: Operand) -> Tensor:
        found = self.base_dist.cdf(self.transform.inv(self._value(value)))
        return found if self.transform.sign > 0 else 1 - found

    def icdf(self, value: Operand) -> Tensor:
        p = value if self.transform.sign > 0 else 1 - value  # type: ignore[operator]
        return self.transform(self.base_dist.icdf(p))


class Independent(Distribution):
    """The last batch axes as a part of the event, as torch.distributions.Independent."""

    def __init__(self, base_distribution: Distribution, reinterpreted_batch_ndims: int) -> None:
        base, count = base_distribution, reinterpreted_batch_ndims
        if not 0 <= count <= len(base.batch_shape):
            raise ArgumentError(
                self._name,
                f"reinterpreted_batch_ndims = {count} for a batch of shape {base.batch_shape}",
                "Give at most as many axes as the batch has.",
            )
        self.base_dist, self.reinterpreted_batch_ndims = base, count
        self.has_rsample, self.support = base.has_rsample, base.support
        split = len(base.batch_shape) - count
        event = base.batch_shape[split:] + base.event_shape
        super().__init__(base.batch_shape[:split], event, base.dtype)

    @property
    def mean(self) -> Tensor:
        return self.base_dist.mean

    @property
    def mode(self) -> Tensor:
        return self.base_dist.mode

    @property
    def variance(self) -> Tensor:
        return self.base_dist.variance

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        return self.base_dist.sample(sample_shape)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        return self.base_dist.rsample(sample_shape)

    def log_prob(self, value: Operand) -> Tensor:
        return summed(self.base_dist.log_prob(value), self.reinterpreted_batch_ndims)

    def entropy(self) -> Tensor:
        return summed(self.base_dist.entropy(), self.reinterpreted_batch_ndims)


class MixtureSameFamily(Distribution):
    """A mixture along the last batch axis, as torch.distributions.MixtureSameFamily."""

    def __init__(
        self, mixture_distribution: Categorical, component_distribution: Distribution
    ) -> None:
        weights, parts = mixture_distribution, component_distribution
        if not isinstance(weights, Categorical):
            cause = f"the mixture distribution is {weights!r}"
            raise ArgumentError(self._name, cause, "Pass a Categorical with the weights first.")
        count = weights.logits.shape[-1]
        if not parts.batch_shape or parts.batch_shape[-1] != count:
            raise ShapeError(
                self._name,
                f"{count} weights for components of batch shape {parts.batch_shape}",
                "The last batch axis of the components is the one that is mixed.",
            )
        shapes = {"weights": weights.batch_shape, "components": parts.batch_shape[:-1]}
        batch = common_shape(self._name, shapes)
        self.mixture_distribution, self.component_distribution = weights, parts
        self.support = parts.support
        super().__init__(batch, parts.event_shape, parts.dtype)

    def _weighted(self, x: Tensor) -> Tensor:
        """The sum over components of x, (batch, components, event), times their weights."""
        axis = -1 - len(self.event_shape)
        probs = self.mixture_distribution.probs
        shape = (*probs.shape, *(1,) * len(self.event_shape))
        return (probs.reshape(shape) * x).sum(axis)

    @property
    def mean(self) -> Tensor:
        return self._weighted(self.component_distribution.mean)

    @property
    def variance(self) -> Tensor:
        parts, axis = self.component_distribution, -1 - len(self.event_shape)
        mean = self._weighted(parts.mean)
        shape = list(mean.shape)
        shape.insert(len(shape) + 1 + axis, 1)
        apart = parts.mean - mean.reshape(tuple(shape))
        return self._weighted(parts.variance) + self._weighted(apart * apart)

    def _each(self, value: Operand) -> Tensor:
        """A value for each component: a new axis before those of the event."""
        x = self._value(value)
        split = x.ndim - len(self.event_shape)
        return x.reshape((*x.shape[:split], 1, *x.shape[split:]))

    def log_prob(self, value: Operand) -> Tensor:
        found = self.component_distribution.log_prob(self._each(value))
        return logsumexp(found + self.mixture_distribution.logits, -1)

    def cdf(self, value: Operand) -> Tensor:
        found = self.component_distribution.cdf(self._each(value))
        return (found * self.mixture_distribution.probs).sum(-1)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        parts, rank = self.component_distribution, len(self.event_shape)
        logits = self.mixture_distribution.logits
        shape = self.extended(sample_shape)
        axis = len(shape) - rank  # of the components, in a sample of all of them
        weights = Categorical(logits=broadcast_to(logits, (*self.batch_shape, logits.shape[-1])))
        chosen = weights.sample(sample_shape)
        index = chosen.reshape((*chosen.shape, *(1,) * (1 + rank)))
        index = broadcast_to(index, (*shape[:axis], 1, *self.event_shape))
        drawn = parts.sample(sample_shape)
        drawn = broadcast_to(drawn, (*shape[:axis], logits.shape[-1], *self.event_shape))
        return take_along_axis(drawn, index, axis).reshape(shape)
