"""Primes, keys and samples that the checker draws when it runs.

A file that could foresee them could hold a wrong formula that agrees modulo the prime that is used,
or a defect in an iteration that is not sampled. A seed repeats a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np

LEAST, MOST = 2**30, 2**31  # between which primes are drawn
WITNESSES = (2, 3, 5, 7)  # enough for all numbers below 2³¹
SMALL = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def fresh() -> int:
    """A seed that nobody could foresee."""
    return int.from_bytes(os.urandom(16), "little")


PROCESS = fresh()  # where no seed is set
_seed: ContextVar[int] = ContextVar("seed", default=PROCESS)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw everything from a seed, within a block."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def generator(*purpose: int) -> Any:
    """A NumPy generator for one purpose: the same in one run for equal numbers."""
    return np.random.default_rng([_seed.get(), *purpose])


def key(trial: int) -> int:
    """64 bits that decide what functions without laws give."""
    return int(generator(1, trial).integers(2**64, dtype=np.uint64))


def safe_prime(trial: int) -> int:
    """A prime p for which (p − 1) / 2 is prime too."""
    return _safe_prime(_seed.get(), trial)


@lru_cache(maxsize=64)
def _safe_prime(seed: int, trial: int) -> int:
    rng = np.random.default_rng([seed, 0, trial])
    while True:
        half = int(rng.integers(LEAST // 2, MOST // 2)) | 1
        if is_prime(half) and is_prime(2 * half + 1):
            return 2 * half + 1


def is_prime(n: int) -> bool:
    """Decide by the test of Miller and Rabin, which errs for no number below 2³¹ here."""
    if n < 2 or any(n % p == 0 for p in (2, *SMALL)):
        return n in (2, *SMALL)
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in WITNESSES:
        power = pow(base, odd, n)
        if power not in (1, n - 1) and not any(
            (power := power * power % n) == n - 1 for _ in range(twos - 1)
        ):
            return False
    return True
