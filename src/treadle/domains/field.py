"""Finite fields: exact equality of graphs, with a failure probability that can be computed.

Every value is a pair of residues, one modulo q and one modulo p = 2q + 1. Then g of order q makes
exp(x) = g^x a true homomorphism from the q-lane into the p-lane, and the discrete logarithm to that
base a true homomorphism back. Every y is g^a or −g^a; log y keeps that sign as a bit that sums add
and exp gives back, so that exp(log y) = y. Where a lane has no homomorphism the function is keyed
and uninterpreted: equal inputs, equal outputs, nothing more.

Comparisons of floats give keyed elements of their difference, and flags are arithmetic:
where(c, x, y) is y + c (x − y), max(x, y) is where(x < y, y, x). So a difference in either branch
shows. Only what must name an element (argmax, sort, top_k, maxima over axes) takes an order, that
of the p-lane's residues around zero: two graphs that choose differently only for some orders need
several trials to be told apart. Infinities and NaN are generic constants. `cast` between floats is
the identity.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.domains.domain import Typed, evaluate
from treadle.domains.float64 import MEANING, Array, carrier
from treadle.ir.graph import Graph
from treadle.ir.literal import ArrayLiteral, Number
from treadle.ir.op import Attributes, Op, RuleTable, Types
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.indexing import GATHER
from treadle.ir.ops.leaves import Constant
from treadle.ir.ops.linear import WINDOW
from treadle.ir.ops.reductions import CUMSUM, REDUCE_SUM, SHARD_SUM
from treadle.ir.ops.shaping import BROADCAST, CONCAT, FLIP, PAD, PERMUTE, RESHAPE, SLICE, Pad
from treadle.ir.types import TensorType

# The largest p below 2³¹ with p and (p − 1) / 2 prime; a test checks that they are.
SAFE_PRIMES = (2147483579, 2147483123, 2147482763, 2147481563, 2147481143, 2147480927, 2147480327)


@dataclass(frozen=True, slots=True, eq=False)
class Residues:
    """One value in both lanes. Integers are plain arrays there; flags are residues.

    `sign` is the bit of −1 in e to this value; None where it is 0 everywhere.
    """

    q: Array
    p: Array
    sign: Array | None = None
    # Made by a comparison: a generic element may stand for what is constant on pieces.
    is_piecewise: bool = field(default=False, kw_only=True)
    # An infinity or NaN: no other value equals it.
    is_special: bool = field(default=False, kw_only=True)


class Lane:
    """Arithmetic modulo one prime below 2³¹, in int64."""

    def __init__(self, modulus: int, key: int):
        self.modulus = modulus
        self.key = key

    def symmetric(self, x: Array) -> Array:
        """Residues as integers around zero: the order of the lane."""
        return np.where(x > self.modulus // 2, x - self.modulus, x)

    def reduce(self, x: Array) -> Array:
        return np.mod(x, self.modulus)

    def power(self, x: Array, exponent: int) -> Array:
        result, square = np.ones_like(x), x
        while exponent:
            if exponent & 1:
                result = result * square % self.modulus
            square = square * square % self.modulus
            exponent >>= 1
        return result

    def inverse(self, x: Array) -> Array:
        """1 / x, and 0 for 0."""
        return self.power(x, self.modulus - 2)

    def number(self, value: Number) -> int:
        """A constant exactly: every finite number is a fraction."""
        if isinstance(value, float) and not math.isfinite(value):
            return int(self.uninterpreted(f"constant {value!r}", np.zeros(1, np.int64))[0])
        exact = Fraction(value)
        return exact.numerator * pow(exact.denominator, -1, self.modulus) % self.modulus

    def array(self, array: Array) -> Array:
        """Floats exactly: mantissa times a power of two."""
        values = array.astype(np.float64)
        mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
        digits = self.reduce(np.ldexp(mantissa, 53).astype(np.int64))
        powers = self._powers_of_two[exponent - 53 + 1200]
        exact = digits * powers % self.modulus
        special = np.vectorize(lambda v: self.number(float(v)), otypes=[np.int64])
        return (
            exact
            if np.isfinite(values).all()
            else np.where(np.isfinite(values), exact, special(values))
        )

    @cached_property
    def _powers_of_two(self) -> Array:
        return np.array([pow(2, i, self.modulus) for i in range(-1200, 1200)], np.int64)

    def uninterpreted(self, name: str, *operands: Array) -> Array:
        """A keyed function of residues that satisfies no equations but congruence."""
        state: Array = np.array(_text_key(name) ^ self.key, np.uint64)
        for x in operands:
            state = _mix(_mix(x.astype(np.uint64)) ^ state)
        return (state % np.uint64(self.modulus)).astype(np.int64)

    def matmul(self, x: Array, y: Array) -> Array:
        """Exact batched products: 16-bit limbs in float64, so that BLAS does the work."""
        assert x.shape[-1] <= 2**20, "sums of limb products must stay below 2⁵³"
        low_x, high_x = (x & 0xFFFF).astype(np.float64), (x >> 16).astype(np.float64)
        low_y, high_y = (y & 0xFFFF).astype(np.float64), (y >> 16).astype(np.float64)

        def product(a: Array, b: Array) -> Array:
            return self.reduce(np.matmul(a, b).astype(np.int64))

        middle = product(low_x, high_y) + product(high_x, low_y)
        high = self.reduce(product(high_x, high_y) * 2**16 + middle)
        return self.reduce(high * 2**16 + product(low_x, low_y))


# Ops through which the sign bit of exponents travels: sums and moves.
ADDITIVE = frozenset(
    [
        e.ADD,
        e.SUB,
        e.NEG,
        e.WHERE,
        e.STOP_GRADIENT,
        SHARD_SUM,
        REDUCE_SUM,
        CUMSUM,
        RESHAPE,
        PERMUTE,
        BROADCAST,
        SLICE,
        PAD,
        CONCAT,
        FLIP,
        GATHER,
        WINDOW,
    ]
)

# Ops that compare floats, and so make values that are constant on pieces.
PIECEWISE = frozenset([e.LT, e.LE, e.MAX, e.MIN, e.ABS, e.SIGN, e.FLOOR, e.FLOORDIV, e.MOD])

# The meaning of primitives on residues; the lane comes first.
RESIDUE: RuleTable[Callable[..., Any]] = RuleTable("residue meaning")
# The same for ops that compare: the field comes first, and values have both lanes.
ORDER: RuleTable[Callable[..., tuple[Residues, ...]]] = RuleTable("residue order")


class FiniteField:
    """Graphs over pairs of residues. `trial` chooses the primes and the keys."""

    keeps: frozenset[Op] = frozenset()

    def __init__(self, trial: int = 0):
        modulus = SAFE_PRIMES[trial % len(SAFE_PRIMES)]
        key = int(_mix(np.array([trial + 1], np.uint64))[0])
        self.lane_p = Lane(modulus, key)
        self.lane_q = Lane((modulus - 1) // 2, key ^ 0x9E3779B97F4A7C15)
        self.trial = trial

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[Residues]], types: Types
    ) -> Sequence[Residues]:
        found = self._apply(op, attributes, operands, types)
        makes_pieces = op in PIECEWISE and any(o.type.is_float for o in operands)
        if not (makes_pieces or any(o.value.is_piecewise for o in operands)):
            return found
        return [replace(r, is_piecewise=True) for r in found]

    def _apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[Residues]], types: Types
    ) -> Sequence[Residues]:
        if isinstance(attributes, Constant) and _is_special(attributes.value):
            lanes = (literal(lane, attributes.value, types[0].shape) for lane in self.lanes)
            return [Residues(*lanes, is_special=True)]
        is_known = any(o.value.is_special for o in operands)
        if op is e.EQ and not is_known and any(o.value.is_piecewise for o in operands):
            return [self._generic_equality(*(o.value for o in operands))]
        if (
            op in ORDER
            and _is_residue(operands[0].type)
            and not (op is e.CAST and _is_residue(types[0]))
        ):
            given = (attributes,) if op.has_attributes else ()
            return ORDER[op](self, *given, *(o.value for o in operands))
        q = self._apply_lane(
            self.lane_q, op, attributes, [(o.type, o.value.q) for o in operands], types
        )
        p = self._apply_lane(
            self.lane_p, op, attributes, [(o.type, o.value.p) for o in operands], types
        )
        if op is e.EXP:
            p = [exponential(self.lane_p, operands[0].value)]
        elif op is e.LOG:
            exponents, sign = logarithm(self.lane_p, operands[0].value.p)
            return [Residues(exponents, p[0], sign)]
        signs = self._signs(op, attributes, operands, types)
        return [Residues(*lanes) for lanes in zip(q, p, signs, strict=True)]

    def _signs(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[Residues]], types: Types
    ) -> Sequence[Array | None]:
        """Sums and moves of logarithms keep track of the sign; products have none."""
        if op not in ADDITIVE or all(o.value.sign is None for o in operands):
            return [None] * len(types)
        arrays = [
            (np.zeros(o.type.shape, np.int64) if o.value.sign is None else o.value.sign)
            if o.type.is_float
            else o.value.p
            for o in operands
        ]
        if op is PAD:
            assert isinstance(attributes, Pad)
            attributes = Pad(attributes.low, attributes.high, attributes.interior, 0)
        found = MEANING[op](attributes, *arrays) if op.has_attributes else MEANING[op](*arrays)
        return [np.asarray(found) & 1]

    def _apply_lane(
        self,
        lane: Lane,
        op: Op,
        attributes: Attributes,
        operands: list[tuple[TensorType, Array]],
        types: Types,
    ) -> list[Array]:
        arrays = [a for _, a in operands]
        given = (attributes,) if op.has_attributes else ()
        is_integer = not any(_is_residue(t) for t, _ in operands) and not any(
            t.is_float for t in types
        )
        if op is e.WHERE and not _is_residue(types[0]):
            # A choice between integers by a generic flag takes the flag's last bit.
            arrays[0], is_integer = arrays[0] & 1 == 1, True
        with np.errstate(all="ignore"):
            if is_integer:
                found = MEANING[op](*given, *arrays)
            else:
                found = RESIDUE[op](lane, *given, *arrays)
        results = found if isinstance(found, tuple) else (found,)
        return [
            np.asarray(r, np.int64 if _is_residue(t) else carrier(t.dtype))
            for r, t in zip(results, types, strict=True)
        ]

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.lane_q, self.lane_p

    def _generic_equality(self, x: Residues, y: Residues) -> Residues:
        """Values with pieces may be equal on some of them: known only where they always are."""
        lanes = []
        for lane, a, b in ((self.lane_q, x.q, y.q), (self.lane_p, x.p, y.p)):
            apart = np.minimum(lane.reduce(a - b), lane.reduce(b - a))
            lanes.append(np.where(apart == 0, 1, lane.uninterpreted(e.EQ.name, apart)))
        return Residues(*lanes)

    def order(self, x: Residues) -> Array:
        """The integers by which values are compared."""
        return self.lane_p.symmetric(x.p)

    def lift(self, array: object, type_: TensorType) -> Residues:
        """An array exactly."""
        given = np.asarray(array)
        if not type_.is_float:
            plain = given.astype(type_.dtype.numpy)
            plain = plain.astype(np.int64) if _is_residue(type_) else plain
            return Residues(plain, plain)
        return Residues(self.lane_q.array(given), self.lane_p.array(given))

    def random(self, type_: TensorType, rng: np.random.Generator) -> Residues:
        """A uniform element of the field for each entry; the two lanes are independent."""
        assert type_.is_float, "integers and bool have a range that only their use tells"
        lanes = (rng.integers(0, lane.modulus, type_.shape) for lane in (self.lane_q, self.lane_p))
        return Residues(*lanes)


def _is_residue(type_: TensorType) -> bool:
    """Floats and flags are elements of the field; integers are what they are."""
    return type_.is_float or type_.dtype is dtypes.bool_


def same(a: Residues, b: Residues) -> bool:
    """Equal in a lane. Each lane alone is a model of the reals' laws, so one is enough.

    The p-lane knows that exp turns sums into products, the q-lane that log turns them back.
    """
    return bool(np.array_equal(a.p, b.p) or (np.array_equal(a.q, b.q) and _same_signs(a, b)))


def _is_special(value: Number | ArrayLiteral) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _same_signs(a: Residues, b: Residues) -> bool:
    """The q-lane of a logarithm does not know the sign of what was taken: the bit does."""
    first, second = (np.zeros_like(r.q) if r.sign is None else r.sign for r in (a, b))
    return bool(np.array_equal(first, second))


def equal_graphs(
    first: Graph,
    second: Graph,
    given: Mapping[str, object] | None = None,
    trials: int = 3,
    seed: int = 0,
) -> bool:
    """Whether all outputs agree on random field elements, in every trial.

    Integer and bool leaves must be in `given`. Two graphs that differ as polynomials of degree d
    pass a trial with probability at most d/p + d/q (Schwartz–Zippel); equal ones always do.
    """
    leaves, others = (
        {n: g.nodes[i].types[0] for n, i in g.leaves.items()} for g in (first, second)
    )
    if any(leaves.get(n, t) != t for n, t in others.items()):
        return False
    leaves |= others
    rng = np.random.default_rng(seed)
    for trial in range(trials):
        field = FiniteField(trial + seed)
        inputs = {
            name: field.lift(given[name], t) if given and name in given else field.random(t, rng)
            for name, t in leaves.items()
        }
        pairs = zip(evaluate(first, inputs, field), evaluate(second, inputs, field), strict=True)
        if not all(same(a, b) for a, b in pairs):
            return False
    return True


def failure_probability(degree: int, trials: int) -> float:
    """An upper bound on accepting two different polynomials of at most this degree."""
    p = min(SAFE_PRIMES)
    q = (p - 1) // 2
    # Agreement in either lane passes a trial.
    return float(min(1.0, degree / p + degree / q) ** trials)


def exponential(lane: Lane, value: Residues) -> Array:
    """±g^x in the p-lane, x a residue modulo q."""
    low, high = _generator_powers(lane.modulus)
    result = low[value.q & 0xFFFF] * high[value.q >> 16] % lane.modulus
    return result if value.sign is None else np.where(value.sign == 1, lane.reduce(-result), result)


def logarithm(lane: Lane, values: Array) -> tuple[Array, Array]:
    """The x modulo q with g^x = ±value, and 1 where it is −value; 0 for 0.

    Baby steps are looked up, giant steps walked.
    """
    modulus, order = lane.modulus, (lane.modulus - 1) // 2
    unique, places = np.unique(values.reshape(-1), return_inverse=True)
    squares = unique * unique % modulus  # lie in the group that g generates
    sorted_powers, exponents = _baby_steps(modulus)
    count = len(exponents)
    giant = pow(GENERATOR, -count, modulus)
    found = np.zeros(len(unique), np.int64)
    open_ = np.flatnonzero(squares)
    current = squares[open_]
    for step in range(-(-order // count)):
        at = np.minimum(np.searchsorted(sorted_powers, current), count - 1)
        hit = sorted_powers[at] == current
        found[open_[hit]] = (step * count + exponents[at[hit]]) % order
        open_, current = open_[~hit], current[~hit] * giant % modulus
        if not len(open_):
            break
    halved = found * pow(2, -1, order) % order
    is_negative = lane.power(unique, order) == modulus - 1  # not a square
    return halved[places].reshape(values.shape), is_negative.astype(np.int64)[places].reshape(
        values.shape
    )


GENERATOR = 4  # a square, so of order q: q is prime and 4 is not 1


@lru_cache(maxsize=len(SAFE_PRIMES))
def _generator_powers(modulus: int) -> tuple[Array, Array]:
    """g^i for the low and g^(i · 2¹⁶) for the high half of an exponent's bits."""
    return _powers(GENERATOR, 2**16, modulus), _powers(
        pow(GENERATOR, 2**16, modulus), 2**15, modulus
    )


def _powers(base: int, count: int, modulus: int) -> Array:
    powers = np.ones(1, np.int64)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * pow(base, len(powers), modulus) % modulus])
    return powers


@lru_cache(maxsize=3)
def _baby_steps(modulus: int) -> tuple[Array, Array]:
    """g^0 … g^(2²⁰ − 1) in order of their value, and the exponents in that order."""
    powers = _powers(GENERATOR, 2**20, modulus)
    order = np.argsort(powers)
    return powers[order], order


def _mix(x: Array) -> Array:
    """A bijection of 64-bit words that looks random (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=256)
def _text_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def literal(lane: Lane, value: Number | ArrayLiteral, shape: tuple[int, ...]) -> Array:
    """A constant of the IR as residues."""
    if isinstance(value, ArrayLiteral):
        return lane.array(value.array)
    return np.full(shape, lane.number(value), np.int64)
