"""Philox4x32-10 (Salmon et al., 2011): counter-based random bits, the same everywhere."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

Words = np.ndarray  # uint64 arrays that hold 32-bit words

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_ROUNDS = 10


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, ...]:
    """Four 32-bit words for each counter of four words and one key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * np.uint64(_MULTIPLIERS[0])
        p1 = c2 * np.uint64(_MULTIPLIERS[1])
        high0, low0 = p0 >> np.uint64(32), p0 & _MASK
        high1, low1 = p1 >> np.uint64(32), p1 & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(key: np.ndarray, site: int, shape: tuple[int, ...], blocks: int = 0) -> np.ndarray:
    """uint32 bits: element i is word i mod 4 of block i div 4.

    The counter is (block, scan index, step, micro-step · 2¹⁶ + site), the key the seed. Shard n of
    a batch begins `blocks` · n blocks later.
    """
    seed0, seed1, step, micro, scan, offset = (int(w) for w in key)
    size = int(np.prod(shape, dtype=np.int64))
    first = (offset >> 16) * blocks
    counted = (np.arange((size + 3) // 4, dtype=np.uint64) + np.uint64(first)) & _MASK
    last = ((micro << 16) + ((site + offset) & 0xFFFF)) & 0xFFFFFFFF
    constants = (np.full_like(counted, w) for w in (scan, step, last))
    words = philox4x32((counted, *constants), (seed0, seed1))  # type: ignore[arg-type]
    return np.stack(words, axis=-1).reshape(-1)[:size].reshape(shape).astype(np.uint32)


def make_key(seed: int, step: int = 0, micro_step: int = 0, stream: int = 0) -> np.ndarray:
    """The value of the `random` state: seed (2 words), step, micro-step, scan index, sites.

    Streams of one seed are independent; stream 0 is the seed's own.
    """
    seed = _of_stream(seed, stream) if stream else seed % 2**64
    words = [seed & 0xFFFFFFFF, seed >> 32, step % 2**32, micro_step, 0, 0]
    return np.array(words, np.uint32)


def key_of_shard(key: np.ndarray, shard: int) -> np.ndarray:
    """The key of a shard of a batch: its number is the upper half of the last word."""
    found = key.copy()
    found[5] = (int(found[5]) & 0xFFFF) | (shard << 16)
    return found


@lru_cache(maxsize=256)
def _of_stream(seed: int, stream: int) -> int:
    """A seed for a stream. Seeds are Philox's key, so that all counters of a stream are its own."""
    digest = hashlib.blake2b(f"{seed % 2**64}:stream:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
