"""The regularised incomplete gamma functions, with gradients by both arguments.

Above x = max(a, 4) the upper one is an integral from x on, otherwise the lower one is an integral
up to x; the other is what is left of 1. Both integrals begin where the integrand is greatest, and
end where it has fallen to e^−40 (64 bits) or e^−20 of that; between, Gauss's rule takes 32 or 20
points.
"""

from __future__ import annotations

import math

import numpy as np

from treadle.base import dtypes
from treadle.frontend.coerce import align, as_tensor, cast
from treadle.frontend.functions.arithmetic import (
    eq,
    exp,
    isnan,
    log,
    log1p,
    logical_and,
    logical_or,
    maximum,
    minimum,
    real_dtype,
    sqrt,
    stop_gradient,
    where,
)
from treadle.frontend.functions.gamma import lgamma, stirling_rest
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import unsqueeze
from treadle.frontend.tensor import Operand, Tensor

FALL = {32: 20.0, 64: 40.0}
POINTS = {32: 20, 64: 32}
RAISED = 8  # by so much a is raised for the lower integral, whose integrand is then smooth at 0
SPLIT = 4.0  # the least x of the upper integral, where (1 + y)ᵃ⁻¹ varies slowly
LARGE = 8.0  # from here on Γ(a) is Stirling's formula


def igamma(a: Operand, x: Operand) -> Tensor:
    """The part of Γ(a) that the integral of tᵃ⁻¹ e⁻ᵗ has from 0 to x, for a > 0 and x ≥ 0."""
    return _parts("igamma", a, x)[0]


def igammac(a: Operand, x: Operand) -> Tensor:
    """The part of Γ(a) that the integral of tᵃ⁻¹ e⁻ᵗ has from x on: 1 − `igamma`."""
    return _parts("igammac", a, x)[1]


def _parts(name: str, a: Operand, x: Operand) -> tuple[Tensor, Tensor]:
    shape, place = align(name, a, x, dtype=real_dtype(a, x))
    wide = dtypes.promote(shape.dtype, dtypes.float32)
    shape, place = cast(shape, wide), cast(place, wide)
    is_inside = logical_and(_is_positive(shape), _is_positive(place))
    s, t = where(is_inside, shape, 1), where(is_inside, place, 1)
    is_upper = t > maximum(s, SPLIT)
    upper = _upper(where(is_upper, s, 1), where(is_upper, t, 2 * SPLIT))
    lower = _lower(where(is_upper, 1, s), where(is_upper, 1, t))
    below, above = where(is_upper, 1 - upper, lower), where(is_upper, upper, 1 - lower)
    edge = _edge(shape, place)
    dtype = real_dtype(a, x)
    return (
        cast(where(is_inside, below, edge), dtype),
        cast(where(is_inside, above, 1 - edge), dtype),
    )


def _is_positive(x: Tensor) -> Tensor:
    return logical_and(x > 0, x < math.inf)


def _edge(a: Tensor, x: Tensor) -> Tensor:
    """The lower part where a or x is 0 or ∞; NaN where it is not defined."""
    is_zero = logical_and(eq(x, 0), a > 0)
    is_one = logical_or(logical_and(eq(a, 0), x > 0), logical_and(eq(x, math.inf), a >= 0))
    is_endless = logical_and(eq(a, math.inf), logical_and(x >= 0, x < math.inf))
    both = logical_and(eq(a, math.inf), eq(x, math.inf))
    is_lost = logical_or(logical_or(isnan(a), isnan(x)), both)
    found = where(is_one, 1, where(logical_or(is_zero, is_endless), 0, math.nan))
    return where(is_lost, math.nan, cast(as_tensor(found), a.dtype))


def _density(a: Tensor, x: Tensor) -> Tensor:
    """xᵃ e⁻ˣ / Γ(a); near a where a is large nothing large cancels."""
    is_large = a >= LARGE
    small = where(is_large, 1, a)
    plain = exp(small * log(where(is_large, 1, x)) - where(is_large, 1, x) - lgamma(small))
    big = where(is_large, a, LARGE)
    away = (where(is_large, x, LARGE) - big) / big
    near = exp((log1p(away) - away) * big - stirling_rest(big)) * sqrt(big * (0.5 / math.pi))
    return where(is_large, near, plain)


def _upper(a: Tensor, x: Tensor) -> Tensor:
    """For x > max(a, 4): xᵃ e⁻ˣ / Γ(a) ∫ exp(−x y) (1 + y)ᵃ⁻¹ dy."""
    fall, more = FALL[a.dtype.bits], a - 1
    # f(y) = x y − (a − 1) log(1 + y) is no less than (x − m) y + m y² / (2 + 4 y / 3), m = a − 1.
    curved = maximum(more, 0)
    square, linear = curved + (x - curved) * (4 / 3), 2 * (x - curved) - fall * (4 / 3)
    root = sqrt(linear * linear + square * (8 * fall))
    # Of two forms the one that does not subtract.
    end = where(linear > 0, 4 * fall / (root + linear), (root - linear) / (2 * square))
    integral = _integral(end, lambda y: exp(unsqueeze(more, -1) * log1p(y) - unsqueeze(x, -1) * y))
    return _density(a, x) * integral


def _lower(a: Tensor, x: Tensor) -> Tensor:
    """For x ≤ max(a, 4): the same of a + 8, and eight terms of the series."""
    first = term = _density(a, x) / a
    for k in range(1, RAISED):
        term = term * x / (a + k)
        first = first + term
    raised = a + RAISED
    fall, more = FALL[a.dtype.bits], raised - 1
    # f(y) = −x y − m log(1 − y) is no less than (m − x) y + m y² / 2.
    gap = more - x
    end = minimum(2 * fall / (gap + sqrt(gap * gap + more * (2 * fall))), 1)
    integral = _integral(end, lambda y: exp(unsqueeze(x, -1) * y + unsqueeze(more, -1) * log1p(-y)))
    return _density(raised, x) * integral + first


def _integral(end: Tensor, function: object) -> Tensor:
    """∫ of a function of y from 0 to an end, where it has nothing left."""
    assert callable(function)
    points, weights = np.polynomial.legendre.leggauss(POINTS[end.dtype.bits])
    length = stop_gradient(end)
    places = unsqueeze(length, -1) * ((points + 1) / 2).astype(end.dtype.numpy)
    total = sum_of(function(places) * (weights / 2).astype(end.dtype.numpy), -1)
    return total * length
