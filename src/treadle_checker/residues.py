"""Arithmetic modulo primes below 2³¹, in arrays of int64: what ops do to residues, powers, discrete
logarithms, and keyed functions without laws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from treadle_checker.reading import NotEstablished, Rejected

Array = Any  # numpy.ndarray
Number = bool | int | float | Fraction

SHARDS = 1_000_003  # the factor that stands for a sum over shards: linear, and not the identity
GENERATOR = 4  # a square other than 1, so of order q modulo a safe prime p = 2q + 1
TABLES = 4  # of powers that are kept, one for each prime
STRIDE = 2**11  # between the exponents of the table by which logarithms are found
TOGETHER = 2**13  # powers that are looked for together
MOST_LOGARITHMS = 2**14  # at once: each takes a thousand steps


class Lane:
    """Arithmetic modulo one prime below 2³¹, in int64."""

    def __init__(self, modulus: int, key: int):
        self.modulus, self.key = modulus, key

    def power(self, x: Array, exponent: int) -> Array:
        """Bit by bit, the highest first."""
        found = np.ones_like(x)
        for bit in f"{exponent:b}":
            found = found * found % self.modulus
            if bit == "1":
                found = found * x % self.modulus
        return found

    def inverse(self, x: Array) -> Array:
        """1 / x, and 0 for 0."""
        return self.power(x, self.modulus - 2)

    def number(self, value: Number) -> int:
        """A finite number is a quotient of whole ones; others are keyed by their names."""
        if value in (math.inf, -math.inf) or value != value:
            return int(self.function(f"number {value}", np.zeros(1, np.int64))[0])
        above, below = value.as_integer_ratio()
        return above * pow(below, self.modulus - 2, self.modulus) % self.modulus

    def function(self, name: str, *operands: Array) -> Array:
        """A keyed function without laws."""
        state: Array = np.array(text_key(name) ^ self.key, np.uint64)
        for x in operands:
            state = mix(mix(x.astype(np.uint64)) ^ state)
        return (state % np.uint64(self.modulus)).astype(np.int64)

    def below(self, x: Array, y: Array) -> Array:
        """x < y as an element of x − y: s for d and 1 − s for −d."""
        d, opposite = (x - y) % self.modulus, (y - x) % self.modulus
        keyed = self.function("lt", np.minimum(d, opposite))
        return np.where(d == 0, 0, np.where(d < opposite, keyed, (1 - keyed) % self.modulus))

    def choice(self, condition: Array, x: Array, y: Array) -> Array:
        return (y + condition * ((x - y) % self.modulus)) % self.modulus

    def sign_of(self, x: Array) -> Array:
        return np.where(x == 0, 0, (1 - 2 * self.below(x, np.zeros_like(x))) % self.modulus)

    def matmul(self, x: Array, y: Array) -> Array:
        """Exact products of matrices: 16-bit halves as float64, so that BLAS does the work."""
        if x.shape[-1] > 2**20:
            raise Rejected("a product sums more than 2^20 terms at once")
        (low_x, high_x), (low_y, high_y) = (
            ((a & 0xFFFF).astype(np.float64), (a >> 16).astype(np.float64)) for a in (x, y)
        )

        def product(a: Array, b: Array) -> Array:
            return np.matmul(a, b).astype(np.int64) % self.modulus

        middle = product(low_x, high_y) + product(high_x, low_y)
        high = (product(high_x, high_y) * 2**16 + middle) % self.modulus
        return (high * 2**16 + product(low_x, low_y)) % self.modulus

    def exponential(self, x: Array, sign: Array | None) -> Array:
        """g^x, or −g^x where there is a sign."""
        low, high = _generator_powers(self.modulus)
        found = low[x & 0xFFFF] * high[x >> 16] % self.modulus
        return found if sign is None else np.where(sign == 1, -found % self.modulus, found)

    def logarithm(self, values: Array) -> tuple[Array, Array]:
        """x modulo q and s with (−1)^s · g^x = value; 0 for 0.

        Powers of g are the squares, and −1 is none, so that one of ±value is a power. Multiplied by
        g often enough, less than STRIDE times, it has an exponent that is a multiple of STRIDE.
        """
        modulus, q = self.modulus, (self.modulus - 1) // 2
        unique, places = np.unique(values.reshape(-1), return_inverse=True)
        if len(unique) > MOST_LOGARITHMS:
            raise NotEstablished(f"{len(unique)} logarithms")
        table, multiples = _strided_powers(modulus)
        is_negative = self.power(unique, q) == modulus - 1
        power = np.where(is_negative, modulus - unique, unique)
        exponents, open_ = np.zeros(len(unique), np.int64), np.flatnonzero(unique)
        steps, first = _powers(GENERATOR, STRIDE, modulus), 0
        while len(open_) and first < STRIDE:  # of few, many steps at a time
            some = steps[first : first + max(1, TOGETHER // len(open_))]
            tried = power[open_][:, None] * some % modulus
            at = np.searchsorted(table, tried).clip(0, len(table) - 1)
            hits = table[at] == tried
            is_hit, step = hits.any(1), hits.argmax(1)[:, None]
            found = multiples[np.take_along_axis(at, step, 1)] * STRIDE - first - step
            exponents[open_[is_hit]] = found[is_hit, 0] % q
            open_, first = open_[~is_hit], first + len(some)
        signs = is_negative.astype(np.int64)
        return exponents[places].reshape(values.shape), signs[places].reshape(values.shape)


# What ops do to residues of one lane. exp and log of the lane that has no law for them are keyed.
LANE: dict[str, Callable[..., Array]] = {
    "add": lambda f, x, y: (x + y) % f.modulus,
    "sub": lambda f, x, y: (x - y) % f.modulus,
    "neg": lambda f, x: -x % f.modulus,
    "mul": lambda f, x, y: x * y % f.modulus,
    "div": lambda f, x, y: x * f.inverse(y) % f.modulus,
    "rsqrt": lambda f, x: f.inverse(f.function("sqrt", x)),
    "mod": lambda f, x, y: (x - f.function("floordiv", x, y) * y) % f.modulus,
    "eq": lambda f, x, y: (1 - x - y + 2 * (x * y % f.modulus)) % f.modulus,  # of flags
    "lt": Lane.below,
    "le": lambda f, x, y: (1 - f.below(y, x)) % f.modulus,
    "where": Lane.choice,
    "sign": Lane.sign_of,
    "abs": lambda f, x: x * f.sign_of(x) % f.modulus,
    "max": lambda f, x, y: f.choice(f.below(x, y), y, x),
    "min": lambda f, x, y: f.choice(f.below(x, y), x, y),
    "not": lambda f, x: (1 - x) % f.modulus,
    "and": lambda f, x, y: x * y % f.modulus,
    "or": lambda f, x, y: (x + y - x * y % f.modulus) % f.modulus,
    "xor": lambda f, x, y: (x + y - 2 * (x * y % f.modulus)) % f.modulus,
    "shard_sum": lambda f, x: x * SHARDS % f.modulus,
}
for _name in "exp log sqrt sin cos tanh erf floor pow atan2 floordiv".split():
    LANE[_name] = lambda f, *xs, _name=_name: f.function(_name, *xs)


def _powers(base: int, count: int, modulus: int) -> Array:
    powers = np.ones(1, np.int64)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * pow(base, len(powers), modulus) % modulus])
    return powers


@lru_cache(maxsize=TABLES)
def _generator_powers(modulus: int) -> tuple[Array, Array]:
    """g^i for the low and g^(i · 2¹⁶) for the high half of an exponent's bits."""
    high = pow(GENERATOR, 2**16, modulus)
    return _powers(GENERATOR, 2**16, modulus), _powers(high, 2**15, modulus)


@lru_cache(maxsize=TABLES)
def _strided_powers(modulus: int) -> tuple[Array, Array]:
    """g^(STRIDE · i) for all i below 2¹⁹, sorted, and each one's i."""
    powers = _powers(pow(GENERATOR, STRIDE, modulus), 2**19, modulus)
    order = np.argsort(powers)
    return powers[order], order


def mix(x: Array) -> Array:
    """A bijection of 64-bit words that looks random (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4096)
def text_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
