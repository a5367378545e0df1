"""Scores and targets as class numbers; how often each occurs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.coerce import as_tensor, cast, common_shape, spread
from treadle.frontend.functions.arithmetic import ge, gt, logical_and, logical_not, lt, ne, where
from treadle.frontend.functions.indexing import scatter_add
from treadle.frontend.functions.reductions import argmax
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import flatten, moveaxis, ones, zeros
from treadle.frontend.tensor import Operand, Tensor
from treadle.metrics.metric import Metric, Totals, total

SHAPES = (
    "Scores are floats with an axis of classes more than the targets, floats of the targets' "
    "shape (one score of class 1 each), or class numbers."
)


@dataclass(frozen=True, slots=True)
class Labels:
    """Predicted and true classes and their weights, all in one row."""

    predicted: Tensor
    target: Tensor
    weight: Tensor  # int32, or float where weights are
    classes: int | None  # None: class numbers were given, and not how many classes there are


def classes_last(name: str, scores: Operand, target: Operand, axis: int) -> tuple[Tensor, Tensor]:
    """Scores (…, C) and whole targets (…)."""
    x, y = as_tensor(scores), whole(name, target)
    if not x.dtype.is_float or x.ndim != y.ndim + 1:
        raise ShapeError(name, f"scores {x.type} for targets {y.type}", SHAPES)
    moved = moveaxis(x, axis, -1)
    if moved.shape[:-1] != y.shape:
        raise ShapeError(
            name,
            f"scores {x.type} with classes along axis {axis} for targets {y.type}",
            "axis= says along which axis classes lie.",
        )
    return moved, y


def whole(name: str, target: Operand) -> Tensor:
    """Class numbers, at least int32, so that an index to ignore may be negative."""
    y = as_tensor(target)
    if y.dtype.is_float:
        raise DTypeError(name, f"targets are {y.type}", "They are class numbers: cast to int32.")
    return cast(y, dtypes.int32) if y.dtype is dtypes.bool_ or y.dtype.bits < 32 else y


def labels_of(
    name: str,
    scores: Operand,
    target: Operand,
    weight: Operand | None,
    classes: int | None,
    axis: int,
    threshold: float,
    ignore_index: int | None,
) -> Labels:
    """The classes that scores choose: the greatest, above the threshold, or as given."""
    x, y = as_tensor(scores), whole(name, target)
    if x.dtype.is_float and x.ndim == y.ndim + 1:
        moved, y = classes_last(name, x, y, axis)
        predicted, found = argmax(moved, -1), moved.shape[-1]
        if classes not in (None, found):
            raise ArgumentError(name, f"classes = {classes}, scores have {found}", "Leave it out.")
        classes = found
    elif x.shape != y.shape:
        raise ShapeError(name, f"scores {x.type} for targets {y.type}", SHAPES)
    elif x.dtype.is_float:
        predicted, classes = cast(gt(x, threshold), dtypes.int32), classes or 2
    else:
        predicted, classes = whole(name, x), 2 if x.dtype is dtypes.bool_ else classes
    amount = weights_of(name, y, weight, ignore_index)
    return Labels(flatten(predicted), flatten(y), flatten(amount), classes)


def weights_of(
    name: str, target: Tensor, weight: Operand | None, ignore_index: int | None
) -> Tensor:
    """A weight for each target: counts in int32, floats as given; 0 where it is ignored."""
    if weight is None:
        amount = ones(target.shape, dtypes.int32)
    else:
        given = as_tensor(weight)
        dtype = given.dtype if given.dtype.is_float else dtypes.int32
        if common_shape(name, (given, target)) != target.shape:
            raise ShapeError(name, f"weights {given.type} for targets {target.type}")
        amount = spread(cast(given, dtype), target.shape, dtype)
    return amount if ignore_index is None else where(ne(target, ignore_index), amount, 0)


def counted(index: Tensor, amount: Tensor, size: int) -> Tensor:
    """The sum of amounts at each index from 0 to size − 1."""
    return scatter_add(zeros((size,), amount.dtype), index, amount)


def is_inside(index: Tensor, size: int) -> Tensor:
    return logical_and(ge(index, 0), lt(index, size))


def refuse_outside(metric: Metric, totals: Totals) -> None:
    """Labels that no class has were counted by the program, which cannot raise."""
    outside = int(total(metric, totals, "outside"))
    if outside:
        raise ArgumentError(
            type(metric).__name__,
            f"{outside} labels are none of the classes, which count from 0",
            "Pass ignore_index= for those that are to be left out.",
        )


def class_counts(name: str, labels: Labels) -> dict[str, Tensor]:
    """For each class how often it is right, predicted and true; and labels of no class."""
    size = known_classes(name, labels)
    inside, index, guess, amount = within(labels, size)
    right = where(ne(guess, index), 0, amount)
    return {
        "right": counted(index, right, size),
        "predicted": counted(guess, amount, size),
        "true": counted(index, amount, size),
        "outside": outside_of(labels, inside),
    }


def confusion_counts(name: str, labels: Labels) -> dict[str, Tensor]:
    """How often each class (rows) was predicted as each (columns)."""
    size = known_classes(name, labels)
    inside, index, guess, amount = within(labels, size)
    flat = counted(index * size + guess, amount, size * size)
    return {"confusion": flat.reshape((size, size)), "outside": outside_of(labels, inside)}


def known_classes(name: str, labels: Labels) -> int:
    if labels.classes is None:
        raise ArgumentError(
            name, "predictions are class numbers, of how many is not known", "Pass classes=."
        )
    return labels.classes


def within(labels: Labels, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which labels are classes; targets, predictions and weights, all 0 where they are not."""
    inside = logical_and(is_inside(labels.target, size), is_inside(labels.predicted, size))
    index, guess = where(inside, labels.target, 0), where(inside, labels.predicted, 0)
    return inside, index, guess, where(inside, labels.weight, 0)


def outside_of(labels: Labels, inside: Tensor) -> Tensor:
    """Labels that count for something and are no class."""
    is_wrong = logical_and(ne(labels.weight, 0), logical_not(inside))
    return sum_of(is_wrong, dtype=dtypes.int32)


def mean_over(values: np.ndarray, weights: np.ndarray | None) -> float:
    """The mean of what is not NaN, as scikit-learn averages: without weights if all are 0."""
    kept = ~np.isnan(values)
    if not kept.any():
        return float("nan")
    chosen = values[kept]
    if weights is None or not weights[kept].sum():
        return float(chosen.mean())
    return float(np.average(chosen, weights=weights[kept]))
