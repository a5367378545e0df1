"""Formulas over a graph in the making, as they are written: numbers and scalars are spread."""

from __future__ import annotations

from dataclasses import dataclass

from treadle_checker.building import Building
from treadle_checker.field import is_float
from treadle_checker.types import Type, Value


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """A value of a building."""

    made: Building
    value: Value

    @property
    def type(self) -> Type:
        return self.made.type_of(self.value)

    def with_value(self, value: Value) -> Formula:
        return Formula(self.made, value)

    def constant(self, number: object) -> Formula:
        return self.with_value(self.made.number(number, self.type))

    def cast(self, dtype: str) -> Formula:
        return self.with_value(self.made.cast(self.value, dtype))

    def _with(self, op: str, other: Formula | float, is_first: bool = True) -> Formula:
        """An op on two; the one that is a scalar is spread, and has the other one's dtype."""
        x, y = self, other if isinstance(other, Formula) else self.constant(other)
        shape = x.type.shape or y.type.shape
        dtype = (x if x.type.shape or not y.type.shape else y).type.dtype
        sides = [self.made.spread(f.cast(dtype).value, shape) for f in (x, y)]
        return self.with_value(self.made.apply(op, *(sides if is_first else sides[::-1])))

    def __add__(self, other: Formula | float) -> Formula:
        return self._with("add", other)

    def __sub__(self, other: Formula | float) -> Formula:
        return self._with("sub", other)

    def __mul__(self, other: Formula | float) -> Formula:
        return self._with("mul", other)

    def __truediv__(self, other: Formula | float) -> Formula:
        return self._with("div", other)

    def __radd__(self, other: float) -> Formula:
        return self._with("add", other, False)

    def __rsub__(self, other: float) -> Formula:
        return self._with("sub", other, False)

    def __rmul__(self, other: float) -> Formula:
        return self._with("mul", other, False)

    def __rtruediv__(self, other: float) -> Formula:
        return self._with("div", other, False)

    def __neg__(self) -> Formula:
        return self.apply("neg")

    def apply(self, op: str) -> Formula:
        return self.with_value(self.made.apply(op, self.value))

    def equals(self, other: Formula | float) -> Formula:
        return self._with("eq", other)

    def below(self, other: Formula | float) -> Formula:
        return self._with("lt", other)

    def least(self, other: Formula | float) -> Formula:
        return self._with("min", other)

    def most(self, other: Formula | float) -> Formula:
        return self._with("max", other)

    def chosen(self, x: Formula, y: Formula | float) -> Formula:
        """x where this holds, else y."""
        y = y if isinstance(y, Formula) else x.constant(y)
        condition = self.made.spread(self.value, x.type.shape)
        operands = (condition, x.value, y.cast(x.type.dtype).value)
        return self.with_value(self.made.apply("where", *operands))

    def squares(self) -> Formula:
        """The sum of all squares, in float32 or wider."""
        wide = self.cast("float32" if self.type.dtype != "float64" else "float64")
        return self.with_value(self.made.summed((wide * wide).value))

    @property
    def is_finite(self) -> Formula:
        return self.apply("abs").below(float("inf"))

    @property
    def is_float(self) -> bool:
        return is_float(self.type.dtype)
