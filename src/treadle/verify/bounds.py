"""How far from the oracle a result may be, as the contracts of its ops promise.

What they allow is found by evaluating a graph with every op's result moved by the whole of its own
error, up or down at random: how far the outputs then lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType, accumulator
from treadle.domains.domain import Typed, evaluate
from treadle.domains.float64 import MEANING, Float64, lift
from treadle.ir.contract import ProductError, SumError, Ulps
from treadle.ir.graph import Graph
from treadle.ir.op import Attributes, Op, Types
from treadle.ir.ops import indexing, leaves, linear, reductions
from treadle.ir.types import TensorType

Arrays = Mapping[str, np.ndarray]
# What a program gives over a domain: a graph's outputs, or what several runs of one come to.
Run = Callable[[Float64], Sequence[np.ndarray]]

TURNS = 6  # noisy evaluations
CAREFUL_TURNS = 24  # before something is called wrong
# Values that rounding makes equal have another order than the oracle's, whatever the noise shows.
ROUNDED = Float64(frozenset(d for d in dtypes.ALL if d.is_float))
# Noise of random sign is not the worst there is: errors of a program of several ops may agree.
AGREE = 8.0

_LEAST = {"float64": -1022, "float32": -126, "bfloat16": -126, "float16": -14}


def ulp(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The distance of neighbours of a dtype around values."""
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.abs(x)))
    exponent = np.where(np.isfinite(exponent), exponent, -np.inf)
    return np.exp2(np.maximum(exponent, _LEAST[dtype.name]) - dtype.fraction_bits)


def terms(op: Op, attributes: Attributes, operands: Sequence[Typed[np.ndarray]]) -> int:
    """How many terms a sum has, or factors a product."""
    shape = operands[0].type.shape
    match attributes:
        case reductions.Reduce(axes):
            return math.prod(shape[a] for a in axes)
        case reductions.Cumulate(axis):
            return shape[axis]
        case linear.Contraction():
            x, _, result = attributes.labels
            return math.prod(n for label, n in zip(x, shape, strict=True) if label not in result)
        case linear.Unwindow(window):
            return math.prod(window.sizes)
        case indexing.ScatterAdd():
            return operands[1].value.size
    raise AssertionError(op)


class Noisy(Float64):
    """The oracle with every op's result moved by its contract's error, times `scale`."""

    def __init__(self, turn: int, scale: float = 1.0):
        super().__init__()
        self.rng, self.turn, self.scale = np.random.default_rng(turn), turn, scale
        self.is_alike = turn % 2 == 1  # equal elements are rounded alike: all of a tensor one way

    def apply(
        self,
        op: Op,
        attributes: Attributes,
        operands: Sequence[Typed[np.ndarray]],
        types: Types,
    ) -> Sequence[np.ndarray]:
        found = super().apply(op, attributes, operands, types)
        return [
            self.moved(r, self.error(op, attributes, operands, r, t)) if t.is_float else r
            for r, t in zip(found, types, strict=True)
        ]

    def moved(self, result: np.ndarray, error: np.ndarray) -> np.ndarray:
        """The result off by an error. Infinities, as of masks, are what they are."""
        with np.errstate(all="ignore"):
            return np.where(np.isfinite(result), result + self.signs(result) * error, result)

    def signs(self, result: np.ndarray) -> np.ndarray:
        """Either way; after the first turn by not quite the whole, as equal errors may cancel."""
        shape = () if self.is_alike else result.shape
        part = self.rng.uniform(0.6, 1.0, shape) if self.turn else 1.0
        return self.rng.choice((-self.scale, self.scale), shape) * part

    def error(
        self,
        op: Op,
        attributes: Attributes,
        operands: Sequence[Typed[np.ndarray]],
        result: np.ndarray,
        type_: TensorType,
    ) -> np.ndarray:
        dtype, bound = type_.dtype, op.contract.error
        if isinstance(bound, Ulps):
            return bound.count * ulp(result, dtype)
        if isinstance(bound, (SumError, ProductError)):  # of sizes: Σ|terms|, Π|factors|
            sizes = [np.abs(o.value) if o.type.is_float else o.value for o in operands]
            total = MEANING[op](attributes, *sizes)
            u = accumulator(operands[0].type.dtype).unit_roundoff
            own = bound.factor * terms(op, attributes, operands) * u * total
            return np.asarray(own + 0.5 * ulp(result, dtype))
        if op is leaves.CONSTANT:  # rounded once, to its dtype
            with np.errstate(all="ignore"):  # infinities
                return np.abs(result.astype(dtype.numpy).astype(np.float64) - result)
        return np.zeros_like(result)


def over(graph: Graph, inputs: Arrays) -> Run:
    """A graph's outputs for given inputs, as a function of the domain."""
    lifted = {n: lift(inputs[n], graph.nodes[i].types[0]) for n, i in graph.leaves.items()}
    return lambda domain: evaluate(graph, lifted, domain)


def allowed(graph: Graph, inputs: Arrays, agree: float = AGREE) -> list[np.ndarray]:
    """How far from the oracle each element of each output of a graph may be."""
    return spread(over(graph, inputs), graph.output_types, agree)


def spread(run: Run, types: Sequence[TensorType], agree: float = AGREE) -> list[np.ndarray]:
    """How far each element of what a program gives may be off; infinitely where it is undecided.

    An integer that noise changes, an argmax of almost equal values say, may be anything.
    """
    exact = run(Float64())
    if agree == 1:
        return _apart(run, exact, [Noisy(0)])
    found = _apart(run, exact, [*map(Noisy, range(TURNS)), ROUNDED])
    # Noise may cancel by chance: the last roundings are allowed, and a part of what is usual.
    return [
        agree * np.maximum(f, np.median(f) / 4 if f.size else 0) + 2 * ulp(x, t.dtype)
        if t.is_float
        else f
        for f, x, t in zip(found, exact, types, strict=True)
    ]


# Programs have numbers of the size of one. What cancels to nothing keeps roundings of them, which
# no few turns of noise show in full: part of a rounding of one is always allowed.
LEAST = 2.0**-30


def careful_spread(run: Run, types: Sequence[TensorType]) -> list[np.ndarray]:
    """`spread`, and many turns of louder noise: what almost equal values decide shows in few."""
    turns = range(TURNS, TURNS + CAREFUL_TURNS)
    loud = _apart(run, run(Float64()), [Noisy(turn, AGREE) for turn in turns])
    return [
        np.fmax(np.fmax(a, b), 0.0 if t.dtype is dtypes.float64 else LEAST)
        for a, b, t in zip(spread(run, types), loud, types, strict=True)
    ]


def _apart(run: Run, exact: Sequence[np.ndarray], domains: Iterable[Float64]) -> list[np.ndarray]:
    """The greatest distance of each element from the exact one, over some domains.

    Noise may lead to a NaN (the root of a square that it made negative) and says nothing then; of
    an element that all noise makes one, nothing is known.
    """
    found = [np.zeros(x.shape) for x in exact]
    is_known = [np.isnan(x) if x.dtype == np.float64 else np.ones(x.shape, bool) for x in exact]
    with np.errstate(all="ignore"):
        for domain in domains:
            for k, (moved, x) in enumerate(zip(run(domain), exact, strict=True)):
                is_float = x.dtype == np.float64
                apart = np.abs(moved - x) if is_float else np.where(moved == x, 0.0, np.inf)
                found[k] = np.fmax(found[k], apart)
                if is_float and isinstance(domain, Noisy):
                    is_known[k] |= ~np.isnan(moved)
    return [np.where(known, f, np.inf) for f, known in zip(found, is_known, strict=True)]


def complaint(
    ours: np.ndarray, theirs: np.ndarray, type_: TensorType, bound: np.ndarray
) -> str | None:
    """What is wrong with a result beside the oracle's; None if it is as near as it must be."""
    if ours.shape != type_.shape or ours.dtype != type_.dtype.numpy:
        return f"{ours.dtype}{list(ours.shape)} is not {type_}"
    if not type_.is_float:
        return _differing(ours, theirs, (ours != theirs) & (bound == 0))
    wide, is_finite = ours.astype(np.float64), np.isfinite(theirs)
    is_same = (wide == theirs) | (np.isnan(wide) & np.isnan(theirs))
    if not np.all(is_same | is_finite):
        return _differing(wide, theirs, ~is_same & ~is_finite)
    with np.errstate(all="ignore"):
        apart = np.where(is_finite, np.abs(wide - theirs), 0.0)
    # A trillionth for the oracle's own rounding, which matters for float64 alone.
    slack = bound * (1 + 1e-12) + 1e-15 * np.abs(np.where(is_finite, theirs, 0.0))
    if type_.dtype is dtypes.float64:
        slack = slack * 4
    is_within = (apart <= slack) | ~is_finite  # False where ours is NaN
    if np.all(is_within):
        return None
    worst = np.unravel_index(np.argmax(np.where(is_within, -1.0, apart - slack)), apart.shape)
    return (
        f"{wide[worst]:.9g} is {apart[worst]:.3g} from {theirs[worst]:.9g}, "
        f"{slack[worst]:.3g} is allowed ({type_})"
    )


def _differing(ours: np.ndarray, theirs: np.ndarray, is_wrong: np.ndarray) -> str | None:
    if not np.any(is_wrong):
        return None
    first = np.unravel_index(np.argmax(is_wrong), is_wrong.shape)
    place = list(map(int, first))
    return f"{ours[first]} at {place} is not {theirs[first]}"
