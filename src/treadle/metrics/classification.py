"""Metrics of classes: everything that counts of right, predicted and true classes tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.frontend.functions.arithmetic import eq, where
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.tensor import Operand
from treadle.metrics.direction import Direction
from treadle.metrics.labels import (
    Labels,
    class_counts,
    confusion_counts,
    labels_of,
    mean_over,
    refuse_outside,
)
from treadle.metrics.metric import Metric, Statistics, Totals, Value, ratio, total

AVERAGES = ("macro", "micro", "weighted", "binary", None)


@dataclass(frozen=True, kw_only=True)
class _Classes(Metric):
    """What metrics of classes have in common: how scores and targets are read."""

    classes: int | None = None
    axis: int = -1
    threshold: float = 0.5
    ignore_index: int | None = None

    def _labels(self, scores: Operand, target: Operand, weight: Operand | None) -> Labels:
        return labels_of(
            type(self).__name__,
            scores,
            target,
            weight,
            self.classes,
            self.axis,
            self.threshold,
            self.ignore_index,
        )


@dataclass(frozen=True, kw_only=True)
class Accuracy(_Classes):
    """How many are right, of all."""

    direction: ClassVar[Direction | None] = "max"

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch: the weight of what is right, and of all."""
        labels = self._labels(scores, target, weight)
        is_right = eq(labels.predicted, labels.target)
        dtype = labels.weight.dtype
        right = sum_of(where(is_right, labels.weight, 0), dtype=dtype)
        return {"right": right, "weight": sum_of(labels.weight, dtype=dtype)}

    def compute(self, totals: Totals) -> float:
        """NaN if nothing had a weight."""
        right, weight = total(self, totals, "right"), total(self, totals, "weight")
        return float(ratio(right, weight, np.nan))


@dataclass(frozen=True, kw_only=True)
class _Counts(_Classes):
    """Metrics of three counts for each class."""

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch: how often each class is right, predicted and true."""
        return class_counts(type(self).__name__, self._labels(scores, target, weight))

    def _counts(self, totals: Totals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        refuse_outside(self, totals)
        right, predicted = total(self, totals, "right"), total(self, totals, "predicted")
        return right, predicted, total(self, totals, "true")


@dataclass(frozen=True, kw_only=True)
class _Averaged(_Counts):
    """A quotient for each class, and how classes are averaged.

    `average` is "macro" (over classes that occur in targets or predictions), "micro" (counts of
    all classes together), "weighted" (by how often a class is true), "binary" (class 1 only) or
    None (an array of all). `zero_division` stands for a quotient by 0.
    """

    direction: ClassVar[Direction | None] = "max"

    average: str | None = "macro"
    zero_division: float = 0.0

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            shown = ", ".join(map(repr, AVERAGES))
            raise ArgumentError(type(self).__name__, f"average = {self.average!r}", f"Of {shown}.")

    def _average(self, totals: Totals, top: np.ndarray, bottom: np.ndarray) -> Value:
        _, predicted, true = self._counts(totals)
        if self.average == "micro":
            return float(ratio(top.sum(), bottom.sum(), self.zero_division))
        values = ratio(top, bottom, self.zero_division)
        if self.average is None:
            return values
        if self.average == "binary":
            if len(values) != 2:
                name = type(self).__name__
                raise ArgumentError(name, f'average="binary" of {len(values)} classes', "Use 2.")
            return float(values[1])
        occurs = (true != 0) | (predicted != 0)
        weights = true[occurs] if self.average == "weighted" else None
        return mean_over(values[occurs], weights)


@dataclass(frozen=True, kw_only=True)
class Precision(_Averaged):
    """How many of those predicted as a class are of it."""

    def compute(self, totals: Totals) -> Value:
        """right / predicted."""
        right, predicted, _ = self._counts(totals)
        return self._average(totals, right, predicted)


@dataclass(frozen=True, kw_only=True)
class Recall(_Averaged):
    """How many of a class are predicted as such."""

    def compute(self, totals: Totals) -> Value:
        """right / true."""
        right, _, true = self._counts(totals)
        return self._average(totals, right, true)


@dataclass(frozen=True, kw_only=True)
class F1(_Averaged):
    """The harmonic mean of precision and recall; `beta` counts recall so many times as much."""

    beta: float = 1.0

    def compute(self, totals: Totals) -> Value:
        """(1 + β²) right / (β² true + predicted)."""
        right, predicted, true = self._counts(totals)
        square = self.beta**2
        return self._average(totals, (1 + square) * right, square * true + predicted)


@dataclass(frozen=True, kw_only=True)
class Dice(_Averaged):
    """Twice the overlap of a class over the sum of both sizes: F1 under its name for images."""

    def compute(self, totals: Totals) -> Value:
        """2 right / (true + predicted)."""
        right, predicted, true = self._counts(totals)
        return self._average(totals, 2 * right, true + predicted)


@dataclass(frozen=True, kw_only=True)
class IoU(_Averaged):
    """The overlap of a class over the union: the Jaccard index, averaged mean IoU."""

    def compute(self, totals: Totals) -> Value:
        """right / (true + predicted − right)."""
        right, predicted, true = self._counts(totals)
        return self._average(totals, right, true + predicted - right)


@dataclass(frozen=True, kw_only=True)
class BalancedAccuracy(_Counts):
    """The mean recall of classes that are true; `adjusted` makes guessing 0 and the best 1."""

    direction: ClassVar[Direction | None] = "max"

    adjusted: bool = False

    def compute(self, totals: Totals) -> float:
        """NaN if nothing had a weight."""
        right, _, true = self._counts(totals)
        is_there = true != 0
        score = mean_over(ratio(right, true, np.nan), None)
        if not self.adjusted:
            return score
        classes = int(is_there.sum())
        return (score - 1 / classes) / (1 - 1 / classes) if classes > 1 else float("nan")


@dataclass(frozen=True, kw_only=True)
class MatthewsCorrelation(_Counts):
    """The correlation of predicted and true classes (MCC): −1 to 1; 0 where one of them is all."""

    direction: ClassVar[Direction | None] = "max"

    def compute(self, totals: Totals) -> float:
        """Of the counts as vectors over classes."""
        right, predicted, true = (c.astype(np.float64) for c in self._counts(totals))
        count = true.sum()
        both = right.sum() * count - true @ predicted
        own = (count**2 - predicted @ predicted) * (count**2 - true @ true)
        return float(both / np.sqrt(own)) if own else 0.0


@dataclass(frozen=True, kw_only=True)
class _Confusion(_Classes):
    """Metrics of all pairs of classes."""

    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch: how often each class was predicted as each."""
        return confusion_counts(type(self).__name__, self._labels(scores, target, weight))

    def _matrix(self, totals: Totals) -> np.ndarray:
        refuse_outside(self, totals)
        return total(self, totals, "confusion")


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix(_Confusion):
    """How often each class (rows) was predicted as each (columns).

    `normalize` divides by rows ("true"), columns ("pred") or everything ("all").
    """

    normalize: str | None = None

    def __post_init__(self) -> None:
        if self.normalize not in (None, "true", "pred", "all"):
            cause = f"normalize = {self.normalize!r}"
            raise ArgumentError("ConfusionMatrix", cause, 'Use "true", "pred", "all" or None.')

    def compute(self, totals: Totals) -> np.ndarray:
        """Counts, or parts of 1; 0 where there is nothing to divide by."""
        matrix = self._matrix(totals)
        if self.normalize is None:
            return matrix
        axis = {"true": 1, "pred": 0, "all": None}[self.normalize]
        return ratio(matrix, matrix.sum(axis, keepdims=True), 0.0)


@dataclass(frozen=True, kw_only=True)
class CohenKappa(_Confusion):
    """Agreement beyond chance; `weights` counts a mistake by the distance of classes.

    That is None, "linear" or "quadratic". NaN where chance agrees always, with one class.
    """

    direction: ClassVar[Direction | None] = "max"

    weights: str | None = None

    def __post_init__(self) -> None:
        if self.weights not in (None, "linear", "quadratic"):
            cause = f"weights = {self.weights!r}"
            raise ArgumentError("CohenKappa", cause, 'Use "linear", "quadratic" or None.')

    def compute(self, totals: Totals) -> float:
        """1 − Σ cost · found / Σ cost · expected."""
        matrix = self._matrix(totals).astype(np.float64)
        count, places = matrix.sum(), np.arange(len(matrix))
        distance = np.abs(places[:, None] - places)
        cost = {None: distance != 0, "linear": distance, "quadratic": distance**2}[self.weights]
        expected = ratio(np.outer(matrix.sum(1), matrix.sum(0)), count, 0.0)
        return float(1 - ratio((cost * matrix).sum(), (cost * expected).sum(), np.nan))
