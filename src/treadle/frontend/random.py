"""Random numbers: the same bits on every device, backend and thread count (Philox4x32-10).

Inside a trace each call is a site of its own, keyed by the step's random state. Eager calls follow
a seed set with `seed`.
"""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import FINITE, NOT_NEGATIVE, POSITIVE, check_number, check_seed
from treadle.base.shapes import Shape, broadcast_shapes
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.activations import softmax
from treadle.frontend.functions.arithmetic import as_real, cos, log, sqrt, stop_gradient
from treadle.frontend.functions.indexing import one_hot
from treadle.frontend.functions.reductions import argmax, topk
from treadle.frontend.functions.shaping import axis_of, integer_of, moveaxis, unsqueeze
from treadle.frontend.scopes import EAGER, bind1, current_scope
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Placeholder, Tensor
from treadle.ir.ops.indexing import MAX_SITES, RANDOM_BITS, RandomBits
from treadle.ir.types import TensorType, as_dtype


def seed(value: int) -> None:
    """Start the eager stream again. Traced programs take their seed from the step."""
    EAGER.seed, EAGER.sites = check_seed("random.seed", value), 0


def bits(shape: Shape) -> Tensor:
    """uint32 random bits: → shape."""
    scope = current_scope()
    key = scope.random_key()
    site = scope.next_site()
    shape = TensorType(shape).shape
    return bind1(RANDOM_BITS, RandomBits(site % MAX_SITES if scope is EAGER else site, shape), key)


def uniform(
    shape: Shape, low: float = 0.0, high: float = 1.0, dtype: object = dtypes.float32
) -> Tensor:
    """Uniform in [low, high): → shape. 24 random bits each, or as many as a narrower dtype holds.

    With other bounds than 0 and 1, rounding may reach `high`.
    """
    chosen = _float("uniform", dtype)
    for name, bound in (("low", low), ("high", high)):
        check_number("uniform", name, bound, FINITE)
    if not low <= high:
        raise ArgumentError("uniform", f"low = {low}, high = {high}", "Give low ≤ high.")
    unit = _unit(shape, min(24, chosen.fraction_bits + 1))
    scaled = unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low
    return cast(scaled, chosen)


def _unit(shape: Shape, count: int, offset: float = 0.0) -> Tensor:
    """(k + offset) / 2ᶜ for c random bits k: exact in a float that holds as many."""
    whole = cast(bits(shape) // 2 ** (32 - count), dtypes.float32)
    return (whole + offset if offset else whole) * 2.0**-count


def normal(
    shape: Shape, mean: float = 0.0, std: float = 1.0, dtype: object = dtypes.float32
) -> Tensor:
    """Normal with a mean and a standard deviation (Box–Muller): → shape."""
    chosen = _float("normal", dtype)
    check_number("normal", "mean", mean, FINITE)
    check_number("normal", "std", std, NOT_NEGATIVE)
    # 1 − u lies in (0, 1], so that the logarithm is finite.
    radius = sqrt(log(1.0 - uniform(shape)) * -2.0)
    value = radius * cos(uniform(shape) * (2 * math.pi))
    scaled = value if (mean, std) == (0.0, 1.0) else value * std + mean
    return cast(scaled, chosen)


def bernoulli(p: Operand, shape: Shape | None = None) -> Tensor:
    """True with probability p, a number or a tensor of probabilities: → shape, or p's."""
    if not isinstance(p, (Tensor, Placeholder)):
        given = np.asarray(p)
        if given.dtype.kind not in "biuf":
            raise ArgumentError("bernoulli", f"p = {p!r}", "A probability lies between 0 and 1.")
        wrong = given[~((given >= 0) & (given <= 1))]
        if wrong.size:
            raise ArgumentError(
                "bernoulli", f"p = {wrong[0]}", "A probability lies between 0 and 1."
            )
    chance = as_tensor(p)
    sizes = chance.shape if shape is None else TensorType(shape).shape
    if broadcast_shapes(chance.shape, sizes) != sizes:
        raise ShapeError(
            "bernoulli",
            f"the probabilities {chance.type} do not broadcast to {sizes}",
            "Give the shape of the result.",
        )
    return uniform(sizes) < chance


def categorical(logits: Operand, axis: int = -1) -> Tensor:
    """int32 indices drawn with probabilities softmax(logits) along an axis: (…, classes) → (…)."""
    x = as_tensor(logits)
    if not x.dtype.is_float:
        raise DTypeError("categorical", f"{x.type} is not a float", "Pass logits.")
    return argmax(cast(x, dtypes.promote(x.dtype, dtypes.float32)) + _gumbel(x.shape), axis)


def multinomial(p: Operand, num_samples: int, replacement: bool = False) -> Tensor:
    """int32 indices drawn by weights, which need not add up to 1: (…, classes) → (…, num_samples).

    Without replacement no index is drawn twice, and there are enough weights above 0.
    """
    weights = as_real(p)
    count = integer_of("multinomial", "num_samples", num_samples)
    if weights.ndim not in (1, 2):
        raise ShapeError("multinomial", f"{weights.type}", "Give a vector of weights, or rows.")
    classes = weights.shape[-1]
    if count < 1 or (not replacement and count > classes):
        raise ArgumentError(
            "multinomial",
            f"num_samples = {count} of {classes} classes, replacement={replacement}",
            "Draw as many as there are at most, or pass replacement=True.",
        )
    _check_weights(weights, 1 if replacement else count)
    scores = log(cast(weights, dtypes.promote(weights.dtype, dtypes.float32)))
    if replacement:
        shape = (*weights.shape[:-1], count, classes)
        return argmax(unsqueeze(scores, -2) + _gumbel(shape), -1)
    # The greatest of weights with Gumbel's noise are drawn one after the other without replacement.
    return topk(scores + _gumbel(weights.shape), count, -1)[1]


def _check_weights(weights: Tensor, least: int) -> None:
    """Weights that are known now are refused where nothing could be drawn by them."""
    if not isinstance(weights.handle, np.ndarray):
        return
    values = np.asarray(weights.handle)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ArgumentError("multinomial", "a weight is negative or not finite", "Give weights.")
    if ((values > 0).sum(-1) < least).any():
        raise ArgumentError(
            "multinomial",
            f"fewer than {least} weights of a row are above 0",
            "Draw fewer, or pass replacement=True.",
        )


def randint(low: int, high: int, shape: Shape, dtype: object = dtypes.int32) -> Tensor:
    """Integers from low to high − 1, each as likely as the others: → shape."""
    first, end = (integer_of("randint", n, v) for n, v in (("low", low), ("high", high)))
    chosen = as_dtype(dtype)
    least, most = (0, 2**24) if chosen.is_float else chosen.range()
    if not first < end:
        raise ArgumentError("randint", f"low = {first}, high = {end}", "Give low < high.")
    if end - first > 2**32 or first < (-most if chosen.is_float else least) or end - 1 > most:
        raise ArgumentError(
            "randint", f"{first} … {end - 1} as {chosen}", "Give bounds that the dtype holds."
        )
    size = end - first
    # The upper 32 bits of random bits · size, in two parts: 32 bits hold those of sizes up to 2¹⁶.
    word = bits(shape) if size <= 2**16 else cast(bits(shape), dtypes.int64)
    found = (word // 2**16 * size + word % 2**16 * size // 2**16) // 2**16
    if size <= 2**16:
        found = cast(found, dtypes.int64 if chosen is dtypes.int64 else dtypes.int32)
    return cast(found + first, chosen)


@takes_dim
def gumbel_softmax(logits: Operand, tau: float = 1.0, hard: bool = False, axis: int = -1) -> Tensor:
    """Softmax of logits with Gumbel's noise, over a temperature: samples with gradients, of logits'
    shape.

    With `hard` the largest is 1 and the others 0; gradients are those of the softmax.
    """
    check_number("gumbel_softmax", "tau", tau, POSITIVE)
    x = as_real(logits)
    at = axis_of("gumbel_softmax", axis, x)
    wide = cast(x, dtypes.promote(x.dtype, dtypes.float32))
    soft = cast(softmax((wide + _gumbel(x.shape)) / tau, at), x.dtype)
    if not hard:
        return soft
    chosen = moveaxis(one_hot(argmax(soft, at), x.shape[at], x.dtype), -1, at)
    return chosen - stop_gradient(soft) + soft


def _gumbel(shape: Shape) -> Tensor:
    """Noise whose largest, added to logits, falls on each class as often as softmax says."""
    # (0, 1): the middle of each of 2²³ cells. With one bit more, float32 would round to 1.
    return -log(-log(_unit(shape, 23, 0.5)))


def _float(name: str, dtype: object) -> dtypes.DType:
    chosen = as_dtype(dtype)
    if not chosen.is_float:
        raise DTypeError(name, f"dtype {chosen} is not a float", "Use a float dtype.")
    return chosen
