"""The closed language of attributes and conditions: numbers, lists, and names that are bound.

Sizes may be integers or polynomials of symbols: nothing here asks more of them than `+`, `-`, `*`
and `==`, except the comparisons, which a proof states as assumptions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, Protocol

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.egraph.language import Term, Text, to_text
from treadle.ir import literal

List = tuple[Any, ...]


class Typed(Protocol):
    """What is asked of a tensor: its shape and its dtype."""

    @property
    def shape(self) -> List: ...

    @property
    def dtype(self) -> Any: ...


def _at(values: List, i: int) -> Any:
    return values[i]


def _take(values: List, positions: List) -> List:
    return tuple(values[i] for i in positions)


def _sorted(values: List) -> List:
    return tuple(sorted(values))


def _inverse(permutation: List) -> List:
    return tuple(permutation.index(i) for i in range(len(permutation)))


def _join(*lists: List) -> List:
    return tuple(v for values in lists for v in values)


def _unique(values: List) -> List:
    return tuple(dict.fromkeys(values))


def _without(values: List, others: List) -> List:
    return tuple(v for v in values if v not in others)


def _common(values: List, others: List) -> List:
    return tuple(v for v in values if v in others)


def _positions(values: List, wanted: List) -> List:
    return tuple(values.index(v) for v in wanted)


def _nonzero(values: List) -> List:
    return tuple(i for i, v in enumerate(values) if v != 0)


def _set(values: List, i: int, value: Any) -> List:
    return (*values[:i], value, *values[i + 1 :])


def _add(values: List, others: List) -> List:
    return tuple(a + b for a, b in zip(values, others, strict=True))


def _fill(count: int, value: Any) -> List:
    return (value,) * count


def _range(count: int) -> List:
    return tuple(range(count))


def _list(*values: Any) -> List:
    return values


def _held(value: literal.Number, dtype: str) -> bool:
    """Whether a float dtype holds a number as it is; zeros have a sign and are not meant."""
    kind = dtypes.EVERY[dtype]
    if isinstance(value, bool) or not kind.is_float or not value:
        return False
    held = float(literal.to_numpy(value, kind.numpy))
    return bool(np.isfinite(held)) and Fraction(held) == Fraction(value)


def _is_float(dtype: str) -> bool:
    return dtypes.EVERY[dtype].is_float


def _itemsize(dtype: str) -> int:
    return dtypes.EVERY[dtype].itemsize


def _shape(x: Typed) -> List:
    return x.shape


def _dtype(x: Typed) -> str:
    return str(x.dtype.name)


def _rank(x: Typed) -> int:
    return len(x.shape)


def _elements(x: Typed) -> Any:
    return prod(x.shape)


def _along(axis: int, tensors: Sequence[Typed]) -> Any:
    return sum(t.shape[axis] for t in tensors)


def _exactly(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """On floats as on the numbers that they are."""

    def compute(a: Any, b: Any) -> Any:
        numbers = (Fraction(v) if isinstance(v, float) and np.isfinite(v) else v for v in (a, b))
        return operation(*numbers)

    return compute


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # of tensors
    "shape": _shape,
    "dtype": _dtype,
    "rank": _rank,
    "elements": _elements,
    "along": _along,
    # of numbers
    "+": _exactly(operator.add),
    "-": _exactly(operator.sub),
    "*": _exactly(operator.mul),
    # of lists
    "list": _list,
    "len": len,
    "at": _at,
    "take": _take,
    "join": _join,
    "unique": _unique,
    "without": _without,
    "common": _common,
    "positions": _positions,
    "nonzero": _nonzero,
    "set": _set,
    "add": _add,
    "fill": _fill,
    "range": _range,
    "inverse": _inverse,
    "product": prod,
    "sorted": _sorted,
    # conditions
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    "and": lambda *values: all(values),
    "or": lambda *values: any(values),
    "not": operator.not_,
    "all": all,
    "held": _held,
    "float": _is_float,
    "bytes": _itemsize,
}


Expression = Callable[[Mapping[str, Any]], Any]


def expression(term: Term) -> Expression:
    """An expression as a function of what names stand for; others stand for themselves.

    What has no value (the third of two elements, a position of what is not there) raises IndexError
    or ValueError: the rule does not apply.
    """
    if isinstance(term, tuple) and term:
        function = _function(term)
        parts = [expression(t) for t in term[1:]]
        if len(parts) == 1:
            (only,) = parts
            return lambda names: function(only(names))
        if len(parts) == 2:
            first, second = parts
            return lambda names: function(first(names), second(names))
        return lambda names: function(*[part(names) for part in parts])
    if isinstance(term, str) and not isinstance(term, Text):
        name = term
        return lambda names: names.get(name, name)
    return lambda names: term


def _function(term: tuple[Term, ...]) -> Callable[..., Any]:
    found = FUNCTIONS.get(str(term[0]))
    if found is None:
        known = ", ".join(sorted(FUNCTIONS))
        raise ArgumentError("rules", f"{to_text(term)} has no meaning", f"There are {known}.")
    return found


def evaluate(term: Term, names: Mapping[str, Any]) -> Any:
    """The value of an expression."""
    return expression(term)(names)
