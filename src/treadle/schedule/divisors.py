"""Numbers that cut an axis into equal parts."""

from __future__ import annotations

import functools
import math


@functools.cache
def best_divisor(n: int, target: int, least: int = 1) -> int:
    """The divisor of n nearest below a target, or the smallest above; at least `least`."""
    every = divisors(n)
    below = [d for d in every if least <= d <= target]
    above = [d for d in every if d > target]
    return below[-1] if below else above[0]


def divisors(n: int) -> list[int]:
    """All of them, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
