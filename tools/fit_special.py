"""Fits and prints frontend/functions/special_coefficients.py.

    python tools/fit_special.py

Each function is interpolated at Chebyshev's nodes of an interval, in extended precision. It is
printed as a polynomial in u, which runs from −1 to 1 over that interval. The error is below 10⁻¹⁰
(32 bits) and 10⁻¹⁸ (64 bits) of the greatest value, so that derivatives of the polynomials are
exact to a dtype's last digits too. A test compares the module with this output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from mpmath import mp, mpf

mp.dps = 50
NODES = 60
PRECISIONS = {32: mpf("1e-10"), 64: mpf("1e-18")}
MIDDLE = mpf("3.75")  # the z at which u is 0 for erfcx
# Ends of the intervals of w = −log(1 − x²) for erfinv. From the second on, √w is linear in u.
ENDS = {32: (0, 5, mpf("16.25")), 64: (0, 5, 16, 37)}

Real = Callable[[mpf], mpf]

HEADER = '''"""Polynomials of special functions, lowest coefficients first.

Written by tools/fit_special.py.
"""

MIDDLE = {middle}  # the z at which u is 0 in ERFCX
'''


def chebyshev(function: Real) -> list[mpf]:
    """Coefficients of Chebyshev's polynomials."""
    angles = [mp.pi * (2 * k + 1) / (2 * NODES) for k in range(NODES)]
    values = [function(mp.cos(a)) for a in angles]
    return [
        (2 if j else 1) * sum(v * mp.cos(j * a) for v, a in zip(values, angles)) / NODES
        for j in range(NODES)
    ]


def powers(series: Sequence[mpf]) -> list[mpf]:
    """The same polynomial by powers of u."""
    before, now = [mpf(1)], [mpf(0), mpf(1)]
    found = [series[0]] + [mpf(0)] * (len(series) - 1)
    for c in series[1:]:
        for i, a in enumerate(now):
            found[i] += c * a
        after = [mpf(0)] + [2 * a for a in now]
        for i, a in enumerate(before):
            after[i] -= a
        before, now = now, after
    return found


def fitted(function: Real, precision: mpf) -> list[float]:
    series = chebyshev(function)
    left = [sum(abs(c) for c in series[i:]) for i in range(NODES)]
    count = next(i for i, rest in enumerate(left) if rest < precision * abs(series[0]))
    return [float(c) for c in powers(series[:count])]


def erfcx(z: mpf) -> mpf:
    if z < 1000:
        return mp.exp(z * z + mp.log(mp.erfc(z)))
    terms = (1, -1 / (2 * z**2), 3 / (4 * z**4), -15 / (8 * z**6), 105 / (16 * z**8))
    return sum(terms) / (z * mp.sqrt(mp.pi))


def scaled_tail(u: mpf) -> mpf:
    """(1 + 2 z) erfcx(z), of z = m (1 + u) / (1 − u)."""
    z = MIDDLE * (1 + u) / (1 - u)
    return (1 + 2 * z) * erfcx(z)


def inverse(w: mpf) -> mpf:
    """erfinv(x) / x at x = √(1 − e⁻ʷ), by Newton's steps with a second-order correction."""
    if w < mpf("1e-12"):
        return mp.sqrt(mp.pi) / 2 * (1 + w * mp.pi / 12)
    rest = mp.exp(-w)
    x = mp.sqrt(1 - rest)
    tail = rest / (1 + x)  # 1 − x
    y = mp.sqrt(w) if w > 3 else mp.erfinv(x)
    for _ in range(60):
        step = (mp.erfc(y) - tail) / (-2 / mp.sqrt(mp.pi) * mp.exp(-y * y))
        y -= step / (1 + y * step)
        if abs(step) < mpf(10) ** -42 * abs(y):
            break
    return y / x


def pieces(bits: int) -> list[tuple[float, float, float, list[float]]]:
    """(end, centre, half width, coefficients): of w in the first piece, of √w in the others."""
    found = []
    ends = ENDS[bits]
    for i, (low, high) in enumerate(pairwise(ends)):
        a, b = (mpf(low), mpf(high)) if i == 0 else (mp.sqrt(low), mp.sqrt(high))
        # Rounded as the program has them, so that u is the same number there.
        centre, half = (mpf(float(v)) for v in ((a + b) / 2, (b - a) / 2))

        def of(u: mpf, c: mpf = centre, h: mpf = half, first: bool = i == 0) -> mpf:
            place = c + h * u
            return inverse(max(mpf(0), place if first else place**2))

        found.append((float(high), float(centre), float(half), fitted(of, PRECISIONS[bits])))
    return found


def listed(values: Sequence[float]) -> str:
    return "\n".join(f"    {v!r}," for v in values)


def module() -> str:
    parts = [HEADER.format(middle=float(MIDDLE))]
    parts.append("# (1 + 2 z) erfcx(z), of u = (z − MIDDLE) / (z + MIDDLE), by bits.")
    parts.append("ERFCX = {")
    for bits, precision in PRECISIONS.items():
        parts.append(f"    {bits}: (\n{listed(fitted(scaled_tail, precision))}\n    ),")
    parts.append("}\n")
    parts.append(
        "# erfinv(x) / x by intervals of w = −log(1 − x²), by bits: (end, centre, half width,"
    )
    parts.append(
        "# coefficients) of u = (w − centre) / half width, of √w from the second interval on."
    )
    parts.append("ERFINV = {")
    for bits in PRECISIONS:
        parts.append(f"    {bits}: (")
        for end, centre, half, coefficients in pieces(bits):
            parts.append(f"        ({end!r}, {centre!r}, {half!r}, (\n{listed(coefficients)}\n)),")
        parts.append("    ),")
    parts.append("}")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(module(), end="")
