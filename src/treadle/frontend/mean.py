"""`Mean`: a loss that knows its weight, so that accumulation and data parallelism stay exact."""

from __future__ import annotations

import numbers

from treadle.base import dtypes
from treadle.base.errors import ShapeError
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.tensor import Operand, Placeholder, Tensor

Term = tuple[Tensor, Tensor]


class Mean(Placeholder):
    """total / weight. Means of several batches combine as Σ total / Σ weight.

    Sums with another mean of the same weight, and products with a number, are means again. A plain
    scalar added to it counts once per unit of weight. Sums of differently weighted means are fine
    for one batch, and refused where batches are accumulated.
    """

    __array_ufunc__ = None  # a NumPy number on the left leaves operators to the mean's own

    def __init__(self, total: Operand, weight: Operand):
        scalar, amount = as_tensor(total), as_tensor(weight)
        for name, t in (("total", scalar), ("weight", amount)):
            if t.shape != ():
                raise ShapeError("Mean", f"the {name} is {t.type}, not a scalar", "Sum it first.")
        dtype = scalar.dtype if scalar.dtype.is_float else dtypes.float32
        self.terms: tuple[Term, ...] = ((cast(scalar, dtype), cast(amount, dtype)),)

    @classmethod
    def _of(cls, terms: tuple[Term, ...]) -> Mean:
        mean = cls(*terms[0])
        mean.terms = terms
        return mean

    @property
    def total(self) -> Tensor:
        return self.terms[0][0]

    @property
    def weight(self) -> Tensor:
        return self.terms[0][1]

    def tensor(self) -> Tensor:
        """The value, as a tensor without a weight."""
        value = self.total / self.weight
        for total, weight in self.terms[1:]:
            value = value + total / weight
        return value

    def item(self) -> float:
        """The value of an eager mean."""
        return float(self.tensor())

    def __mul__(self, factor: Operand) -> Mean:  # type: ignore[override]
        factor = factor.tensor() if isinstance(factor, Mean) else factor
        return Mean._of(tuple((total * factor, weight) for total, weight in self.terms))

    __rmul__ = __mul__  # type: ignore[assignment]

    def __truediv__(self, divisor: Operand) -> Mean:  # type: ignore[override]
        divisor = divisor.tensor() if isinstance(divisor, Mean) else divisor
        return Mean._of(tuple((total / divisor, weight) for total, weight in self.terms))

    def __neg__(self) -> Mean:  # type: ignore[override]
        return self * -1

    def __add__(self, other: Operand) -> Mean:  # type: ignore[override]
        if isinstance(other, Mean):
            return _sum(self, other)
        if isinstance(other, numbers.Number) and other == 0:
            return self  # so that sum([...]) works
        (total, weight), *rest = self.terms
        return Mean._of(((total + as_tensor(other) * weight, weight), *rest))

    __radd__ = __add__  # type: ignore[assignment]

    def __sub__(self, other: Operand) -> Mean:  # type: ignore[override]
        return self + -as_tensor(other) if not isinstance(other, Mean) else self + -other

    def __rsub__(self, other: Operand) -> Mean:  # type: ignore[override]
        return -self + other

    def __repr__(self) -> str:
        return f"Mean({', '.join(f'{t!r} / {w!r}' for t, w in self.terms)})"


def _sum(a: Mean, b: Mean) -> Mean:
    """Terms with one weight become one term."""
    terms = list(a.terms)
    for total, weight in b.terms:
        for i, (own, amount) in enumerate(terms):
            if _is_same(amount, weight):
                terms[i] = own + total, amount
                break
        else:
            terms.append((total, weight))
    return Mean._of(tuple(terms))


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two weights are one value: the same node of a trace, or equal numbers."""
    if a.scope is not b.scope:
        return False
    return bool(a.handle == b.handle)
