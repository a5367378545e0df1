"""Values for which two graphs differ: small numbers, by the float64 oracle.

The finite field tells graphs apart that are polynomials; of maxima it knows no order, so that it
may tell apart what is equal. Numbers for which the oracle gives different results settle it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import TreadleError
from treadle.domains.domain import evaluate
from treadle.domains.float64 import Array, Float64
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType

_DRAWS = 24
_INDICES = 2  # integers are below this: what they index has at least one element, mostly two
_NEAR = 1e-6


def leaves(graph: Graph) -> Mapping[str, TensorType]:
    return {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}


def counterexample(left: Graph, right: Graph) -> str:
    """Leaves and two results in words; empty if none was found.

    Only results that are finite on both sides count: elsewhere one may be outside its domain.
    """
    for given in _draws(leaves(left)):
        try:
            with np.errstate(all="ignore"):
                pair = [evaluate(g, given, Float64()) for g in (left, right)]
        except (TreadleError, ArithmeticError, IndexError):
            continue
        for a, b in zip(*pair, strict=True):
            at = _where(np.asarray(a), np.asarray(b))
            if at is not None:
                inputs = ", ".join(f"{n} = {np.asarray(v).tolist()}" for n, v in given.items())
                one, other = (float(np.asarray(v)[at]) for v in (a, b))
                return f"with {inputs} they are {one:g} and {other:g}"
    return ""


def _where(a: Array, b: Array) -> tuple[int, ...] | None:
    """The first place where two arrays of numbers are finite and apart."""
    if a.shape != b.shape or a.size == 0:
        return None
    one, other = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        is_apart = np.abs(one - other) > _NEAR * (1 + np.abs(one))
    is_apart &= np.isfinite(one) & np.isfinite(other)
    return tuple(int(i) for i in np.argwhere(is_apart)[0]) if is_apart.any() else None


def _draws(types: Mapping[str, TensorType]) -> Iterator[dict[str, Array]]:
    """Small whole numbers above 0, then of either sign, then fractions."""
    rng = np.random.default_rng(0)
    for i in range(_DRAWS):
        given: dict[str, Array] = {}
        for name, type_ in types.items():
            if type_.dtype is dtypes.bool_:
                given[name] = rng.integers(0, 2, type_.shape).astype(bool)
            elif not type_.is_float:
                given[name] = rng.integers(0, _INDICES, type_.shape).astype(type_.dtype.numpy)
            elif i % 3 == 2:
                given[name] = rng.standard_normal(type_.shape)
            else:
                low = 1 if i % 3 == 0 else -3
                given[name] = rng.integers(low, 4, type_.shape).astype(np.float64)
        yield given
