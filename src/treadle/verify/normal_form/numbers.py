"""Constants: exactly, or as the simple number that they were rounded from."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from treadle.base.dtypes import DType
from treadle.verify.normal_form.algebra import constant, multiply, of_atom, root, scale
from treadle.verify.normal_form.form import Atom, Form, Kind
from treadle.verify.normal_form.functions import INFINITY, Assumption, Work

_LAST_BITS = 2.0**-50
_LARGE, _SMALL = 1024, 64  # parts of a fraction that counts as simple
_DIGITS = 10  # a number that fewer decimal digits spell is meant as it is written
_KEPT = 40  # bits of a number that is nothing simple
PI = Atom(Kind.ROOT, "pi")


def of_number(work: Work, value: bool | float | Fraction, dtype: DType) -> Form:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return of_atom(Atom(Kind.APPLY, "nan"))
        return scale(of_atom(INFINITY), 1 if value > 0 else -1)
    exact = Fraction(value)
    if not dtype.is_float or exact.denominator == 1:
        return constant(exact)
    if Assumption.ROUNDED_CONSTANTS not in work.allowed:
        return constant(exact)
    found, is_exact = rounded_from(exact, 2.0 * 2.0 ** -max(dtype.fraction_bits, 23))
    if not is_exact:
        work.assume(Assumption.ROUNDED_CONSTANTS)
    return found


@lru_cache(maxsize=1024)
def rounded_from(exact: Fraction, tolerance: float) -> tuple[Form, bool]:
    """The number that a constant stands for, and whether it is just that.

    In this order: a simple fraction or the root of one, with or without π, to the last bits of a
    float64; the same of smaller numbers, as near as asked; a short decimal; the number to 40 bits.
    """
    for nearness, largest in ((_LAST_BITS, _LARGE), (tolerance, _SMALL)):
        for turns, degree in ((0, 1), (0, 2), (-1, 2), (1, 2), (-1, 1), (1, 1)):
            power = abs(exact) ** degree / Fraction(math.pi) ** turns
            found = _simple(power, degree * nearness, largest)
            if found is not None:
                is_exact = degree == 1 and not turns and found == abs(exact)
                inner = multiply(root(found, Fraction(1, degree)), _pi(Fraction(turns, degree)))
                return scale(inner, 1 if exact > 0 else -1), is_exact
    text = Fraction(repr(float(exact)))
    if len(str(text.numerator)) <= _DIGITS:
        return constant(text), text == exact
    mantissa, exponent = math.frexp(float(exact))
    kept = Fraction(round(mantissa * 2**_KEPT)) * Fraction(2) ** (exponent - _KEPT)
    return constant(kept), kept == exact


def _pi(exponent: Fraction) -> Form:
    return of_atom(PI, exponent) if exponent else constant(1)


def _simple(value: Fraction, tolerance: float, largest: int) -> Fraction | None:
    """A fraction of small whole numbers, a whole number or one over it, that is near enough."""
    candidates = [value.limit_denominator(largest), Fraction(round(value))]
    candidates += [1 / Fraction(round(1 / value))] if value <= 1 else []
    for found in candidates:
        parts = found.numerator, found.denominator
        is_small = max(parts) <= largest or (min(parts) == 1 and max(parts) <= largest**2)
        if found and is_small and abs(found - value) <= value * Fraction(tolerance):
            return found
    return None
