"""Orders that depend on a seed and an epoch only: not on workers, threads or NumPy's version."""

from __future__ import annotations

import numpy as np

_WORD = 2**64
SPLIT = _WORD - 1  # the stream that `split` draws from; no training gets to that epoch


def permutation(seed: int, stream: int, count: int) -> np.ndarray:
    """0 … count − 1 in an order keyed by (seed, stream).

    It sorts raw Philox words: NumPy keeps those the same for ever, and `Generator.permutation` not.
    """
    key = np.array([seed % _WORD, stream % _WORD], np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    return np.argsort(words, kind="stable")
