"""Losses of rules: truth between 0 and 1, connectives of three logics, and how far rules hold."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.base.numbers import POSITIVE, check_number
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import log, maximum, minimum, pow, where
from treadle.frontend.functions.reductions import max as max_of
from treadle.frontend.functions.reductions import mean as mean_of
from treadle.frontend.functions.reductions import min as min_of
from treadle.frontend.functions.reductions import prod as prod_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Axes, Operand, Tensor
from treadle.losses.reduction import reduced

KINDS = ("product", "godel", "lukasiewicz")


@dataclass(frozen=True, slots=True)
class Logic:
    """Connectives of truths between 0 and 1: of the product, Gödel's or Łukasiewicz's logic."""

    kind: str = "product"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError("Logic", f"{self.kind!r}", f"Use one of {', '.join(KINDS)}.")

    def negation(self, a: Operand) -> Tensor:
        """1 − a: not a."""
        return 1 - as_tensor(a)

    def conjunction(self, a: Operand, b: Operand) -> Tensor:
        """a and b."""
        x, y = as_tensor(a), as_tensor(b)
        if self.kind == "product":
            return x * y
        return minimum(x, y) if self.kind == "godel" else maximum(x + y - 1, 0)

    def disjunction(self, a: Operand, b: Operand) -> Tensor:
        """a or b."""
        x, y = as_tensor(a), as_tensor(b)
        if self.kind == "product":
            return x + y - x * y
        return maximum(x, y) if self.kind == "godel" else minimum(x + y, 1)

    def implication(self, a: Operand, b: Operand) -> Tensor:
        """a implies b: the residuum, which is 1 wherever a ≤ b."""
        x, y = as_tensor(a), as_tensor(b)
        if self.kind == "lukasiewicz":
            return minimum(1 - x + y, 1)
        holds = x <= y
        if self.kind == "godel":
            return where(holds, 1, y)
        return where(holds, 1, y / where(holds, 1, x))

    def equivalence(self, a: Operand, b: Operand) -> Tensor:
        """a if and only if b."""
        return self.conjunction(self.implication(a, b), self.implication(b, a))

    def every(self, truths: Operand, axis: Axes = None) -> Tensor:
        """Whether all hold, over axes: the conjunction of them."""
        x = as_tensor(truths)
        if self.kind == "product":
            return prod_of(x, axis)
        if self.kind == "godel":
            return min_of(x, axis)
        return maximum(1 - sum_of(1 - x, axis), 0)

    def some(self, truths: Operand, axis: Axes = None) -> Tensor:
        """Whether some hold, over axes: the disjunction of them."""
        x = as_tensor(truths)
        if self.kind == "product":
            return 1 - prod_of(1 - x, axis)
        if self.kind == "godel":
            return max_of(x, axis)
        return minimum(sum_of(x, axis), 1)


def satisfaction(truths: Operand, reduction: str = "mean", eps: float = 1e-7) -> Tensor | Mean:
    """−log of the truth of rules, held above eps: 0 where they hold.

    Shapes: any shape → (), or that shape for "none".
    """
    check_number("satisfaction", "eps", eps, POSITIVE)
    return reduced("satisfaction", -log(maximum(as_tensor(truths), eps)), reduction)


def violation(truths: Operand, p: float = 1.0, reduction: str = "mean") -> Tensor | Mean:
    """(1 − truth)ᵖ of rules: 0 where they hold.

    Shapes: any shape → (), or that shape for "none".
    """
    check_number("violation", "p", p, POSITIVE)
    missing = 1 - as_tensor(truths)
    return reduced("violation", missing if p == 1 else pow(missing, p), reduction)


def at_most(value: Operand, bound: Operand, p: int = 2, reduction: str = "mean") -> Tensor | Mean:
    """max(0, value − bound)ᵖ: the penalty of an upper bound; swap the two for a lower one.

    Shapes: two of one shape → (), or that shape for "none".
    """
    excess = maximum(as_tensor(value) - as_tensor(bound), 0)
    return reduced("at_most", excess if p == 1 else pow(excess, p), reduction)


def mean_truth(truths: Operand, axis: Axes = None, p: float = 1.0) -> Tensor:
    """A soft "for all": 1 − (mean (1 − truth)ᵖ)^(1/p), which is gentler than a conjunction.

    Shapes: any shape → (), or what is left without the axes.
    """
    check_number("mean_truth", "p", p, POSITIVE)
    missing = 1 - as_tensor(truths)
    if p == 1:
        return 1 - mean_of(missing, axis)
    total = mean_of(pow(missing, p), axis)
    is_zero = total == 0
    return 1 - where(is_zero, 0, pow(where(is_zero, 1, total), 1 / p))
