"""Indices of kernels over arrays of values of their variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from treadle.domains.float64 import Array
from treadle.kernel.index import Bounded, Data, Index, Quotient, Remainder, Var

Numbers = Array | int


def evaluate_index(
    index: Index, variables: Mapping[str, Numbers], data: Callable[[Data], Numbers] | None = None
) -> Numbers:
    """An index, with arrays for its variables; `data` gives those that are data."""
    total: Numbers = index.offset
    for atom, factor in index.terms:
        match atom:
            case Var(name):
                found = variables[name]
            case Data():
                assert data is not None, "an index that is data stands outside a kernel"
                found = data(atom)
            case Quotient(inner, divisor):
                found = evaluate_index(inner, variables, data) // divisor
            case Remainder(inner, divisor):
                found = evaluate_index(inner, variables, data) % divisor
            case Bounded(inner, _):
                found = evaluate_index(inner, variables, data)
        total = total + factor * found
    return total


def unravel(flat: Array, shape: tuple[int, ...]) -> tuple[Array, ...]:
    found: list[Array] = []
    for n in reversed(shape):
        found.append(flat % max(n, 1))
        flat = flat // max(n, 1)
    return tuple(reversed(found))


def ravel(at: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
    flat: Array = np.zeros((), np.int64)
    for index, n in zip(at, shape, strict=True):
        flat = flat * n + index
    return flat
