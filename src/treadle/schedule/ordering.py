"""What sorts share: which order is wanted, a line that is merged, and who comes before whom."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.kernel.index import Index
from treadle.kernel.nodes import Buffer, Load, Statement, Store, Value
from treadle.schedule.nests import compare


@dataclass(frozen=True, slots=True)
class Ordering:
    axis: int
    descending: bool
    size: int  # how many are wanted


@dataclass(frozen=True, slots=True)
class Line:
    """Where the elements of an axis are while they are merged, and which they were."""

    values: Buffer
    origins: Buffer

    def loads(self, at: Index) -> tuple[Load, Load]:
        values, origins = (Load(b.name, at, b.dtype) for b in (self.values, self.origins))
        return values, origins

    def stores(self, at: Index, value: Value, origin: Value) -> list[Statement]:
        return [Store(self.values.name, at, value), Store(self.origins.name, at, origin)]


def comes_before(a: Value, b: Value, descending: bool) -> Value:
    """Whether a comes before b, whatever their order was."""
    first, second = (b, a) if descending else (a, b)
    less: Value = compare("lt", first, second)
    if a.dtype.is_float:
        rises = compare("and", is_nan(second), negated(is_nan(first)))
        less = compare("or", less, rises)
    return less


def is_same(a: Value, b: Value) -> Value:
    """Equality in which NaN equals NaN."""
    equal = compare("eq", a, b)
    if not a.dtype.is_float:
        return equal
    both = compare("and", is_nan(a), is_nan(b))
    return compare("or", equal, both)


def is_nan(a: Value) -> Value:
    return negated(compare("eq", a, a))


def negated(a: Value) -> Value:
    return compare("not", a)
