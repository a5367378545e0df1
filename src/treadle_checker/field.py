"""Numbers with which equal formulas agree exactly and different ones almost never do.

A float stands for two residues, one modulo a prime q and one modulo p = 2q + 1. With g of order q
modulo p, exp(x) = g^x turns sums modulo q into products modulo p, and the discrete logarithm turns
them back; log keeps the sign of what it was taken of, which sums add and exp gives back. Any other
function has no laws: equal arguments, equal values. Each residue alone obeys the laws of the reals,
so that formulas are equal if they agree in one of them. Comparisons of floats are such functions of
the difference, and choices are arithmetic with them: both branches are seen. An infinity is a mark
beside the residues. Integers are integers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from treadle_checker.reading import NotEstablished, Rejected

Array = Any  # numpy.ndarray
Number = bool | int | float | Fraction

# Bits by name; kinds are what the names begin with.
DTYPES = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3": 8, "float8_e5m2": 8,
    "int64": 64, "int32": 32, "uint32": 32, "int8": 8, "uint8": 8, "bool": 1,
}  # fmt: skip
# p and (p − 1) / 2 are prime; a test checks that they are.
SAFE_PRIMES = (2147483579, 2147483123, 2147482763, 2147481563)
GENERATOR = 4  # a square other than 1, so of order q
MOST_OPERATIONS = 2**31  # of one comparison
MOST_LOGARITHMS = 2**14  # at once: each takes a thousand steps
FAR = 2**62  # beyond every residue: where infinities stand in the order


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def is_residue(dtype: str) -> bool:
    """Floats and flags are residues."""
    return is_float(dtype) or dtype == "bool"


def numpy_of(dtype: str) -> Any:
    return np.dtype(np.int64 if is_residue(dtype) else dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """Arrays of one shape, or that broadcast to one: many elements at a time."""

    q: Array
    p: Array
    sign: Array | None = None  # 1 where e to this is −g^q
    infinite: Array | None = None  # −1 or 1 where it is an infinity
    pieces: bool = False  # made by comparing: may be equal to others on some pieces
    slope: Element | None = None  # the derivative along a direction; None is 0

    def map(self, change: Callable[[Array], Array]) -> Element:
        """The same elements, moved."""
        p = change(self.p)
        q = p if self.q is self.p else change(self.q)
        sign, infinite = (None if a is None else change(a) for a in (self.sign, self.infinite))
        slope = self.slope and self.slope.map(change)
        return Element(q, p, sign, infinite, self.pieces, slope)

    def plain(self) -> Element:
        """Without its derivative."""
        return self if self.slope is None else replace(self, slope=None)


def chosen(condition: Array, x: Element, y: Element) -> Element:
    """x where a known condition holds, else y."""

    def part(a: Array | None, b: Array | None) -> Array | None:
        if a is None and b is None:
            return None
        found: Array = np.where(condition, _or_zero(a), _or_zero(b))
        return found if found.any() else None

    p = np.where(condition, x.p, y.p)
    q = p if x.q is x.p and y.q is y.p else np.where(condition, x.q, y.q)
    bits = part(x.sign, y.sign), part(x.infinite, y.infinite)
    slope = None
    if x.slope is not None or y.slope is not None:
        slope = chosen(condition, x.slope or _ZERO, y.slope or _ZERO)
    return Element(q, p, *bits, x.pieces or y.pieces, slope)


_ZERO = Element(np.zeros((), np.int64), np.zeros((), np.int64))


def _or_zero(a: Array | None) -> Array:
    return np.zeros((), np.int64) if a is None else a


def same(a: Element, b: Element) -> bool:
    """Equal infinities, and elsewhere equal modulo p, or modulo q with their signs."""
    (first, second), finite = (_or_zero(x.infinite) for x in (a, b)), np.array(True)
    if a.infinite is not None or b.infinite is not None:
        if not (first == second).all():
            return False
        finite = first == 0
    by_q = (a.q == b.q) & (_or_zero(a.sign) == _or_zero(b.sign))
    return bool(((a.p == b.p) | ~finite).all() or (by_q | ~finite).all())


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


# What ops do to residues of one lane. exp and log of the lane that has no law for them are keyed.
_LANE: dict[str, Callable[..., Array]] = {
    "add": lambda f, x, y: (x + y) % f.modulus,
    "sub": lambda f, x, y: (x - y) % f.modulus,
    "neg": lambda f, x: -x % f.modulus,
    "mul": lambda f, x, y: x * y % f.modulus,
    "div": lambda f, x, y: x * f.inverse(y) % f.modulus,
    "rsqrt": lambda f, x: f.inverse(f.function("sqrt", x)),
    "mod": lambda f, x, y: (x - f.function("floordiv", x, y) * y) % f.modulus,
    "eq": lambda f, x, y: (x == y).astype(np.int64),
    "lt": lambda f, x, y: f.below(x, y),
    "le": lambda f, x, y: (1 - f.below(y, x)) % f.modulus,
    "where": lambda f, c, x, y: f.choice(c, x, y),
    "sign": lambda f, x: f.sign_of(x),
    "abs": lambda f, x: x * f.sign_of(x) % f.modulus,
    "max": lambda f, x, y: f.choice(f.below(x, y), y, x),
    "min": lambda f, x, y: f.choice(f.below(x, y), x, y),
    "not": lambda f, x: (1 - x) % f.modulus,
    "and": lambda f, x, y: x * y % f.modulus,
    "or": lambda f, x, y: (x + y - x * y % f.modulus) % f.modulus,
    "xor": lambda f, x, y: (x + y - 2 * (x * y % f.modulus)) % f.modulus,
}
for _name in (
    "exp",
    "log",
    "sqrt",
    "sin",
    "cos",
    "tanh",
    "erf",
    "floor",
    "pow",
    "atan2",
    "floordiv",
):
    _LANE[_name] = lambda f, *xs, _name=_name: f.function(_name, *xs)

_INTEGER: dict[str, Callable[..., Array]] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "not": np.invert, "add": np.add,
    "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod,
    "max": np.maximum, "min": np.minimum, "eq": np.equal, "lt": np.less, "le": np.less_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "where": np.where,
}  # fmt: skip
_PIECES = frozenset(["lt", "le", "max", "min", "abs", "sign", "floor", "floordiv", "mod"])
ELEMENTWISE = frozenset([*_LANE, "cast", "shard_sum", "stop_gradient"])
SHARDS = 1_000_003  # the factor that stands for a sum over shards: linear, and not the identity


class Field:
    """The arithmetic of both lanes. `trial` chooses primes and keys.

    `ordered`: comparisons of floats are decided by the order of residues instead, as maxima over
    axes and sorts are. Without `has_logs` logarithms have no laws: discrete ones are slow.
    """

    def __init__(
        self,
        trial: int = 0,
        ordered: bool = False,
        has_logs: bool = True,
        limit: int = MOST_OPERATIONS,
    ):
        p = SAFE_PRIMES[trial % len(SAFE_PRIMES)]
        key = int(mix(np.array([trial + 1], np.uint64))[0])
        self.p, self.q = Lane(p, key), Lane((p - 1) // 2, key ^ 0x9E3779B97F4A7C15)
        self.ordered, self.has_logs = ordered, has_logs
        self.spent, self.limit = 0, limit

    def spend(self, operations: int) -> None:
        """Count what is computed: nobody waits longer than a limit says."""
        self.spent += operations
        if self.spent > self.limit:
            raise NotEstablished(f"it takes more than {self.limit:,} operations")

    def lanes(self, *xs: Element) -> list[tuple[Any, ...]]:
        return [(self.q, *(x.q for x in xs)), (self.p, *(x.p for x in xs))]

    def number(self, value: Number, dtype: str) -> Element:
        """A constant, as an array of no axes."""
        if not is_residue(dtype):
            found = np.array(int(value) % 2 ** DTYPES[dtype], np.uint64).astype(numpy_of(dtype))
            return Element(found, found)
        infinite = np.array(1 if value > 0 else -1) if _is_infinite(value) else None
        if dtype == "bool":
            value = bool(value)
        q, p = (np.array(f.number(value), np.int64) for f in (self.q, self.p))
        return Element(q, p, None, infinite)

    def array(self, array: Array, dtype: str) -> Element:
        """Floats or integers exactly: a float is a whole number times a power of two."""
        if not is_float(dtype):
            plain = array.astype(numpy_of(dtype))
            return Element(plain, plain)
        finite = np.isfinite(array)
        mantissa, exponent = np.frexp(np.where(finite, array, 0.0))
        digits = np.ldexp(mantissa, 53).astype(np.int64)
        lanes = []
        for f in (self.q, self.p):
            exact = digits % f.modulus * _powers_of_two(f.modulus)[exponent + 1147] % f.modulus
            special = [f.number(float(v)) for v in array[~finite]]
            exact[~finite] = special
            lanes.append(exact)
        infinite = np.where(np.isinf(array), np.sign(array), 0).astype(np.int64)
        return Element(lanes[0], lanes[1], None, infinite if infinite.any() else None)

    def integers(self, array: Array, dtype: str) -> Element:
        """Whole numbers as elements of any dtype."""
        if is_float(dtype):
            return Element(*(array.astype(np.int64) % f.modulus for f in (self.q, self.p)))
        plain = array.astype(numpy_of(dtype))
        return Element(plain, plain)

    def keyed(self, name: str, dtype: str, at: Array, most: int = 2**15) -> Element:
        """Generic elements by name and index: of integers half are edges, the rest below `most`."""
        key = np.uint64(text_key(name) ^ self.p.key)
        words = mix(at.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ key)
        low, high = (
            (words >> np.uint64(s) & np.uint64(2**30 - 1)).astype(np.int64) for s in (0, 32)
        )
        if is_float(dtype):
            return Element(low, high)
        if dtype == "bool":
            return Element(low & 1, low & 1)
        return self.integers(_integers_of(low, dtype, most), dtype)

    def apply(self, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str) -> Element:
        """An elementwise op on elements of the dtypes `given`; the result has `dtype`."""
        if op == "cast":
            return self.cast(xs[0], given[0], dtype)
        if op == "stop_gradient":
            return xs[0].plain()
        if op == "shard_sum":
            return self.apply("mul", [xs[0], self.number(SHARDS, dtype)], [dtype, dtype], dtype)
        self.spend(max(np.size(x.p) for x in xs))
        with np.errstate(all="ignore"):
            if not any(map(is_residue, given)) and not is_float(dtype):
                return self._on_integers(op, xs, dtype)
            if op == "where" and not is_residue(dtype):  # a generic flag's last bit
                found = np.where(xs[0].p & 1 == 1, xs[1].p, xs[2].p)
                return Element(found, found)
            if op not in _LANE:
                raise Rejected(f"{op} is not an elementwise op")
            if self.ordered and op in _ORDERED and is_float(given[0]):
                return _ORDERED[op](self, *xs)
            if op in _INFINITE and any(x.infinite is not None for x in xs):
                return _INFINITE[op](self, op, xs, given, dtype)
            return self._on_residues(op, xs, given, dtype)

    def _on_integers(self, op: str, xs: Sequence[Element], dtype: str) -> Element:
        if op not in _INTEGER:
            raise Rejected(f"{op} is not an op on integers")
        found = np.asarray(_INTEGER[op](*(x.p for x in xs))).astype(numpy_of(dtype))
        return Element(found, found)

    def _on_residues(
        self, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str
    ) -> Element:
        pieces = any(x.pieces for x in xs)
        if op == "eq" and pieces:
            return self._generic_equality(*xs)
        sign = None
        if op == "exp":
            q, p = self.q.function("exp", xs[0].q), self._exponential(xs[0])
        elif op == "log" and self.has_logs:
            q, sign = _logarithm(self.p, xs[0].p)
            p = self.p.function("log", xs[0].p)
        else:
            q, p = (_LANE[op](*arguments) for arguments in self.lanes(*xs))
        if op in ("add", "sub", "neg") and any(x.sign is not None for x in xs):
            sign = sum((_or_zero(x.sign) for x in xs), np.zeros(p.shape, np.int64)) & 1
        if op == "where" and any(x.sign is not None for x in xs[1:]):
            sign = np.where(xs[0].p != 0, _or_zero(xs[1].sign), _or_zero(xs[2].sign))
        made = op in _PIECES and any(map(is_float, given))
        return Element(q, p, sign, None, pieces or made)

    def _generic_equality(self, x: Element, y: Element) -> Element:
        """Of values with pieces: known only where they are equal on all of them."""
        lanes = []
        for f, a, b in self.lanes(x, y):
            apart = np.minimum((a - b) % f.modulus, (b - a) % f.modulus)
            lanes.append(np.where(apart == 0, 1, f.function("eq", apart)))
        return Element(lanes[0], lanes[1], pieces=True)

    def _exponential(self, x: Element) -> Array:
        low, high = _generator_powers(self.p.modulus)
        found = low[x.q & 0xFFFF] * high[x.q >> 16] % self.p.modulus
        return found if x.sign is None else np.where(x.sign == 1, -found % self.p.modulus, found)

    def cast(self, x: Element, source: str, target: str) -> Element:
        """Between floats nothing changes. To an integer a float is keyed: fields do not round."""
        if source == target or (is_float(source) and is_float(target)):
            return x
        x = x.plain()
        if target == "bool":
            flags = np.isin(x.p, (0, 1))
            if not is_residue(source):
                return self.integers(x.p != 0, "bool")
            q, p = (np.where(flags, a, f.function("to bool", a)) for f, a in self.lanes(x))
            return Element(q, p, pieces=x.pieces)
        if is_float(target):
            q, p = (a.astype(np.int64) % f.modulus for f, a in self.lanes(x))
            return Element(q, p, pieces=x.pieces)
        known = not is_residue(source) or bool(np.isin(x.p, (0, 1)).all())
        plain = (x.p if known else self.p.function("cast", x.p)).astype(numpy_of(target))
        return Element(plain, plain)

    def order(self, x: Element, dtype: str) -> Array:
        """Integers by which maxima over axes choose: residues around zero, infinities outside."""
        half = self.p.modulus // 2
        order = (
            np.where(x.p > half, x.p - self.p.modulus, x.p)
            if is_residue(dtype)
            else x.p.astype(np.int64)
        )
        return order if x.infinite is None else np.where(x.infinite == 0, order, x.infinite * FAR)

    def total(self, x: Element, dtype: str, axis: int | tuple[int, ...] = -1) -> Element:
        """Sums along an axis, of fewer than 2³² terms. All arrays have the shape of p."""
        if not is_residue(dtype):
            found = np.sum(x.p, axis=axis, dtype=x.p.dtype)
            return Element(found, found)
        q, p = (np.sum(a, axis=axis) % f.modulus for f, a in self.lanes(x))
        sign, infinite = x.sign, x.infinite
        if sign is not None:
            sign = np.sum(np.broadcast_to(sign, x.p.shape), axis=axis) & 1
        if infinite is not None:
            infinite = np.sign(np.sum(np.broadcast_to(infinite, x.p.shape), axis=axis))
        slope = x.slope and self.total(x.slope, dtype, axis)
        return Element(q, p, sign, infinite, x.pieces, slope)

    def combined(self, op: str, x: Element, y: Element, dtype: str) -> Element:
        """Two accumulators as one; maxima choose by the order, as those over axes do."""
        if op in ("add", "mul"):
            return self.apply(op, [x, y], [dtype, dtype], dtype)
        first, second = self.order(x, dtype), self.order(y, dtype)
        return chosen(first >= second if op == "max" else first <= second, x, y)

    def matmul(self, x: Element, y: Element) -> Element:
        """Products of matrices of floats, without infinities."""
        self.spend(x.p.size * y.p.shape[-1] // 16)
        q, p = (f.matmul(a, b) for f, a, b in self.lanes(x, y))
        return Element(q, p, pieces=x.pieces or y.pieces)


def _is_infinite(value: Number) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _integers_of(bits: Array, dtype: str, most: int) -> Array:
    """Half are edges (of indices, from the end too, and what losses ignore); a quarter is small."""
    width, signed = DTYPES[dtype], not dtype.startswith("uint")
    high = max(1, min(most, 2 ** (width - signed) - 1))
    edges = np.array([0, -100, 1, -1, -high, high - 1, high] if signed else [0, 1, high - 1])
    rest = np.where(bits % 4 == 1, bits // 16 % 4, bits // 16 % high)
    return np.where(bits % 4 >= 2, edges[bits // 4 % len(edges)], rest)


# Comparisons that are decided by the order.


def _decided(holds: Callable[[Array, Array], Array]) -> Callable[..., Element]:
    def entry(field: Field, x: Element, y: Element) -> Element:
        found = holds(field.order(x, "float32"), field.order(y, "float32")).astype(np.int64)
        return Element(found, found)

    return entry


_ORDERED: dict[str, Callable[..., Element]] = {
    "lt": _decided(np.less),
    "le": _decided(np.less_equal),
    "eq": _decided(np.equal),
    "max": lambda field, x, y: field.combined("max", x, y, "float32"),
    "min": lambda field, x, y: field.combined("min", x, y, "float32"),
}


# Ops that know infinities. Factors of one are scales, so positive.


def _sums(
    field: Field, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str
) -> Element:
    a, b = (
        _or_zero(xs[0].infinite),
        _or_zero(xs[1].infinite) if len(xs) > 1 else np.zeros((), np.int64),
    )
    total = {"sub": a - b, "neg": -a}.get(op, a + b)
    return _marked(field._on_residues(op, xs, given, dtype), np.sign(total))


def _exp(field: Field, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str) -> Element:
    """exp(−∞) = 0."""
    infinite = _or_zero(xs[0].infinite)
    found = chosen(infinite < 0, field.number(0, dtype), field._on_residues(op, xs, given, dtype))
    return _marked(found, np.maximum(infinite, 0))


def _extreme(
    field: Field, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str
) -> Element:
    wins = 1 if op == "max" else -1
    a, b = (_or_zero(x.infinite) * wins for x in xs)
    finite = field._on_residues(op, xs, given, dtype)
    return _marked(chosen(a > b, xs[0], chosen(b > a, xs[1], finite)), np.maximum(a, b) * wins)


def _where(
    field: Field, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str
) -> Element:
    """A known condition chooses; a generic one makes a generic element of an infinity."""
    a, b = (_or_zero(x.infinite) for x in xs[1:])
    taken = np.where(xs[0].p == 1, a, np.where(xs[0].p == 0, b, 0))
    return _marked(field._on_residues(op, xs, given, dtype), taken)


def _compares(
    field: Field, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str
) -> Element:
    a, b = (_or_zero(x.infinite) for x in xs)
    known = {"eq": a == b, "lt": a < b, "le": a <= b}[op].astype(np.int64)
    finite = field._on_residues(op, xs, given, dtype)
    return replace(chosen((a != 0) | (b != 0), Element(known, known), finite), infinite=None)


_INFINITE: dict[str, Callable[..., Element]] = {
    "add": _sums, "sub": _sums, "neg": _sums, "mul": _sums, "div": _sums, "exp": _exp,
    "max": _extreme, "min": _extreme, "where": _where, "eq": _compares, "lt": _compares,
    "le": _compares,
}  # fmt: skip


def _marked(x: Element, infinite: Array) -> Element:
    return replace(x, infinite=infinite if infinite.any() else None)


# Exponentials and logarithms.


@lru_cache(maxsize=len(SAFE_PRIMES))
def _generator_powers(modulus: int) -> tuple[Array, Array]:
    """g^i for the low and g^(i · 2¹⁶) for the high half of an exponent's bits."""
    high = pow(GENERATOR, 2**16, modulus)
    return _powers(GENERATOR, 2**16, modulus), _powers(high, 2**15, modulus)


def _powers(base: int, count: int, modulus: int) -> Array:
    powers = np.ones(1, np.int64)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * pow(base, len(powers), modulus) % modulus])
    return powers


@lru_cache(maxsize=2 * len(SAFE_PRIMES))
def _powers_of_two(modulus: int) -> Array:
    return np.array([pow(2, i - 1200, modulus) for i in range(2400)], np.int64)


@lru_cache(maxsize=2)
def _baby_steps(modulus: int) -> tuple[Array, Array]:
    """g^0 … g^(2²⁰ − 1) in order of their value, and the exponents in that order."""
    powers = _powers(GENERATOR, 2**20, modulus)
    order = np.argsort(powers)
    return powers[order], order


def _logarithm(lane: Lane, values: Array) -> tuple[Array, Array]:
    """The x modulo q with g^x = ±value, and 1 where it is −value; 0 for 0."""
    modulus, order = lane.modulus, (lane.modulus - 1) // 2
    unique, places = np.unique(values.reshape(-1), return_inverse=True)
    if len(unique) > MOST_LOGARITHMS:
        raise NotEstablished(f"{len(unique)} logarithms")
    sorted_powers, exponents = _baby_steps(modulus)
    giant, found = pow(GENERATOR, -len(exponents), modulus), np.zeros(len(unique), np.int64)
    squares = unique * unique % modulus  # powers of g, all of them
    left = np.flatnonzero(squares)
    current = squares[left]
    for step in range(-(-order // len(exponents))):
        at = np.minimum(np.searchsorted(sorted_powers, current), len(exponents) - 1)
        hit = sorted_powers[at] == current
        found[left[hit]] = (step * len(exponents) + exponents[at[hit]]) % order
        left, current = left[~hit], current[~hit] * giant % modulus
        if not len(left):
            break
    halved = found * pow(2, -1, order) % order
    negative = (lane.power(unique, order) == modulus - 1).astype(np.int64)  # not a square
    return halved[places].reshape(values.shape), negative[places].reshape(values.shape)


# Keys.


def mix(x: Array) -> Array:
    """A bijection of 64-bit words that looks random (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4096)
def text_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
