"""Operators over any domain, so that rules read as maths whatever the numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from treadle.base.dtypes import DType
from treadle.base.shapes import inverse_permutation, without
from treadle.domains.domain import Domain, Typed, bind, number
from treadle.ir.literal import Number
from treadle.ir.op import NONE, Attributes, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.indexing import GATHER, Gather
from treadle.ir.ops.reductions import REDUCE_SUM, Reduce
from treadle.ir.ops.shaping import (
    BROADCAST,
    PERMUTE,
    RESHAPE,
    SLICE,
    Broadcast,
    Permute,
    Reshape,
    Slice,
)
from treadle.ir.types import TensorType

V = TypeVar("V")


@dataclass(frozen=True, slots=True, eq=False)
class Num(Generic[V]):
    """A value of a domain with arithmetic."""

    domain: Domain[V]
    type: TensorType
    value: V

    @property
    def typed(self) -> Typed[V]:
        return Typed(self.type, self.value)

    def apply(self, op: Op, attributes: Attributes, *others: Num[V]) -> Num[V]:
        """The single result of an op whose first operand this is."""
        (result,) = bind(self.domain, op, attributes, self.typed, *(o.typed for o in others))
        return Num(self.domain, result.type, result.value)

    def like(self, value: Number) -> Num[V]:
        """A constant of the same type."""
        return Num(self.domain, self.type, number(self.domain, value, self.type).value)

    def _binary(self, op: Op, other: Num[V] | Number) -> Num[V]:
        return self.apply(op, NONE, other if isinstance(other, Num) else self.like(other))

    def __add__(self, other: Num[V] | Number) -> Num[V]:
        return self._binary(e.ADD, other)

    def __sub__(self, other: Num[V] | Number) -> Num[V]:
        return self._binary(e.SUB, other)

    def __rsub__(self, other: Number) -> Num[V]:
        return self.like(other) - self

    def __mul__(self, other: Num[V] | Number) -> Num[V]:
        return self._binary(e.MUL, other)

    def __truediv__(self, other: Num[V] | Number) -> Num[V]:
        return self._binary(e.DIV, other)

    def __rtruediv__(self, other: Number) -> Num[V]:
        return self.like(other) / self

    def __neg__(self) -> Num[V]:
        return self.apply(e.NEG, NONE)

    def equals(self, other: Num[V] | Number) -> Num[V]:
        return self._binary(e.EQ, other)

    def less(self, other: Num[V] | Number) -> Num[V]:
        return self._binary(e.LT, other)

    def where(self, x: Num[V], y: Num[V]) -> Num[V]:
        """x where this is true, else y."""
        return self.apply(e.WHERE, NONE, x, y)

    def cast(self, dtype: DType) -> Num[V]:
        return self.apply(e.CAST, e.Cast(dtype))

    def sum(self, axes: Sequence[int]) -> Num[V]:
        return self.apply(REDUCE_SUM, Reduce(tuple(axes)))

    def spread(self, like: TensorType, axes: Sequence[int]) -> Num[V]:
        """Undo the shape change of a reduction over `axes` of a `like`."""
        kept = tuple(i for i in range(like.rank) if i not in axes)
        assert self.type.shape == without(like.shape, axes)
        return self.apply(BROADCAST, Broadcast(like.shape, kept))

    def reshape(self, shape: tuple[int, ...]) -> Num[V]:
        return self.apply(RESHAPE, Reshape(shape))

    def permute(self, axes: Sequence[int]) -> Num[V]:
        return self.apply(PERMUTE, Permute(tuple(axes)))

    def range(self, axis: int, start: int, stop: int, stride: int = 1) -> Num[V]:
        """start:stop:stride along one axis."""
        shape = self.type.shape
        starts = tuple(start if i == axis else 0 for i in range(len(shape)))
        stops = tuple(stop if i == axis else n for i, n in enumerate(shape))
        strides = tuple(stride if i == axis else 1 for i in range(len(shape)))
        return self.apply(SLICE, Slice(starts, stops, strides))

    def take_along(self, indices: Num[V], axis: int) -> Num[V]:
        """Elements along `axis` at indices that run with all other axes."""
        rank = self.type.rank
        order = (*(i for i in range(rank) if i != axis), axis)
        attributes = Gather(rank - 1, rank - 1)
        taken = self.permute(order).apply(GATHER, attributes, indices.permute(order))
        return taken.permute(inverse_permutation(order))
