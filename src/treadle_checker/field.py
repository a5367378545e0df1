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

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treadle_checker import randomness
from treadle_checker.budget import Budget
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.residues import LANE, Lane, Number, mix, text_key

Array = Any  # numpy.ndarray

# Bits by name; kinds are what the names begin with.
DTYPES = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3": 8, "float8_e5m2": 8,
    "int64": 64, "int32": 32, "uint32": 32, "int8": 8, "uint8": 8, "bool": 1,
}  # fmt: skip
SMALL = 2**18  # differences below it in both lanes are whole numbers
FAR = 2**62  # beyond every residue: where infinities stand in the order
NONE = np.zeros((), np.int64)


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

    def map(self, change: Callable[[Array], Array]) -> Element:
        """The same elements, moved."""
        return merged(lambda parts: change(parts[0]), [self])

    def spread(self, shape: tuple[int, ...]) -> Element:
        return self.map(lambda a: np.broadcast_to(a, shape))


def merged(make: Callable[[list[Array]], Array], xs: Sequence[Element]) -> Element:
    """One element of several: their residues, signs and infinities, each by one rule."""

    def part(name: str) -> Array | None:
        every = [getattr(x, name) for x in xs]
        if all(a is None for a in every):
            return None
        pairs = zip(every, xs, strict=True)
        found = make([np.broadcast_to(_or_zero(a), x.p.shape) for a, x in pairs])
        return found if found.any() else None

    p = make([x.p for x in xs])
    q = p if all(x.q is x.p for x in xs) else make([x.q for x in xs])
    return Element(q, p, part("sign"), part("infinite"))


def chosen(condition: Array, x: Element, y: Element) -> Element:
    """x where a known condition holds, else y."""
    return merged(lambda parts: np.where(condition, *parts), [x, y])


def joined(xs: Sequence[Element]) -> Element:
    """One after another along the first axis."""
    return merged(np.concatenate, xs)


def plain(array: Array) -> Element:
    """Whole numbers, or flags."""
    return Element(array, array)


def _or_zero(a: Array | None) -> Array:
    return NONE if a is None else a


def same(a: Element, b: Element) -> bool:
    """Equal infinities, and elsewhere equal modulo p, or modulo q with their signs."""
    first, second = _or_zero(a.infinite), _or_zero(b.infinite)
    if not np.equal(first, second).all():
        return False
    by_q = (a.q == b.q) & (_or_zero(a.sign) == _or_zero(b.sign))
    return bool(((a.p == b.p) | (first != 0)).all() or (by_q | (first != 0)).all())


def is_zero(x: Element) -> bool:
    """Whether all elements are 0."""
    return x.infinite is None and not (x.p.any() or x.q.any())


_INTEGER: dict[str, Callable[..., Array]] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "not": np.invert, "add": np.add,
    "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod,
    "max": np.maximum, "min": np.minimum, "eq": np.equal, "lt": np.less, "le": np.less_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "where": np.where,
}  # fmt: skip
_KNOW_INFINITIES = frozenset("add sub neg mul div exp max min where eq lt le".split())
ELEMENTWISE = frozenset([*LANE, "cast", "stop_gradient"])
# Operations for one element: powers to a prime of 31 bits, hashes, and a search.
COSTS = {
    "div": 32, "rsqrt": 36, **dict.fromkeys("lt le max min abs sign mod floordiv".split(), 8),
    **dict.fromkeys("exp log sqrt sin cos tanh erf floor pow atan2".split(), 4),
}  # fmt: skip
LOGARITHM = 2**13


class Field:
    """The arithmetic of both lanes. Each `trial` has primes and keys of its own.

    `ordered`: comparisons of floats are decided by the order of residues instead, as maxima over
    axes and sorts are. Without `has_logs` logarithms have no laws: discrete ones are slow.
    """

    def __init__(
        self,
        trial: int = 0,
        ordered: bool = False,
        has_logs: bool = True,
        budget: Budget | None = None,
    ):
        p, key = randomness.safe_prime(trial), randomness.key(trial)
        self.p, self.q = Lane(p, key), Lane((p - 1) // 2, key ^ 0x9E3779B97F4A7C15)
        self.ordered, self.has_logs = ordered, has_logs
        self.budget = budget or Budget()
        self.costs = {**COSTS, "log": LOGARITHM} if has_logs else COSTS

    def lanes(self, *xs: Element) -> list[tuple[Any, ...]]:
        return [(self.q, *(x.q for x in xs)), (self.p, *(x.p for x in xs))]

    # Numbers

    def number(self, value: Number, dtype: str) -> Element:
        """A constant, as an array of no axes."""
        if not is_residue(dtype):
            wrapped = np.array(int(value) % 2 ** DTYPES[dtype], np.uint64)
            return plain(wrapped.astype(numpy_of(dtype)))
        is_infinite = isinstance(value, float) and math.isinf(value)
        infinite = np.array(1 if value > 0 else -1) if is_infinite else None
        value = bool(value) if dtype == "bool" else value
        q, p = (np.array(f.number(value), np.int64) for f in (self.q, self.p))
        return Element(q, p, None, infinite)

    def nothing(self, op: str, dtype: str) -> Element:
        """What an accumulator begins with."""
        value = {"add": 0, "mul": 1, "max": -math.inf, "min": math.inf}[op]
        if math.isinf(value) and not is_residue(dtype):
            ends = np.iinfo(numpy_of(dtype))
            value = int(ends.min if op == "max" else ends.max)
        return self.number(value, dtype)

    def array(self, array: Array, dtype: str) -> Element:
        """Floats or integers exactly."""
        if not is_float(dtype):
            return plain(array.astype(numpy_of(dtype)))
        values, places = np.unique(array, return_inverse=True)
        found = merged(np.stack, [self.number(v, dtype) for v in values.tolist()])
        return found.map(lambda a: a[places])

    def integers(self, array: Array, dtype: str) -> Element:
        """Whole numbers as elements of any dtype."""
        if is_float(dtype):
            return Element(*(array.astype(np.int64) % f.modulus for f in (self.q, self.p)))
        return plain(array.astype(numpy_of(dtype)))

    def keyed(self, name: str, dtype: str, at: Array, most: int = 2**15) -> Element:
        """Generic elements by name and index: of integers half are edges, the rest below `most`."""
        key = np.uint64(text_key(name) ^ self.p.key)
        words = mix(at.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ key)
        halves = (words >> np.uint64(s) & np.uint64(2**30 - 1) for s in (0, 32))
        low, high = (a.astype(np.int64) for a in halves)
        if is_float(dtype):
            return Element(low, high)
        if dtype == "bool":
            return plain(low & 1)
        return self.integers(_integers_of(low, dtype, most), dtype)

    # Ops

    def apply(self, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str) -> Element:
        """An elementwise op on elements of the dtypes `given`."""
        if op == "cast":
            return self._cast(xs[0], given[0], dtype)
        if op == "stop_gradient":
            return xs[0]
        self.budget.spend(self.costs.get(op, 1) * max(np.size(x.p) for x in xs))
        with np.errstate(all="ignore"):
            if not any(map(is_residue, given)) and not is_float(dtype):
                if op not in _INTEGER:
                    raise Rejected(f"{op} is not an op on integers")
                found = _INTEGER[op](*(x.p for x in xs))
                return plain(np.asarray(found).astype(numpy_of(dtype)))
            if op == "where" and not is_residue(dtype):  # a generic flag's last bit
                return plain(np.where(xs[0].p & 1 == 1, xs[1].p, xs[2].p))
            if op not in LANE:
                raise Rejected(f"{op} is not an elementwise op")
            if self.ordered and is_float(given[0]) and op in ("lt", "le", "eq", "max", "min"):
                return self._ordered(op, *xs)
            if op in _KNOW_INFINITIES and any(x.infinite is not None for x in xs):
                return self._with_infinities(op, xs, given, dtype)
            return self._on_residues(op, xs, given)

    def _on_residues(self, op: str, xs: Sequence[Element], given: Sequence[str]) -> Element:
        if op == "eq" and is_float(given[0]):
            return self._equality(*xs)
        sign = None
        if op == "exp":
            q, p = self.q.function("exp", xs[0].q), self.p.exponential(xs[0].q, xs[0].sign)
        elif op == "log" and self.has_logs:
            q, sign = self.p.logarithm(xs[0].p)
            p = self.p.function("log", xs[0].p)
        else:
            q, p = (LANE[op](*arguments) for arguments in self.lanes(*xs))
        if op in ("add", "sub", "neg") and any(x.sign is not None for x in xs):
            sign = sum((_or_zero(x.sign) for x in xs), np.zeros(p.shape, np.int64)) & 1
        if op == "where" and any(x.sign is not None for x in xs[1:]):
            sign = np.where(xs[0].p != 0, _or_zero(xs[1].sign), _or_zero(xs[2].sign))
        return Element(q, p, sign)

    def _equality(self, x: Element, y: Element) -> Element:
        """Known where both are the same, and of whole numbers; else a generic flag, so that what
        follows holds whether both are equal or not."""
        apart = [
            np.minimum((a - b) % f.modulus, (b - a) % f.modulus) for f, a, b in self.lanes(x, y)
        ]
        is_known = (apart[0] == apart[1]) & (apart[0] < SMALL)
        lanes = [
            np.where(is_known, d == 0, np.where(d == 0, 1, f.function("eq", d)))
            for f, d in zip((self.q, self.p), apart, strict=True)
        ]
        return Element(lanes[0], lanes[1])

    def _ordered(self, op: str, x: Element, y: Element) -> Element:
        """Comparisons that are decided by the order."""
        if op in ("max", "min"):
            return self.combined(op, x, y, "float32")
        holds = {"lt": np.less, "le": np.less_equal, "eq": np.equal}[op]
        return plain(holds(self.order(x, "float32"), self.order(y, "float32")).astype(np.int64))

    def _with_infinities(
        self, op: str, xs: Sequence[Element], given: Sequence[str], dtype: str
    ) -> Element:
        """Factors of an infinity are scales, so positive; exp(−∞) = 0."""
        finite = self._on_residues(op, xs, given)
        a, b = [*(_or_zero(x.infinite) for x in xs[-2:]), NONE][:2]
        if op in ("eq", "lt", "le"):
            known = {"eq": a == b, "lt": a < b, "le": a <= b}[op].astype(np.int64)
            return replace(chosen((a != 0) | (b != 0), plain(known), finite), infinite=None)
        infinite = np.sign({"sub": a - b, "neg": -a}.get(op, a + b))
        if op == "exp":
            finite, infinite = chosen(a < 0, self.number(0, dtype), finite), np.maximum(a, 0)
        elif op in ("max", "min"):
            first, second = (a > b, b > a) if op == "max" else (a < b, b < a)
            finite = chosen(first, xs[0], chosen(second, xs[1], finite))
            infinite = np.maximum(a, b) if op == "max" else np.minimum(a, b)
        elif op == "where":  # a generic condition makes a generic element of an infinity
            infinite = np.where(xs[0].p == 1, a, np.where(xs[0].p == 0, b, 0))
        return replace(finite, infinite=infinite if infinite.any() else None)

    def _cast(self, x: Element, source: str, target: str) -> Element:
        """Between floats nothing changes. To an integer a float is keyed: fields do not round."""
        if source == target or (is_float(source) and is_float(target)):
            return x
        if target == "bool" and not is_residue(source):
            return self.integers(x.p != 0, "bool")
        if target == "bool":
            flags = np.isin(x.p, (0, 1))
            q, p = (np.where(flags, a, f.function("to bool", a)) for f, a in self.lanes(x))
            return Element(q, p)
        if is_float(target):
            q, p = (a.astype(np.int64) % f.modulus for f, a in self.lanes(x))
            return Element(q, p)
        known = not is_residue(source) or bool(np.isin(x.p, (0, 1)).all())
        return plain((x.p if known else self.p.function("cast", x.p)).astype(numpy_of(target)))

    # Orders, sums and products

    def order(self, x: Element, dtype: str) -> Array:
        """Integers by which maxima over axes choose: residues around zero, infinities outside."""
        order = x.p.astype(np.int64)
        if is_residue(dtype):
            order = np.where(order > self.p.modulus // 2, order - self.p.modulus, order)
        return order if x.infinite is None else np.where(x.infinite == 0, order, x.infinite * FAR)

    def combined(self, op: str, x: Element, y: Element, dtype: str) -> Element:
        """Two accumulators as one; maxima choose by the order, as those over axes do."""
        if op in ("add", "mul"):
            return self.apply(op, [x, y], [dtype, dtype], dtype)
        first, second = self.order(x, dtype), self.order(y, dtype)
        return chosen(first >= second if op == "max" else first <= second, x, y)

    def reduced(self, op: str, x: Element, dtype: str) -> Element:
        """One reduction over the first axis, of fewer than 2³² terms."""
        if op in ("max", "min"):
            order = self.order(x, dtype)
            place = (order.argmax(0) if op == "max" else order.argmin(0))[None]
            return x.map(lambda a: np.take_along_axis(a, place, 0)[0])
        if op == "add":
            return self._total(x, dtype)
        while (n := len(x.p)) > 1:  # pairs are multiplied
            parts = [slice(0, n // 2), slice(n // 2, n // 2 * 2), slice(n // 2 * 2, n)]
            first, second, rest = (x.map(operator.itemgetter(part)) for part in parts)
            x = joined([self.combined(op, first, second, dtype), rest])
        return x.map(lambda a: a[0])

    def _total(self, x: Element, dtype: str) -> Element:
        if not is_residue(dtype):
            return plain(np.sum(x.p, axis=0, dtype=x.p.dtype))
        q, p = (np.sum(a, axis=0) % f.modulus for f, a in self.lanes(x))
        sign, infinite = (
            None if a is None else np.broadcast_to(a, x.p.shape).sum(0)
            for a in (x.sign, x.infinite)
        )
        sign = None if sign is None else sign & 1
        infinite = None if infinite is None else np.sign(infinite)
        return Element(q, p, sign, infinite)

    def scattered(self, x: Element, places: Array, onto: Element, dtype: str) -> Element:
        """Elements added to others, each to the one at its place."""
        if x.infinite is not None or onto.infinite is not None:
            raise NotEstablished("a sum of infinities")
        self.budget.spend(4 * len(places))
        lanes = []
        for f, a, b in self.lanes(x, onto):
            total = b.copy()
            np.add.at(total, places, a.reshape(-1))
            lanes.append(total % f.modulus if is_residue(dtype) else total)
        return Element(lanes[0], lanes[1])

    def matmul(self, x: Element, y: Element) -> Element:
        """Products of matrices of floats, without infinities."""
        rows, columns = x.p.shape[0], y.p.shape[-1]
        self.budget.spend(x.p.size * columns // 16 + x.p.size + y.p.size + 4 * rows * columns)
        q, p = (f.matmul(a, b) for f, a, b in self.lanes(x, y))
        return Element(q, p)


def _integers_of(bits: Array, dtype: str, most: int) -> Array:
    """Half are edges (of indices, from the end too, and what losses ignore); a quarter is small."""
    width, signed = DTYPES[dtype], not dtype.startswith("uint")
    high = max(1, min(most, 2 ** (width - signed) - 1))
    edges = np.array([0, -100, 1, -1, -high, high - 1, high] if signed else [0, 1, high - 1])
    rest = np.where(bits % 4 == 1, bits // 16 % 4, bits // 16 % high)
    return np.where(bits % 4 >= 2, edges[bits // 4 % len(edges)], rest)
