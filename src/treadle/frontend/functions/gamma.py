"""The logarithm of the gamma function, and its derivatives.

Both are Stirling's series at z ≥ `shift`, which Γ(x + 1) = x Γ(x) leads to from any positive x, and
Γ(x) Γ(1 − x) = π / sin(πx) from a negative one. The first term left out is below half a place of a
dtype's: 4·10⁻⁹ at 3 for 32 bits, 8·10⁻¹⁶ at 8 for 64. A smaller shift loses less where sums cancel.
"""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.frontend.functions.arithmetic import (
    abs,
    as_real,
    cos,
    eq,
    floor,
    log,
    logical_and,
    sin,
    where,
)
from treadle.frontend.functions.shaping import integer_of
from treadle.frontend.tensor import Operand, Tensor

# Bernoulli's numbers B₂, B₄, …
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


def lgamma(x: Operand) -> Tensor:
    """log |Γ(x)|, where Γ(n) = (n − 1)!; ∞ at 0 and at negative whole numbers."""
    real = as_real(x)
    is_reflected, at = _positive(real)
    z, small, is_small, shift = _shifted(at)
    inverse = 1 / z
    terms = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]
    stirling = (z - 0.5) * (log(z) - 1) + 0.5 * (math.log(2 * math.pi) - 1)
    product = small
    for i in range(1, shift):
        product = product * (small + i)
    found = stirling + _series(terms, inverse) * inverse - where(is_small, log(product), 0)
    sine = sin(_from_pole(real, is_reflected) * math.pi)
    reflected = math.log(math.pi) - log(abs(sine)) - found
    # Far below 0 every number is a pole, where `found` overflows too.
    is_pole = logical_and(is_reflected, eq(real, floor(real)))
    return where(is_pole, math.inf, where(is_reflected, reflected, found))


def digamma(x: Operand) -> Tensor:
    """The derivative of log |Γ(x)|; not finite at 0 and at negative whole numbers."""
    real = as_real(x)
    is_reflected, at = _positive(real)
    z, small, is_small, shift = _shifted(at)
    inverse = 1 / z
    terms = [-b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)]
    series = _series(terms, inverse) * inverse * inverse
    steps = 1 / small
    for i in range(1, shift):
        steps = steps + 1 / (small + i)
    found = log(z) - 0.5 * inverse + series - where(is_small, steps, 0)
    angle = _from_pole(real, is_reflected) * math.pi
    return where(is_reflected, found - math.pi * cos(angle) / sin(angle), found)


def polygamma(n: int, x: Operand) -> Tensor:
    """The derivative of order n + 1 of log |Γ(x)|: `digamma` for n = 0.

    Shapes: any shape → the same.
    """
    order = integer_of("polygamma", "n", n)
    if order < 0:
        raise ArgumentError("polygamma", f"n = {order}", "It is 0 or more.")
    if order == 0:
        return digamma(x)
    real = as_real(x)
    is_reflected, at = _positive(real)
    found = _hurwitz(order + 1, at) * ((-1) ** (order + 1) * math.factorial(order))
    # ψₙ(x) = (−1)ⁿ ψₙ(1 − x) − π dⁿ/dxⁿ cot(πx), a polynomial of the cotangent.
    slopes = [0, 1]
    for _ in range(order):  # d/dx P(c) = −π (1 + c²) P′(c)
        inner = [k * a for k, a in enumerate(slopes)][1:]
        slopes = [-(a + b) for a, b in zip([*inner, 0, 0], [0, 0, *inner], strict=True)]
    angle = _from_pole(real, is_reflected) * math.pi
    cotangent = cos(angle) / sin(angle)
    reflected = cotangent * slopes[-1]
    for a in slopes[-2:0:-1]:
        reflected = (reflected + a) * cotangent
    reflected = reflected + slopes[0]
    other = found * (-1) ** order - reflected * math.pi ** (order + 1)
    return where(is_reflected, other, found)


def _hurwitz(s: int, x: Tensor) -> Tensor:
    """Σ 1 / (x + k)ˢ over k ≥ 0, for x ≥ 0: the first terms, and Euler's and Maclaurin's rest."""
    count = 12 if x.dtype is dtypes.float64 else 6
    terms = [_reciprocal_power(x + k, s) for k in range(count)]
    end = x + count
    last, square = _reciprocal_power(end, s), 1 / (end * end)
    rest = _reciprocal_power(end, s - 1) * (1 / (s - 1)) + last * 0.5
    factor = last / end * s
    for k, b in enumerate(_BERNOULLI, 1):
        rest = rest + factor * (b / math.factorial(2 * k))
        factor = factor * square * ((s + 2 * k - 1) * (s + 2 * k))
    for term in reversed(terms):
        rest = rest + term
    return rest


def _reciprocal_power(x: Tensor, n: int) -> Tensor:
    """1 / xⁿ by products."""
    found, base = None, 1 / x
    while n:
        if n % 2:
            found = base if found is None else found * base
        base, n = base * base, n // 2
    assert found is not None
    return found


def _positive(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether x is reflected, and what the series is asked for: x or 1 − x."""
    is_reflected = x < 0
    return is_reflected, where(is_reflected, 1 - x, x)


def _from_pole(x: Tensor, is_reflected: Tensor) -> Tensor:
    """How far x is from the nearest whole number, exactly; a half where that is not asked for."""
    return where(is_reflected, x - floor(x + 0.5), 0.5)


def _shifted(x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """(z, small, is_small, shift): z is large enough; small is x where it was moved, and else 1."""
    shift = 8 if x.dtype is dtypes.float64 else 3
    is_small = x < shift
    return where(is_small, x + shift, x), where(is_small, x, 1), is_small, shift


def stirling_rest(x: Tensor) -> Tensor:
    """log Γ(x) − (x − ½) log x + x − ½ log 2π, for x ≥ 8."""
    terms = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]
    return _series(terms, 1 / x) / x


def _series(terms: list[float], inverse: Tensor) -> Tensor:
    """Σ terms[k] / z²ᵏ, by Horner's rule."""
    square = inverse * inverse
    found = square * terms[-1]
    for term in terms[-2:0:-1]:
        found = (found + term) * square
    return found + terms[0]
