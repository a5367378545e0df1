"""What every distribution has, and how parameters are checked and broadcast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.shapes import Shape, broadcast_shapes
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor, broadcast_to, cast
from treadle.frontend.functions.arithmetic import as_real, exp, sqrt, stop_gradient
from treadle.frontend.scopes import EAGER
from treadle.frontend.tensor import Operand, Placeholder, Tensor
from treadle.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Domain:
    """Where parameters and samples lie. It is checked where values are known: outside of traces."""

    text: str
    holds: Callable[[np.ndarray], np.ndarray]


REAL = Domain("finite", np.isfinite)
POSITIVE = Domain("positive", lambda x: x > 0)
NOT_NEGATIVE = Domain("not negative", lambda x: x >= 0)
PROBABILITY = Domain("between 0 and 1", lambda x: (x >= 0) & (x <= 1))
INSIDE_UNIT = Domain("between 0 and 1, both excluded", lambda x: (x > 0) & (x < 1))
WHOLE = Domain("a whole number, not negative", lambda x: (x >= 0) & (x == np.floor(x)))
SIMPLEX = Domain(
    "not negative, with a sum of 1 along the last axis",
    lambda x: (x >= 0).all(-1) & (np.abs(x.sum(-1) - 1) < 1e-6 * max(x.shape[-1], 10)),
)


class Distribution:
    """A distribution over values of `event_shape`, one for each index of `batch_shape`."""

    support: Domain = REAL
    has_rsample = False

    def __init__(self, batch_shape: Shape, event_shape: Shape, dtype: DType) -> None:
        self.batch_shape, self.event_shape, self.dtype = batch_shape, event_shape, dtype

    @property
    def mean(self) -> Tensor:
        raise self._missing("mean")

    @property
    def mode(self) -> Tensor:
        raise self._missing("mode")

    @property
    def variance(self) -> Tensor:
        raise self._missing("variance")

    @property
    def stddev(self) -> Tensor:
        return sqrt(self.variance)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        """Samples without gradients: → sample_shape + batch_shape + event_shape."""
        return stop_gradient(self.rsample(sample_shape))

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        """Samples with gradients with respect to the parameters: → as `sample`."""
        raise self._missing("rsample", "Use sample, and log_prob for a score-function estimate.")

    def log_prob(self, value: Operand) -> Tensor:
        """The logarithm of the density or probability: (…, *event_shape) → (…)."""
        raise self._missing("log_prob")

    def cdf(self, value: Operand) -> Tensor:
        """The probability of a value up to this one."""
        raise self._missing("cdf")

    def icdf(self, value: Operand) -> Tensor:
        """The value whose `cdf` is this probability."""
        raise self._missing("icdf")

    def entropy(self) -> Tensor:
        """The entropy in nats: → batch_shape."""
        raise self._missing("entropy")

    def perplexity(self) -> Tensor:
        return exp(self.entropy())

    def extended(self, sample_shape: Shape) -> Shape:
        """The shape of samples."""
        return (*TensorType(sample_shape).shape, *self.batch_shape, *self.event_shape)

    def _value(self, value: Operand) -> Tensor:
        """A value of log_prob or cdf, checked and in a float dtype."""
        given = as_tensor(value)
        rank = len(self.event_shape)
        if rank and given.shape[max(given.ndim - rank, 0) :] != self.event_shape:
            raise ShapeError(
                self._name,
                f"a value of shape {given.shape} for events of shape {self.event_shape}",
                f"Give values of shape (…, {', '.join(map(str, self.event_shape))}).",
            )
        shape = given.shape[: given.ndim - rank]
        if broadcast_shapes(shape, self.batch_shape) is None:
            raise ShapeError(
                self._name,
                f"a value of shape {given.shape} for a batch of shape {self.batch_shape}",
                "Give shapes that broadcast.",
            )
        check(self._name, "value", given, self.support)
        return cast(given, dtypes.promote(given.dtype, self.dtype))

    @property
    def _name(self) -> str:
        return f"distributions.{type(self).__name__}"

    def _missing(self, what: str, remedy: str | None = None) -> NotImplementedError:
        text = f"{self._name} has no {what}."
        return NotImplementedError(f"{text} {remedy}" if remedy else text)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(batch_shape={self.batch_shape}, event_shape={self.event_shape})"
        )


def known_values(x: Operand) -> np.ndarray | None:
    """The elements of an eager tensor, an array or a number."""
    if isinstance(x, Placeholder):
        return None
    if isinstance(x, Tensor):
        return np.asarray(x.handle) if x.scope is EAGER else None
    return np.asarray(x)


def check(operation: str, name: str, x: Tensor, domain: Domain) -> None:
    values = known_values(x)
    if values is None or np.all(domain.holds(values)):
        return
    fits = domain.holds(values)
    wrong = values[~fits]
    shown = wrong.reshape(-1, values.shape[-1])[0] if fits.ndim < values.ndim else wrong.flat[0]
    raise ArgumentError(operation, f"{name} = {shown}", f"It must be {domain.text}.")


def parameters(operation: str, **given: tuple[Operand, Domain]) -> list[Tensor]:
    """Parameters of one shape and dtype, checked where their values are known."""
    tensors = {name: as_real(value) for name, (value, _) in given.items()}
    for name, (_, domain) in given.items():
        check(operation, name, tensors[name], domain)
    dtype = common_dtype(tensors.values())
    shape = common_shape(operation, {n: t.shape for n, t in tensors.items()})
    return [broadcast_to(cast(t, dtype), shape) for t in tensors.values()]


def common_dtype(tensors: Iterable[Tensor]) -> DType:
    return functools.reduce(dtypes.promote, (t.dtype for t in tensors))


def common_shape(operation: str, shapes: dict[str, Shape]) -> Shape:
    shape: Shape = ()
    for other in shapes.values():
        both = broadcast_shapes(shape, other)
        if both is None:
            shown = ", ".join(f"{n} {s}" for n, s in shapes.items())
            remedy = "Give shapes that broadcast."
            raise ShapeError(operation, f"the parameters have shapes {shown}", remedy)
        shape = both
    return shape


def one_of(operation: str, probs: object, logits: object) -> None:
    if (probs is None) == (logits is None):
        given = "neither" if probs is None else "both"
        raise ArgumentError(operation, f"{given} of probs and logits are given", "Give one.")


def unit_interval(shape: Shape, dtype: DType) -> Tensor:
    """Uniform in (0, 1), both excluded."""
    return cast(random._unit(shape, 23, 0.5), dtype)


def standard_normal(shape: Shape, dtype: DType) -> Tensor:
    return cast(random.normal(shape), dtype)


def summed(x: Tensor, rank: int) -> Tensor:
    """The sum over the last `rank` axes."""
    return x.sum(tuple(range(-rank, 0))) if rank else x
