"""Random numbers: the same bits on every device, backend and thread count (Philox4x32-10).

Inside a trace each call is a site of its own, keyed by the step's random state. Eager calls follow
a seed set with `seed`.
"""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import cos, log, sqrt
from treadle.frontend.functions.reductions import argmax
from treadle.frontend.scopes import EAGER, bind1, current_scope
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.ops.indexing import MAX_SITES, RANDOM_BITS, RandomBits
from treadle.ir.types import TensorType, as_dtype

_INV_2_24 = 2.0**-24


def seed(value: int) -> None:
    """Start the eager stream again. Traced programs take their seed from the step."""
    EAGER.seed, EAGER.sites = int(value), 0


def bits(shape: Shape) -> Tensor:
    """uint32 random bits."""
    scope = current_scope()
    key = scope.random_key()
    site = scope.next_site()
    shape = TensorType(shape).shape
    return bind1(RANDOM_BITS, RandomBits(site % MAX_SITES if scope is EAGER else site, shape), key)


def uniform(
    shape: Shape, low: float = 0.0, high: float = 1.0, dtype: object = dtypes.float32
) -> Tensor:
    """Uniform in [low, high): 24 random bits each."""
    chosen = _float("uniform", dtype)
    unit = cast(bits(shape) // 256, dtypes.float32) * _INV_2_24
    scaled = unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low
    return cast(scaled, chosen)


def normal(
    shape: Shape, mean: float = 0.0, std: float = 1.0, dtype: object = dtypes.float32
) -> Tensor:
    """Normal with a mean and a standard deviation (Box–Muller)."""
    chosen = _float("normal", dtype)
    # 1 − u lies in (0, 1], so that the logarithm is finite.
    radius = sqrt(log(1.0 - uniform(shape)) * -2.0)
    value = radius * cos(uniform(shape) * (2 * math.pi))
    scaled = value if (mean, std) == (0.0, 1.0) else value * std + mean
    return cast(scaled, chosen)


def bernoulli(p: Operand, shape: Shape | None = None) -> Tensor:
    """True with probability p, a number or a tensor of probabilities."""
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise ArgumentError("bernoulli", f"p = {p}", "A probability lies between 0 and 1.")
    chance = as_tensor(p)
    return uniform(chance.shape if shape is None else shape) < chance


def categorical(logits: Operand, axis: int = -1) -> Tensor:
    """int32 indices drawn with probabilities softmax(logits) along an axis (Gumbel maximum)."""
    x = as_tensor(logits)
    if not x.dtype.is_float:
        raise DTypeError("categorical", f"{x.type} is not a float", "Pass logits.")
    # (0, 1): the middle of each of the 2²⁴ cells.
    unit = uniform(x.shape) + _INV_2_24 / 2
    return argmax(cast(x, dtypes.promote(x.dtype, dtypes.float32)) - log(-log(unit)), axis)


def _float(name: str, dtype: object) -> dtypes.DType:
    chosen = as_dtype(dtype)
    if not chosen.is_float:
        raise DTypeError(name, f"dtype {chosen} is not a float", "Use a float dtype.")
    return chosen
