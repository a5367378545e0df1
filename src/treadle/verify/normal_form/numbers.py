"""Constants: exactly, or as the simple number that they were rounded from."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from treadle.base.dtypes import DType
from treadle.verify.normal_form.algebra import constant, multiply, of_atom, root, scale
from treadle.verify.normal_form.form import Atom, Coefficient, Form, Kind
from treadle.verify.normal_form.functions import INFINITY, Assumption, Work

_LARGEST_PART = 1024  # of a fraction that counts as simple
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

    In this order: a fraction of small whole numbers, a short decimal, the root of a small fraction,
    with or without π, or the number to 40 bits.
    """
    found = _simple(exact, tolerance)
    if found is not None:
        return constant(found), found == exact
    text = Fraction(repr(float(exact)))
    if len(str(text.numerator)) <= _DIGITS and _is_near(text, exact, tolerance):
        return constant(text), text == exact
    sign = 1 if exact > 0 else -1
    for turns in (0, -1, 1):
        square = exact * exact / Fraction(math.pi) ** turns
        found = _simple(square, 2 * tolerance)
        if found is not None:
            inner = multiply(root(found, Fraction(1, 2)), _power_of_pi(Fraction(turns, 2)))
            return scale(inner, sign), False
    mantissa, exponent = math.frexp(float(exact))
    kept = Fraction(round(mantissa * 2**_KEPT)) * Fraction(2) ** (exponent - _KEPT)
    return constant(kept), kept == exact


def _power_of_pi(exponent: Coefficient) -> Form:
    return of_atom(PI, exponent) if exponent else constant(1)


def _simple(value: Fraction, tolerance: float) -> Fraction | None:
    """A fraction of small whole numbers that is near enough."""
    if not value:
        return value
    size = abs(value)
    found = (
        size.limit_denominator(_LARGEST_PART)
        if size >= 1
        else (1 / (1 / size).limit_denominator(_LARGEST_PART))
    )
    is_small = max(found.numerator, found.denominator) <= _LARGEST_PART
    if not is_small or not _is_near(found, size, tolerance):
        return None
    return found if value > 0 else -found


def _is_near(a: Fraction, b: Fraction, tolerance: float) -> bool:
    return abs(a - b) <= abs(b) * Fraction(tolerance)
