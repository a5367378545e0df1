"""Elementary functions made of others, so that they are exact near 0 and far from it."""

from __future__ import annotations

import math

from treadle.base.errors import ShapeError
from treadle.base.numbers import PROBABILITY, check_number
from treadle.frontend import random
from treadle.frontend.coerce import align, as_tensor, is_weak
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.activations import softplus
from treadle.frontend.functions.arithmetic import (
    abs,
    as_real,
    atan2,
    ceil,
    cos,
    div,
    eq,
    exact_near_0,
    exp,
    floor,
    ge,
    is_whole,
    isfinite,
    isnan,
    le,
    log,
    log1p,
    logical_and,
    logical_or,
    lt,
    magnitude,
    maximum,
    mul,
    neg,
    numeric_dtype,
    real_dtype,
    remainder,
    sin,
    sqrt,
    stop_gradient,
    sub,
    tanh,
    where,
)
from treadle.frontend.tensor import Operand, Tensor


def log10(x: Operand) -> Tensor:
    """The logarithm to base 10."""
    return mul(log(x), 1 / math.log(10))


def tan(x: Operand) -> Tensor:
    """The tangent of x radians."""
    return div(sin(x), cos(x))


def atan(x: Operand) -> Tensor:
    """The inverse of the tangent, between −π/2 and π/2."""
    return atan2(as_real(x), 1.0)


def asin(x: Operand) -> Tensor:
    """The inverse of the sine, for x from −1 to 1; NaN beyond."""
    real = as_real(x)
    return atan2(real, _other_leg(real))


def acos(x: Operand) -> Tensor:
    """The inverse of the cosine, for x from −1 to 1; NaN beyond."""
    real = as_real(x)
    return atan2(_other_leg(real), real)


def _other_leg(x: Tensor) -> Tensor:
    """√(1 − x²), as exact near ±1 as at 0: nothing that is rounded is subtracted.

    Of two roots, so that the slope at ±1 is ±∞; in one, it would be 0 · ∞.
    """
    return sqrt(1 - x) * sqrt(1 + x)


def sinh(x: Operand) -> Tensor:
    """The hyperbolic sine."""
    real = as_real(x)
    up, down = exp(real * 0.5), exp(real * -0.5)
    both = up + down
    return exact_near_0(
        real, up * (up * 0.5) - down * (down * 0.5), tanh(real * 0.5) * both * (both * 0.5)
    )


def cosh(x: Operand) -> Tensor:
    """The hyperbolic cosine."""
    real = as_real(x)
    up, down = exp(real * 0.5), exp(real * -0.5)  # eˣ overflows before its half
    return up * (up * 0.5) + down * (down * 0.5)


def asinh(x: Operand) -> Tensor:
    """The inverse of the hyperbolic sine."""
    real = as_real(x)
    size = magnitude(real)
    is_far = size > 1
    inner = where(is_far, 0, size)
    near = log1p(inner + inner * inner / (sqrt(inner * inner + 1) + 1))
    outer = where(is_far, size, 1)
    inverse = 1 / outer  # whose square does not overflow
    far = log(outer) + log(sqrt(inverse * inverse + 1) + 1)
    found = where(is_far, far, near)
    return where(real < 0, -found, found)


def acosh(x: Operand) -> Tensor:
    """The inverse of the hyperbolic cosine, for x from 1 on; NaN below."""
    real = as_real(x)
    is_far = real > 2
    above = where(is_far, 1, real - 1)
    near = log1p(above + sqrt(above) * sqrt(above + 2))
    outer = where(is_far, real, 2)
    inverse = 1 / outer
    far = log(outer) + log(sqrt((1 - inverse) * (1 + inverse)) + 1)
    return where(is_far, far, near)


def atanh(x: Operand) -> Tensor:
    """The inverse of the hyperbolic tangent, for x from −1 to 1; NaN beyond."""
    real = as_real(x)
    return (log1p(real) - log1p(-real)) * 0.5


def trunc(x: Operand) -> Tensor:
    """The whole part: rounded towards 0. Integers stay as they are."""
    if is_whole(x):
        return as_tensor(x)
    real = as_real(x)
    return where(real < 0, ceil(real), floor(real))


def frac(x: Operand) -> Tensor:
    """What is left without the whole part, with the sign of x."""
    real = as_real(x)
    return sub(real, trunc(real))


def isinf(x: Operand) -> Tensor:
    """Whether x is infinite, of either sign."""
    return eq(abs(as_real(x)), math.inf)


def nan_to_num(
    x: Operand, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """x with NaN and infinities replaced: by numbers, or the largest of the dtype.

    Integers and bool, which have neither, stay as they are.
    """
    real = as_tensor(x)
    if not real.dtype.is_float:
        return real
    most = real.dtype.largest
    found = where(isnan(real), nan, real)
    found = where(eq(real, math.inf), most if posinf is None else posinf, found)
    return where(eq(real, -math.inf), -most if neginf is None else neginf, found)


def logaddexp(x: Operand, y: Operand) -> Tensor:
    """log(eˣ + eʸ), without overflow."""
    a, b = align("logaddexp", as_real(x), as_real(y))
    is_less = a < b
    high, low = where(is_less, b, a), where(is_less, a, b)
    # Infinities have no difference: one that is not above the other adds nothing.
    is_endless = eq(abs(low), math.inf)
    found = high + softplus(where(is_endless, -math.inf, low - high), threshold=1.0)
    return where(logical_and(is_endless, eq(high, -math.inf)), -math.inf, found)


def lerp(start: Operand, end: Operand, weight: Operand) -> Tensor:
    """start + weight · (end − start)."""
    a, b = as_tensor(start), as_tensor(end)
    return a + (b - a) * as_tensor(weight)


def addcmul(x: Operand, first: Operand, second: Operand, value: float = 1.0) -> Tensor:
    """x + value · first · second."""
    product = as_tensor(first) * as_tensor(second)
    return as_tensor(x) + (product if value == 1 else product * value)


def addcdiv(x: Operand, first: Operand, second: Operand, value: float = 1.0) -> Tensor:
    """x + value · first / second."""
    return as_tensor(x) + div(as_tensor(first), as_tensor(second)) * value


def hypot(x: Operand, y: Operand) -> Tensor:
    """√(x² + y²), without overflow; its slope at the origin is 0."""
    a, b = align("hypot", as_real(x), as_real(y))
    top = stop_gradient(maximum(abs(a), abs(b)))
    scale = where(eq(top, 0), 1, where(eq(top, math.inf), 1, top))
    square = (a / scale) * (a / scale) + (b / scale) * (b / scale)
    is_zero = eq(square, 0)
    return where(is_zero, 0, sqrt(where(is_zero, 1, square))) * scale


def fmax(x: Operand, y: Operand) -> Tensor:
    """The larger of two, elementwise; NaN only where both are. At a tie x gets the gradient."""
    a, b = align("fmax", x, y, dtype=numeric_dtype(x, y))
    return where(logical_or(ge(a, b), isnan(b)), a, b)


def fmin(x: Operand, y: Operand) -> Tensor:
    """The smaller of two, elementwise; NaN only where both are. At a tie x gets the gradient."""
    a, b = align("fmin", x, y, dtype=numeric_dtype(x, y))
    return where(logical_or(le(a, b), isnan(b)), a, b)


def fmod(x: Operand, y: Operand) -> Tensor:
    """x − y · trunc(x / y): the sign of x, as torch.fmod. Integers give 0 where y is 0."""
    a, b = align("fmod", x, y, dtype=numeric_dtype(x, y))
    is_negative = signbit(a)  # abs would have no slope at 0
    size = remainder(where(is_negative, neg(a), a), abs(b))
    found = where(is_negative, neg(size), size)
    # A finite x stays as it is where y is infinite.
    return where(logical_and(isinf(b), isfinite(a)), a, found) if a.dtype.is_float else found


def copysign(x: Operand, y: Operand) -> Tensor:
    """|x| with the sign of y, that of −0 included; the slope at x = 0 is 0."""
    a, b = align("copysign", x, y, dtype=real_dtype(x, y))
    size = abs(a)
    return where(signbit(b), neg(size), size)


def signbit(x: Operand) -> Tensor:
    """Whether x is below 0 or −0."""
    value = as_tensor(x)
    if not value.dtype.is_float:
        return lt(value, 0)
    return logical_or(lt(value, 0), logical_and(eq(value, 0), lt(div(1.0, value), 0)))


def masked_fill(x: Operand, mask: Operand, value: Operand) -> Tensor:
    """x with a value where the mask holds, in x's dtype."""
    given = as_tensor(x)
    if is_weak(value) and given.dtype.is_float:
        return where(mask, value, given)  # the number is rounded once, to x's dtype
    new = as_tensor(value)
    if new.shape != ():
        raise ShapeError(
            "masked_fill", f"the value is {new.type}", "It is one number; td.where takes tensors."
        )
    return where(mask, cast_to(new, given.dtype), given)


def dropout(x: Operand, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 − p)."""
    check_number("dropout", "p", p, PROBABILITY)
    value = as_tensor(x)
    if not training or p == 0:
        return value
    if p == 1:
        return value * 0
    return where(random.bernoulli(1 - p, value.shape), value * (1 / (1 - p)), 0)
