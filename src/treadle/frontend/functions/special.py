"""The normal distribution's functions, inverses and entropies, exact in their tails.

Values of the tails are polynomials, of as many terms as the dtype needs. Where another formula has
simpler derivatives and loses only the tail's value, derivatives of any order are that formula's.
"""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.base.numbers import FRACTION, check_number
from treadle.frontend.coerce import align, cast
from treadle.frontend.functions.arithmetic import (
    abs,
    as_real,
    clamp,
    eq,
    erf,
    exp,
    floor,
    isnan,
    le,
    log,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    lt,
    neg,
    real_dtype,
    sqrt,
    stop_gradient,
    where,
)
from treadle.frontend.functions.special_coefficients import ERFCX, ERFINV, MIDDLE
from treadle.frontend.tensor import Operand, Tensor

# Beyond, the tail is 0 in the dtype, by bits: erfc(z) at z, the normal density at √2 z.
END = {32: 10.5, 64: 27.5}


def erfc(x: Operand) -> Tensor:
    """1 − erf(x), exact where erf is near 1 too."""
    real, wide = _widened(x)
    size = abs(wide)
    tail = _scaled_tail(size) * _gauss(size)
    found = where(wide < 0, 2 - tail, tail)
    return cast(_with_slopes_of(found, -erf(wide)), real.dtype)


def ndtr(x: Operand) -> Tensor:
    """The chance that a standard normal number is below x, exact far below 0 too."""
    real, wide = _widened(x)
    size = abs(wide)
    tail = _scaled_tail(size * math.sqrt(0.5)) * _gauss(size, 0.5) * 0.5
    found = where(wide > 0, 1 - tail, tail)
    return cast(_with_slopes_of(found, erf(wide * math.sqrt(0.5)) * 0.5), real.dtype)


def log_ndtr(x: Operand) -> Tensor:
    """The logarithm of `ndtr`, where that is too small for the dtype too."""
    real, wide = _widened(x)
    is_low = wide < -1
    low = where(is_low, wide, -1)
    z = -low * math.sqrt(0.5)
    in_tail = log(_scaled_tail(z) * 0.5) - low * low * 0.5
    high = where(is_low, 0, wide)
    return cast(where(is_low, in_tail, log1p(-ndtr(-high))), real.dtype)


def erfinv(x: Operand) -> Tensor:
    """The y whose erf is x, for x from −1 to 1, ±∞ at the ends; NaN beyond."""
    real, wide = _widened(x)
    is_end = eq(abs(wide), 1)
    inside = where(is_end, 0, wide)
    w = neg(log((1 - inside) * (1 + inside)))
    first, *others = ERFINV[wide.dtype.bits]
    end, centre, half, coefficients = first
    is_first = w <= end
    found = _polynomial(coefficients, (where(is_first, w, centre) - centre) * (1 / half))
    root = sqrt(where(is_first, end, w))
    below = end
    for end, centre, half, coefficients in others:
        own = _polynomial(coefficients, (root - centre) * (1 / half))
        found = where(w > below, own, found)
        below = end
    # ±∞ with a slope of ∞; the product of 0 and ∞ elsewhere would be NaN.
    end_only = where(is_end, wide, 0)
    endless = log(1 + end_only) - log(1 - end_only)
    result = where(is_end, endless, inside * found)
    return cast(_within(abs(wide) <= 1, wide, result), real.dtype)


def logit(x: Operand, eps: float | None = None) -> Tensor:
    """log(x / (1 − x)), for x from 0 to 1; x is limited to [eps, 1 − eps] if eps is given."""
    real = as_real(x)
    if eps is not None:
        bound = check_number("logit", "eps", eps, FRACTION)
        real = clamp(real, bound, 1 - bound)
    # Near a half x / (1 − x) is near 1: what differs from 1 is exact.
    is_middle = logical_and(lt(abs(real - 0.5), 0.25), logical_not(isnan(real)))
    middle = where(is_middle, real, 0.5)
    outer = where(is_middle, 0.5, real)
    found = where(is_middle, log1p((middle * 2 - 1) / (1 - middle)), log(outer) - log1p(-outer))
    return _within(logical_and(real >= 0, real <= 1), real, found)


def xlogy(x: Operand, y: Operand) -> Tensor:
    """x · log y; 0 where x is 0, whatever y is but NaN."""
    a, b = align("xlogy", x, y, dtype=real_dtype(x, y))
    is_nothing = logical_and(eq(a, 0), le(b, 0))
    is_endless = logical_and(eq(a, 0), eq(b, math.inf))
    return a * log(where(logical_or(is_nothing, is_endless), 1, b))


def entr(x: Operand) -> Tensor:
    """−x · log x; 0 at 0, −∞ below."""
    real = as_real(x)
    is_positive = real > 0
    inside = where(is_positive, real, 1)
    # √x is 0 at 0 and has the slope that −x log x has there, ∞.
    slope_only = sqrt(where(is_positive, 1, real))
    at_most_0 = where(eq(real, 0), slope_only, where(real < 0, -math.inf, real))
    return where(is_positive, -(inside * log(inside)), at_most_0)


def _widened(x: Operand) -> tuple[Tensor, Tensor]:
    """The operand as a float, and in 32 bits at least."""
    real = as_real(x)
    return real, cast(real, dtypes.promote(real.dtype, dtypes.float32))


def _with_slopes_of(value: Tensor, formula: Tensor) -> Tensor:
    """A value whose derivatives are those of a formula, which differs from it by rounding."""
    return stop_gradient(value) + (formula - stop_gradient(formula))


def _within(is_defined: Tensor, x: Tensor, found: Tensor) -> Tensor:
    """A result, or NaN with a slope of NaN where it is not defined."""
    return where(is_defined, found, sqrt(where(is_defined, 1, -abs(x))))


def _polynomial(coefficients: tuple[float, ...], u: Tensor) -> Tensor:
    found = u * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        found = found * u + c
    return found


def _scaled_tail(z: Tensor) -> Tensor:
    """exp(z²) erfc(z) for z ≥ 0."""
    u = 1 - 2 * MIDDLE / (z + MIDDLE)
    return _polynomial(ERFCX[z.dtype.bits], u) / (z * 2 + 1)


def _gauss(x: Tensor, factor: float = 1.0) -> Tensor:
    """exp(−factor · x²) for x ≥ 0, exact where x² is large: most of it is a square of few bits."""
    end = END[x.dtype.bits] / math.sqrt(factor)
    near = where(x > end, end, x)
    most = floor(near * 16) * (1 / 16)
    rest = (near - most) * (near + most)
    found = exp(most * most * -factor) * exp(rest * -factor)
    return where(x > end, 0, found)
