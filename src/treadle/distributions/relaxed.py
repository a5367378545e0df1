"""Continuous relaxations of classes, whose samples have gradients."""

from __future__ import annotations

import math

from treadle.base.shapes import Shape
from treadle.distributions.compound import TransformedDistribution
from treadle.distributions.continuous import Logistic
from treadle.distributions.discrete import Bernoulli, Categorical
from treadle.distributions.distribution import (
    INSIDE_UNIT,
    POSITIVE,
    SIMPLEX,
    Distribution,
    parameters,
    unit_interval,
)
from treadle.distributions.transforms import SigmoidTransform
from treadle.frontend.functions.activations import softmax
from treadle.frontend.functions.arithmetic import log
from treadle.frontend.functions.reductions import logsumexp
from treadle.frontend.tensor import Operand, Tensor


class RelaxedBernoulli(TransformedDistribution):
    """Numbers near 0 or 1, as torch.distributions.RelaxedBernoulli."""

    support = INSIDE_UNIT

    def __init__(
        self,
        temperature: Operand,
        probs: Operand | None = None,
        logits: Operand | None = None,
    ) -> None:
        (self.temperature,) = parameters(self._name, temperature=(temperature, POSITIVE))
        hard = Bernoulli(probs, logits)
        self.probs, self.logits = hard.probs, hard.logits
        base = Logistic(self.logits / self.temperature, 1 / self.temperature)
        super().__init__(base, SigmoidTransform())


class RelaxedOneHotCategorical(Distribution):
    """Vectors near a corner of the simplex, as torch.distributions.RelaxedOneHotCategorical."""

    has_rsample = True
    support = SIMPLEX

    def __init__(
        self,
        temperature: Operand,
        probs: Operand | None = None,
        logits: Operand | None = None,
    ) -> None:
        (self.temperature,) = parameters(self._name, temperature=(temperature, POSITIVE))
        hard = Categorical(probs, logits)
        self.probs, self.logits = hard.probs, hard.logits
        super().__init__(self.probs.shape[:-1], self.probs.shape[-1:], self.probs.dtype)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        noise = -log(-log(unit_interval(self.extended(sample_shape), self.dtype)))
        return softmax((self.logits + noise) / self.temperature, -1)

    def log_prob(self, value: Operand) -> Tensor:
        x, classes = log(self._value(value)), self.event_shape[0]
        scores = self.logits - x * self.temperature
        norm = math.lgamma(classes) + (classes - 1) * log(self.temperature)
        return norm + (scores - x).sum(-1) - classes * logsumexp(scores, -1)
