"""Fits and prints codegen/llvm/coefficients.py.

    python tools/fit_polynomials.py

Each is the polynomial P of a given number of coefficients that makes the largest |w (g − P)| over
an interval smallest: Remez's exchange on a dense grid, in extended precision. The weight w turns
an error of P into a relative error of the function that P is a part of. Coefficients are rounded
from the lowest on, and those after each are fitted again, so that they make good its rounding.
A test compares what is printed with what the module holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from mpmath import mp, mpf

mp.dps = 40
GRID = 500
EXCHANGES = 30
LEVEL = mpf("1.001")  # the extrema of the error are equal to within this factor: done

Real = Callable[[mpf], mpf]


@dataclass(frozen=True)
class Fit:
    """A polynomial to be fitted, in powers of x, or of x² where `even`."""

    name: str
    about: str
    target: Real
    weight: Real
    interval: tuple[mpf, mpf]
    count: int
    digits: int = 9  # significant decimals: 9 say which float32 it is, 17 which float64
    even: bool = False

    def variable(self, x: mpf) -> mpf:
        return x * x if self.even else x


@dataclass(frozen=True)
class Sample:
    """The target and the weight on the grid: u is what the polynomial is evaluated at."""

    u: Sequence[mpf]
    target: Sequence[mpf]
    weight: Sequence[mpf]

    def error(self, coefficients: Sequence[mpf]) -> list[mpf]:
        values = (mp.polyval(coefficients[::-1], u) for u in self.u)
        return [w * (g - p) for g, w, p in zip(self.target, self.weight, values)]

    def without(self, constant: mpf) -> Sample:
        """What is left to fit once the constant term is settled: (g − c) / u, weighted w |u|."""
        target = [(g - constant) / u for g, u in zip(self.target, self.u)]
        return Sample(self.u, target, [w * abs(u) for w, u in zip(self.weight, self.u)])


def sample(fit: Fit) -> Sample:
    """Chebyshev's points: dense at the ends, where the error turns fastest, and never 0."""
    low, high = fit.interval
    angles = [mp.pi * (2 * i + 1) / (2 * GRID) for i in range(GRID)]
    x = [(low + high) / 2 - (high - low) / 2 * mp.cos(a) for a in angles]
    return Sample([fit.variable(v) for v in x], [fit.target(v) for v in x], [*map(fit.weight, x)])


def minimax(points: Sample, count: int) -> list[mpf]:
    """Remez: fit on count + 1 points with errors of one size and alternating signs; move them."""
    last = len(points.u) - 1
    chosen = [round(last * (1 - np.cos(np.pi * i / count)) / 2) for i in range(count + 1)]
    best: list[mpf] = []
    least = mp.inf
    for _ in range(EXCHANGES):
        coefficients, level = _levelled(points, chosen, count)
        error = points.error(coefficients)
        worst = max(map(abs, error))
        if worst < least:  # the exchange may go round in circles where the weight is 0
            best, least = coefficients, worst
        if worst <= LEVEL * abs(level):
            break
        chosen = _alternating_extrema(error, count + 1)
    return best


def _levelled(points: Sample, chosen: Sequence[int], count: int) -> tuple[list[mpf], mpf]:
    rows, right = [], []
    for sign, i in enumerate(chosen):
        u, w = points.u[i], points.weight[i]
        rows.append([w * u**k for k in range(count)] + [mpf((-1) ** sign)])
        right.append(w * points.target[i])
    solution = list(mp.lu_solve(mp.matrix(rows), mp.matrix(right)))
    return solution[:count], solution[count]


def _alternating_extrema(error: Sequence[mpf], count: int) -> list[int]:
    """The largest error of each run of one sign, without the smallest ones that are too many."""
    best: list[int] = []
    for i, e in enumerate(error):
        if best and (e > 0) == (error[best[-1]] > 0):
            if abs(e) > abs(error[best[-1]]):
                best[-1] = i
        else:
            best.append(i)
    while len(best) > count:
        _drop_smallest(best, error, count)
    assert len(best) == count, "the error changes sign too seldom: the target is not smooth here"
    return best


def _drop_smallest(best: list[int], error: Sequence[mpf], count: int) -> None:
    """One from an end, or two neighbours: what is left must still alternate."""
    sizes = [abs(error[i]) for i in best]
    pairs = [max(a, b) for a, b in pairwise(sizes)]
    if len(best) >= count + 2 and min(pairs) < min(sizes[0], sizes[-1]):
        first = pairs.index(min(pairs))
        del best[first : first + 2]
    else:
        best.pop(0 if sizes[0] < sizes[-1] else -1)


def rounded(value: mpf, digits: int) -> mpf:
    return mpf(float(np.float32(float(value)))) if digits == 9 else mpf(float(value))


def fitted(fit: Fit) -> tuple[list[mpf], mpf]:
    """The rounded coefficients from the constant up, and the largest weighted error."""
    points = sample(fit)
    rest, settled = points, []
    for left in range(fit.count, 0, -1):
        constant = rounded(minimax(rest, left)[0], fit.digits)
        settled.append(constant)
        rest = rest.without(constant)
    return settled, max(map(abs, points.error(settled)))


def parts(value: mpf, count: int) -> list[mpf]:
    """A number as a sum of float32s, each the nearest to what is left."""
    found: list[mpf] = []
    for _ in range(count):
        found.append(rounded(value - sum(found), 9))
    return found


def _exp_rest(x: mpf) -> mpf:
    return (mp.expm1(x) - x) / x**2


def _log_rest(x: mpf) -> mpf:
    return (mp.log1p(x) - x + x**2 / 2) / x**3


def _sin_rest(x: mpf) -> mpf:
    return (mp.sin(x) - x) / x**3


def _cos_rest(x: mpf) -> mpf:
    return (mp.cos(x) - 1 + x**2 / 2) / x**4


def _atan_rest(x: mpf) -> mpf:
    return (mp.atan(x) - x) / x**3


def _log_erfc_rest(x: mpf) -> mpf:
    return -mp.log(mp.erfc(x)) / x - ERF_SLOPE


def _log2_of_quotient(s: mpf) -> mpf:
    return mp.log((1 + s) / (1 - s), 2) / s


def _exp2_rest(x: mpf) -> mpf:
    return (mpf(2) ** x - 1) / x


HALF_LN2 = mp.ln2 / 2
SQRT2 = mp.sqrt(2)
ERF_END = mpf("3.93")  # beyond it erf rounds to 1
ERF_SLOPE = rounded(2 / mp.sqrt(mp.pi), 9)
QUOTIENT_END = (SQRT2 - 1) / (SQRT2 + 1)

FITS = (
    Fit(
        "EXP",
        "(eˣ − 1 − x) / x² for |x| ≤ ln 2 / 2; error relative to eˣ − 1",
        _exp_rest,
        lambda x: x**2 / abs(mp.expm1(x)),
        (-HALF_LN2, HALF_LN2),
        5,
    ),
    Fit(
        "LOG",
        "(log(1 + x) − x + x²/2) / x³ for √½ ≤ 1 + x ≤ √2; error relative to log(1 + x)",
        _log_rest,
        lambda x: abs(x**3 / mp.log1p(x)),
        (1 / SQRT2 - 1, SQRT2 - 1),
        8,
    ),
    Fit(
        "SIN",
        "(sin x − x) / x³ in x² for |x| ≤ π/4; error relative to sin x",
        _sin_rest,
        lambda x: x**3 / mp.sin(x),
        (mpf(0), mp.pi / 4),
        3,
        even=True,
    ),
    Fit(
        "COS",
        "(cos x − 1 + x²/2) / x⁴ in x² for |x| ≤ π/4; error relative to cos x",
        _cos_rest,
        lambda x: x**4 / mp.cos(x),
        (mpf(0), mp.pi / 4),
        3,
        even=True,
    ),
    Fit(
        "ATAN",
        "(atan x − x) / x³ in x² for 0 ≤ x ≤ 1; error relative to atan x",
        _atan_rest,
        lambda x: x**3 / mp.atan(x),
        (mpf(0), mpf(1)),
        8,
        even=True,
    ),
    Fit(
        "ERF",
        "−log(erfc x) / x − ERF_SLOPE for 0 ≤ x ≤ 3.93; error relative to erf x",
        _log_erfc_rest,
        lambda x: x * mp.erfc(x) / mp.erf(x),
        (mpf(0), ERF_END),
        9,
    ),
    Fit(
        "LOG2",
        "log2((1 + s) / (1 − s)) / s in s² for (1 + s) / (1 − s) from √½ to √2; relative",
        _log2_of_quotient,
        lambda s: 1 / _log2_of_quotient(s),
        (mpf(0), QUOTIENT_END),
        5,
        17,
        even=True,
    ),
    Fit(
        "EXP2",
        "(2ˣ − 1) / x for |x| ≤ ½; error relative to 2ˣ",
        _exp2_rest,
        lambda x: abs(x) / mpf(2) ** x,
        (mpf(-1) / 2, mpf(1) / 2),
        6,
        17,
    ),
)


@dataclass(frozen=True)
class Pieces:
    """erf about the multiples of a step, each a polynomial of so many coefficients.

    The first piece, about 0, has a factor x of its own and no constant term.
    """

    name: str
    count: int
    step: mpf
    coefficients: int

    @property
    def about(self) -> str:
        half = mp.nstr(self.step / 2, 6)
        return (
            f"erf({mp.nstr(self.step, 6)} n + x) for |x| ≤ {half}; the first erf(x) / x; relative"
        )

    def fit(self, n: int) -> Fit:
        half, middle = self.step / 2, self.step * n
        if n == 0:
            interval, count = (mpf(0), half), self.coefficients - 1
            return Fit(self.name, "", _erf_quotient, _over(_erf_quotient), interval, count)

        def erf(x: mpf) -> mpf:
            return mp.erf(middle + x)

        return Fit(self.name, "", erf, _over(erf), (-half, half), self.coefficients)

    def fitted(self, n: int) -> tuple[list[mpf], mpf]:
        """Coefficients from the constant up, and the largest error."""
        coefficients, error = fitted(self.fit(n))
        return ([mpf(0)] if n == 0 else []) + list(coefficients), error


def _over(function: Real) -> Real:
    return lambda x: 1 / function(x)


def _erf_quotient(x: mpf) -> mpf:
    return mp.erf(x) / x if x else 2 / mp.sqrt(mp.pi)


# For registers of 16 numbers and of 8: the step has few bits, so that its multiples are exact.
PIECES = (
    Pieces("ERF_PIECES", 16, mpf(65) / 256, 6),
    Pieces("ERF_LONG_PIECES", 8, mpf(17) / 32, 7),
)


def listing(values: Sequence[mpf], digits: int) -> str:
    return "".join(f"    {float(v):.{digits}g},\n" for v in values)


def main() -> None:
    for fit in FITS:
        coefficients, error = fitted(fit)
        bits = float(mp.log(error, 2))
        print(f"# {fit.about}: 2^{bits:.1f}.")
        print(f"{fit.name} = (\n{listing(coefficients, fit.digits)})")
    for pieces in PIECES:
        found = [pieces.fitted(n) for n in range(pieces.count)]
        bits = float(mp.log(max(error for _, error in found), 2))
        print(f"# {pieces.about}: 2^{bits:.1f}.\n{pieces.name} = (")
        for coefficients, _ in found:
            print(f"    ({', '.join(f'{float(c):.9g}' for c in coefficients)}),")
        print(")")
    print(f"LN2 = (\n{listing(parts(mp.ln2, 2), 9)})")
    print(f"HALF_PI = (\n{listing(parts(mp.pi / 2, 3), 9)})")
    print(f"ERF_SLOPE = {float(ERF_SLOPE):.9g}")


if __name__ == "__main__":
    main()
