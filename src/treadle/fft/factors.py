"""How long transforms are cut into short ones, and the matrices of these, in float64.

A transform of n = n₁ n₂ elements is n₂ of n₁ elements, factors, and n₁ of n₂ elements (Cooley and
Tukey). Short ones are matmuls: on a machine whose matmuls are fast, 32 · 32 multiplications in
registers cost less than five passes over memory.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

Array = np.ndarray

# What a second matrix costs beyond its sums, in frequencies that one matrix could have given.
# Measured on one core: of complex numbers 128 are quicker by two matrices (0.13 ms against 0.18 for
# 128 rows), of real ones 256 by one (0.46 against 0.54 for 256 rows) and 384 by two (0.41, 0.77).
PASS = 100
LONGEST = 256  # frequencies by one matrix of a length without factors


def best_factor(n: int, used: int) -> int | None:
    """n₁ for a transform of which `used` frequencies are asked for; None for a single matrix."""
    factors = [f for f in range(2, math.isqrt(n) + 1) if n % f == 0]
    if not factors:
        return None
    largest = factors[-1]
    cut = largest + n // largest + PASS
    return largest if used > cut else None


def needs_chirp(n: int, used: int) -> bool:
    """Whether a matrix is too large for a length without factors."""
    return used > LONGEST and best_factor(n, used) is None


def smooth_length(least: int) -> int:
    """The shortest length from `least` on whose factors are 2, 3 and 5."""
    n = least
    while _rest(n) != 1:
        n += 1
    return n


def _rest(n: int) -> int:
    for p in (2, 3, 5):
        while n % p == 0:
            n //= p
    return n


@cache
def roots(rows: tuple[int, int], columns: tuple[int, int], n: int, sign: int) -> Array:
    """exp(sign · 2πi j k / n) for j in one range and k in another; exact angles for any n."""
    j, k = np.arange(*rows), np.arange(*columns)
    turns = np.outer(j, k) % n
    return np.exp(sign * 2j * math.pi * (turns / n))


def chirp(n: int, sign: int) -> Array:
    """exp(sign · πi k² / n): j k is (j² + k² − (j − k)²) / 2."""
    k = np.arange(n)
    return np.exp(sign * 1j * math.pi * (k * k % (2 * n) / n))


def lowest(n: int, modes: int) -> Array:
    """The frequencies nearest to 0 among those of n elements, in their order."""
    positive = (modes + 1) // 2
    return np.concatenate([np.arange(positive), np.arange(n - modes // 2, n)])


def interleaved(matrix: Array) -> Array:
    """(n, k) complex as (2n, 2k) real: a row of pairs times it is a row of pairs."""
    n, k = matrix.shape
    both = np.empty((n, 2, k, 2))
    both[:, 0, :, 0], both[:, 0, :, 1] = matrix.real, matrix.imag
    both[:, 1, :, 0], both[:, 1, :, 1] = -matrix.imag, matrix.real
    return both.reshape(2 * n, 2 * k)


def pairs(values: Array) -> Array:
    """Complex numbers with their parts along a last axis."""
    return np.stack([values.real, values.imag], -1)
