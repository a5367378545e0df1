"""Whether probabilities are what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import DTypeError, ShapeError
from treadle.base.numbers import check_whole
from treadle.frontend.coerce import as_tensor, cast, literal
from treadle.frontend.functions.activations import sigmoid, softmax
from treadle.frontend.functions.arithmetic import eq, gt, where
from treadle.frontend.functions.reductions import argmax
from treadle.frontend.functions.reductions import max as max_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import flatten, iota, unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.metrics.direction import Direction
from treadle.metrics.labels import SHAPES, classes_last, weights_of, whole
from treadle.metrics.metric import Metric, Statistics, Totals, ratio, total


@dataclass(frozen=True, kw_only=True)
class _Bins(Metric):
    """How sure predictions are and how often they are right, in bins of equal width.

    With several classes a prediction is as sure as its greatest probability; with one score each,
    as that of class 1. Scores are logits, or probabilities with `from_logits=False`.
    """

    direction: ClassVar[Direction | None] = "min"

    bins: int = 15
    from_logits: bool = True
    axis: int = -1
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        check_whole(type(self).__name__, "bins", self.bins)

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch: weight, confidence and what is right, for each bin."""
        name = type(self).__name__
        x, y = as_tensor(scores), whole(name, target)
        if not x.dtype.is_float:
            raise DTypeError(name, f"scores are {x.type}", SHAPES)
        sure, right = self._sure(name, x, y)
        amount = cast(flatten(weights_of(name, y, weight, self.ignore_index)), sure.dtype)
        # (low, high]: the number of inner edges below
        edges = cast(literal(np.linspace(0, 1, self.bins + 1)[1:-1]), sure.dtype)
        place = sum_of(gt(unsqueeze(sure, -1), edges), -1, dtype=dtypes.int32)
        belongs = eq(unsqueeze(place, -1), iota((*place.shape, self.bins), -1))
        is_left_out = eq(amount, 0)

        def by_bin(values: Tensor) -> Tensor:
            kept = where(is_left_out, 0, values)
            return sum_of(where(belongs, unsqueeze(kept, -1), 0), 0)

        return {
            "weight": by_bin(amount),
            "sure": by_bin(sure * amount),
            "right": by_bin(where(right, amount, 0)),
        }

    def _sure(self, name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim == y.ndim + 1:
            moved, y = classes_last(name, x, y, self.axis)
            p = softmax(moved, -1) if self.from_logits else moved
            return flatten(max_of(p, -1)), flatten(eq(argmax(moved, -1), y))
        if x.shape != y.shape:
            raise ShapeError(name, f"scores {x.type} for targets {y.type}", SHAPES)
        return flatten(sigmoid(x) if self.from_logits else x), flatten(eq(y, 1))


@dataclass(frozen=True, kw_only=True)
class ECE(_Bins):
    """Expected calibration error: how far confidence is from accuracy, on average over bins."""

    def compute(self, totals: Totals) -> float:
        """Σ |sure − right| / weight; NaN if nothing had a weight."""
        sure, right = total(self, totals, "sure"), total(self, totals, "right")
        return float(ratio(np.abs(sure - right).sum(), total(self, totals, "weight").sum(), np.nan))


@dataclass(frozen=True, kw_only=True)
class MCE(_Bins):
    """Maximum calibration error: how far confidence is from accuracy in the worst bin."""

    def compute(self, totals: Totals) -> float:
        """max |sure − right| / weight over bins; NaN if nothing had a weight."""
        weight = total(self, totals, "weight")
        gap = np.abs(total(self, totals, "sure") - total(self, totals, "right"))
        return float(ratio(gap, weight, 0.0).max()) if weight.any() else float("nan")
