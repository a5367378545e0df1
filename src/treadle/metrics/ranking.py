"""Metrics of the order that scores give: they need every score, and keep them on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, NamedTuple

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.tensor import Operand
from treadle.metrics.direction import Direction
from treadle.metrics.labels import weights_of, whole
from treadle.metrics.metric import Metric, Statistics, Totals, Value, ratio, total

Binary = Callable[[np.ndarray, np.ndarray, np.ndarray], float]


class Curve(NamedTuple):
    """Points of an ROC curve: false and true positive rates at falling thresholds."""

    false_positive: np.ndarray
    true_positive: np.ndarray
    thresholds: np.ndarray


class Tradeoff(NamedTuple):
    """Points of a precision-recall curve at rising thresholds; the last is (1, 0) without one."""

    precision: np.ndarray
    recall: np.ndarray
    thresholds: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Columns(Metric):
    """Scores (N,) of class 1 with targets 0 or 1; or (N, C) with classes (N,) or labels (N, C)."""

    keeps_columns: ClassVar[bool] = True

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """What one batch has, all of it: scores, targets and weights."""
        x, y = as_tensor(scores), whole(type(self).__name__, target)
        fits = x.shape == y.shape or (x.ndim == 2 and x.shape[:1] == y.shape)
        if not x.dtype.is_float or x.ndim not in (1, 2) or not fits:
            raise ShapeError(
                type(self).__name__,
                f"scores {x.type} for targets {y.type}",
                "Scores are floats (N,) with targets (N,), or (N, C) with targets (N,) or (N, C).",
            )
        rows = y if y.ndim == 1 else y[:, 0]
        wide = x if x.dtype.bits >= 32 else cast(x, dtypes.float32)
        amount = weights_of(type(self).__name__, rows, weight, None)
        return {"scores": wide, "target": y, "weight": amount}

    def _columns(self, totals: Totals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All that counts: rows of weight 0 do not."""
        scores, target = total(self, totals, "scores"), total(self, totals, "target")
        weight = total(self, totals, "weight")
        kept = weight != 0
        classes = scores.shape[1] if scores.ndim == 2 and target.ndim == 1 else 2
        wrong = (target[kept] < 0) | (target[kept] >= classes)
        if wrong.any():
            raise ArgumentError(
                type(self).__name__,
                f"{int(wrong.sum())} targets lie outside 0 to {classes - 1}",
                "Give rows that are to be left out a weight of 0.",
            )
        return scores[kept], target[kept], weight[kept]

    def _pair(self, totals: Totals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scores, target, weight = self._columns(totals)
        if scores.ndim != 1:
            name = type(self).__name__
            raise ShapeError(name, f"scores of {scores.shape[1]} classes", "Give those of one.")
        return scores, target, weight


@dataclass(frozen=True, kw_only=True)
class RocCurve(_Columns):
    """The curve of false and true positive rates over all thresholds, of two classes."""

    def compute(self, totals: Totals) -> Curve:
        """Points where it bends. NaN where a class is missing."""
        return roc_curve(*self._pair(totals))


@dataclass(frozen=True, kw_only=True)
class PrecisionRecallCurve(_Columns):
    """The curve of precision and recall over all thresholds, of two classes."""

    def compute(self, totals: Totals) -> Tradeoff:
        """A point for each threshold. Recall is 1 where nothing is of class 1."""
        return precision_recall_curve(*self._pair(totals))


@dataclass(frozen=True, kw_only=True)
class _AveragedColumns(_Columns):
    """A number for each class or label against the rest, and how they are averaged."""

    direction: ClassVar[Direction | None] = "max"

    average: str | None = "macro"

    def __post_init__(self) -> None:
        if self.average not in ("macro", "micro", "weighted", None):
            cause = f"average = {self.average!r}"
            remedy = 'Use "macro", "micro", "weighted" or None.'
            raise ArgumentError(type(self).__name__, cause, remedy)

    def _average(self, totals: Totals, of: Binary) -> Value:
        scores, target, weight = self._columns(totals)
        if scores.ndim == 1:
            return of(scores, target, weight)
        classes = scores.shape[1]
        is_true = target[:, None] == np.arange(classes) if target.ndim == 1 else target
        if self.average == "micro":
            return of(scores.ravel(), is_true.ravel(), np.repeat(weight, classes))
        values = np.array([of(scores[:, c], is_true[:, c], weight) for c in range(classes)])
        if self.average is None:
            return values
        if self.average == "macro":
            return float(values.mean())
        weights = (is_true * weight[:, None]).sum(0)
        return float(ratio((np.where(weights, values, 0) * weights).sum(), weights.sum(), 0.0))


@dataclass(frozen=True, kw_only=True)
class RocAuc(_AveragedColumns):
    """The area under the ROC curve: how often one of class 1 has a greater score than one of 0.

    Several classes are compared each with the rest (`multi_class="ovr"`) or in pairs ("ovo").
    NaN where a class is missing.
    """

    multi_class: str = "ovr"

    def __post_init__(self) -> None:
        super().__post_init__()
        is_pairs = self.multi_class == "ovo"
        if self.multi_class not in ("ovr", "ovo") or (
            is_pairs and self.average not in ("macro", "weighted")
        ):
            raise ArgumentError(
                "RocAuc",
                f"multi_class = {self.multi_class!r} with average = {self.average!r}",
                'Use "ovr", or "ovo" with "macro" or "weighted".',
            )

    def compute(self, totals: Totals) -> Value:
        """From all scores; ties count half."""
        if self.multi_class == "ovo" and total(self, totals, "scores").ndim == 2:
            return self._in_pairs(totals)
        return self._average(totals, roc_auc)

    def _in_pairs(self, totals: Totals) -> float:
        """Hand and Till: the mean over pairs of classes that occur, both ways."""
        scores, target, weight = self._columns(totals)
        if target.ndim != 1 or (weight != 1).any():
            raise ArgumentError("RocAuc", '"ovo" with labels or weights', 'Use "ovr".')
        values, shares = [], []
        for a, b in combinations(np.unique(target), 2):
            rows = (target == a) | (target == b)
            of_both, is_a, ones = scores[rows], target[rows] == a, weight[rows]
            one, other = roc_auc(of_both[:, a], is_a, ones), roc_auc(of_both[:, b], ~is_a, ones)
            values.append((one + other) / 2)
            shares.append(rows.mean())
        if not values:
            return float("nan")
        return float(np.average(values, weights=shares if self.average == "weighted" else None))


@dataclass(frozen=True, kw_only=True)
class AveragePrecision(_AveragedColumns):
    """Precision averaged over the steps of recall; over classes or labels, the mean (mAP).

    0 for a class that does not occur.
    """

    def compute(self, totals: Totals) -> Value:
        """Σ (recall − recall before) · precision, without interpolation."""
        return self._average(totals, average_precision)


def _positives(
    scores: np.ndarray, target: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """False and true positives at each score that occurs, from the greatest down."""
    order = np.argsort(-scores, kind="stable")
    ranked, is_true = scores[order], target[order].astype(np.float64)
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of each group of equals
    true = np.cumsum(is_true * weight[order])[last]
    false = np.cumsum((1 - is_true) * weight[order])[last]
    return false, true, ranked[last]


def _is_undefined(scores: np.ndarray) -> bool:
    return not len(scores) or bool(np.isnan(scores).any())


def roc_curve(scores: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Curve:
    if _is_undefined(scores):
        return Curve(*(np.array([np.nan]) for _ in range(3)))
    false, true, thresholds = _positives(scores, target, weight)
    if len(false) > 2:  # points on a straight line between their neighbours say nothing
        bends = (np.diff(false, 2) != 0) | (np.diff(true, 2) != 0)
        kept = np.concatenate([[True], bends, [True]])
        false, true, thresholds = false[kept], true[kept], thresholds[kept]
    false, true = np.concatenate([[0.0], false]), np.concatenate([[0.0], true])
    return Curve(
        ratio(false, false[-1], np.nan),
        ratio(true, true[-1], np.nan),
        np.concatenate([[np.inf], thresholds]),
    )


def roc_auc(scores: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    curve = roc_curve(scores, target, weight)
    widths = np.diff(curve.false_positive)
    heights = (curve.true_positive[1:] + curve.true_positive[:-1]) / 2
    return float((widths * heights).sum()) if len(widths) else float("nan")


def precision_recall_curve(scores: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Tradeoff:
    if _is_undefined(scores):
        return Tradeoff(*(np.array([np.nan]) for _ in range(3)))
    false, true, thresholds = _positives(scores, target, weight)
    precision = ratio(true, true + false, 0.0)
    recall = ratio(true, np.full_like(true, true[-1]), 1.0)
    return Tradeoff(np.append(precision[::-1], 1.0), np.append(recall[::-1], 0.0), thresholds[::-1])


def average_precision(scores: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    precision, recall, _ = precision_recall_curve(scores, target, weight)
    if np.isnan(precision).any():
        return float("nan")
    return max(0.0, float(-(np.diff(recall) * precision[:-1]).sum()))
