"""Metrics that are means over rows, tokens or anything else; and functions of such means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import check_whole
from treadle.frontend.coerce import as_tensor, cast, literal
from treadle.frontend.functions.activations import log_softmax
from treadle.frontend.functions.arithmetic import (
    eq,
    gt,
    isnan,
    logical_and,
    logical_not,
    logical_or,
    lt,
    ne,
    where,
)
from treadle.frontend.functions.indexing import take, take_along_axis
from treadle.frontend.functions.reductions import sort
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import iota, squeeze, unsqueeze
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.metrics.direction import Direction
from treadle.metrics.labels import classes_last, is_inside, refuse_outside, weights_of
from treadle.metrics.metric import Metric, Statistics, Totals, ratio, total


def weighted_mean(metric: Metric, totals: Totals) -> float:
    """NaN if nothing had a weight."""
    return float(ratio(total(metric, totals, "total"), total(metric, totals, "weight"), np.nan))


@dataclass(frozen=True)
class Average(Metric):
    """The weighted mean of a value: a loss (a `td.Mean` brings its weight), or of an array."""

    def update(
        self, scores: Operand, target: Operand | None = None, weight: Operand | None = None
    ) -> Statistics:
        """Statistics of one batch: the total and the weight of the values."""
        if target is not None:
            raise ArgumentError("Average", "a target was given", "Pass the value, and weight=.")
        if isinstance(scores, Mean) and len(scores.terms) == 1 and weight is None:
            return {"total": scores.total, "weight": scores.weight}
        x = as_tensor(scores)
        if not x.dtype.is_float:
            raise DTypeError("Average", f"the value is {x.type}", "It is a float.")
        amount = cast(weights_of("Average", x, weight, None), x.dtype)
        return {"total": sum_of(where(eq(amount, 0), 0, x * amount)), "weight": sum_of(amount)}

    def compute(self, totals: Totals) -> float:
        """total / weight; NaN if nothing had a weight."""
        return weighted_mean(self, totals)


@dataclass(frozen=True)
class TopK(Metric):
    """How often the true class is among the k with the greatest scores.

    Of equal scores the class with the greater number comes first, as scikit-learn has it.
    """

    direction: ClassVar[Direction | None] = "max"

    k: int = 5
    axis: int = -1
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        check_whole("TopK", "k", self.k)

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch: the weight of what is right, and of all."""
        x, y = classes_last("TopK", scores, target, self.axis)
        amount = weights_of("TopK", y, weight, self.ignore_index)
        inside = is_inside(y, x.shape[-1])
        index = unsqueeze(where(inside, y, 0), -1)
        own = take_along_axis(x, index, -1)
        ahead = logical_or(gt(x, own), logical_and(eq(x, own), gt(iota(x.shape, -1), index)))
        place = sum_of(ahead, -1, dtype=dtypes.int32)
        # A score that is NaN is ahead of none and would be right.
        is_number = logical_not(isnan(squeeze(own, -1)))
        right = logical_and(logical_and(lt(place, self.k), inside), is_number)
        outside = logical_and(ne(amount, 0), logical_not(inside))
        return {
            "total": sum_of(where(right, amount, 0), dtype=amount.dtype),
            "weight": sum_of(amount, dtype=amount.dtype),
            "outside": sum_of(outside, dtype=dtypes.int32),
        }

    def compute(self, totals: Totals) -> float:
        """NaN if nothing had a weight."""
        refuse_outside(self, totals)
        return weighted_mean(self, totals)


@dataclass(frozen=True)
class Perplexity(Metric):
    """exp of the mean of −log softmax(scores) at the target: scores are logits (…, classes)."""

    direction: ClassVar[Direction | None] = "min"

    axis: int = -1
    ignore_index: int | None = None

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch: the total and the weight of −log p."""
        x, y = classes_last("Perplexity", scores, target, self.axis)
        amount = cast(weights_of("Perplexity", y, weight, self.ignore_index), x.dtype)
        inside = is_inside(y, x.shape[-1])
        index = unsqueeze(where(inside, y, 0), -1)
        rows = -squeeze(take_along_axis(log_softmax(x, -1), index, -1), -1)
        counts = ne(amount, 0)
        outside = logical_and(counts, logical_not(inside))
        return {
            "total": sum_of(where(counts, rows * amount, 0)),
            "weight": sum_of(amount),
            "outside": sum_of(outside, dtype=dtypes.int32),
        }

    def compute(self, totals: Totals) -> float:
        """Infinite where a target was impossible, NaN if nothing had a weight."""
        refuse_outside(self, totals)
        mean = weighted_mean(self, totals)
        return math.exp(mean) if not mean > math.log(np.finfo(np.float64).max) else math.inf


@dataclass(frozen=True)
class NDCG(Metric):
    """Normalised discounted cumulative gain of rankings by score, of the first k or of all.

    Scores and relevances are (rows, items), relevances at least 0. Items with equal scores share
    their places. A row without relevant items counts as 0. As scikit-learn.
    """

    direction: ClassVar[Direction | None] = "max"

    k: int | None = None

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch: the total of the rows' values and their weight."""
        x, gain = as_tensor(scores), as_tensor(target)
        if x.ndim != 2 or x.shape != gain.shape or x.shape[1] < 2 or not x.dtype.is_float:
            raise ShapeError(
                "NDCG", f"scores {x.type}, relevances {gain.type}", "Both are (rows, items)."
            )
        gain = gain if gain.dtype.is_float else cast(gain, x.dtype)
        found, best = self._gains(x, gain)
        value = where(eq(best, 0), 0, found / where(eq(best, 0), 1, best))
        amount = cast(weights_of("NDCG", value, weight, None), value.dtype)
        return {
            "total": sum_of(where(eq(amount, 0), 0, value * amount)),
            "weight": sum_of(amount),
            "negative": sum_of(lt(gain, 0), dtype=dtypes.int32),
        }

    def _gains(self, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        items = x.shape[1]
        discount = 1 / np.log2(np.arange(items) + 2)
        discount[items if self.k is None else self.k :] = 0
        sums = np.concatenate([[0.0], np.cumsum(discount)])  # of the first 0, 1, 2, … places
        table = cast(literal(sums), gain.dtype)
        one, other = unsqueeze(x, 2), unsqueeze(x, 1)
        ahead = sum_of(gt(other, one), 2, dtype=dtypes.int32)  # (N, K): items before this one
        equal = sum_of(eq(other, one), 2, dtype=dtypes.int32)  # and sharing its places
        share = (take(table, ahead + equal) - take(table, ahead)) / cast(equal, gain.dtype)
        ideal, _ = sort(gain, -1, descending=True)
        return sum_of(gain * share, 1), sum_of(ideal * cast(literal(discount), gain.dtype), 1)

    def compute(self, totals: Totals) -> float:
        """The weighted mean over rows."""
        if total(self, totals, "negative"):
            raise ArgumentError("NDCG", "there are negative relevances", "They are 0 or more.")
        return weighted_mean(self, totals)
