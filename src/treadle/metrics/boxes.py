"""Metrics of boxes: overlaps, matching, and the mean average precision of COCO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import PROBABILITY, check_choice, check_number, check_whole
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.shaping import zeros
from treadle.frontend.tensor import Operand, Tensor
from treadle.metrics.direction import Direction
from treadle.metrics.labels import weights_of, whole
from treadle.metrics.metric import Metric, Statistics, Totals, Value, total

AREAS = {
    "all": (0.0, 1e10),
    "small": (0.0, 32.0**2),
    "medium": (32.0**2, 96.0**2),
    "large": (96.0**2, 1e10),
}
COCO_THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
RECALLS = np.linspace(0, 1, 101)


def box_iou(boxes1: object, boxes2: object) -> np.ndarray:
    """Intersection over union of each box (x₁, y₁, x₂, y₂) with each: (N, 4), (M, 4) → (N, M)."""
    a, b = (_as_boxes("box_iou", boxes) for boxes in (boxes1, boxes2))
    inside = _intersection(a, b)
    union = _area(a)[:, None] + _area(b)[None] - inside
    return _divided(inside, union)


def match_boxes(iou: object, threshold: float = 0.5) -> np.ndarray:
    """Which target each detection finds, or −1: (detections, targets) → (detections,).

    Detections are in falling order of their scores. Each takes the target that it overlaps most, at
    least by `threshold`, of those that none before it took.
    """
    check_number("match_boxes", "threshold", threshold, PROBABILITY)
    ious = _as_floats("match_boxes", iou)
    if ious.ndim != 2:
        raise ShapeError("match_boxes", f"IoU of shape {ious.shape}", "(detections, targets).")
    none = np.zeros(ious.shape[1], bool)
    return _matches(ious, np.array([threshold]), none, none)[0]


def _as_boxes(operation: str, given: object) -> np.ndarray:
    boxes = _as_floats(operation, given)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ShapeError(operation, f"boxes of shape {boxes.shape}", "(N, 4): x₁, y₁, x₂, y₂.")
    return boxes


def _as_floats(operation: str, given: object) -> np.ndarray:
    try:
        return np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(operation, f"{given!r} is no array", "Pass numbers.") from error


def _area(boxes: np.ndarray) -> np.ndarray:
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    return sides[:, 0] * sides[:, 1]


def _intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    sides = np.maximum(np.minimum(a[:, None, 2:], b[None, :, 2:]) - low, 0)
    return sides[..., 0] * sides[..., 1]


def _divided(part: np.ndarray, of: np.ndarray) -> np.ndarray:
    return np.where(of > 0, part / np.where(of > 0, of, 1), 0.0)


def _matches(
    ious: np.ndarray, thresholds: np.ndarray, ignored: np.ndarray, crowd: np.ndarray
) -> np.ndarray:
    """The target that each detection takes at each threshold, or −1: (thresholds, detections).

    Targets that count come before those that are ignored, of equals the last. A crowd may be taken
    by many.
    """
    detections, targets = ious.shape
    found = np.full((len(thresholds), detections), -1)
    is_free = np.ones((len(thresholds), targets), bool)
    least = np.minimum(thresholds, 1 - 1e-10)[:, None]
    rows = np.arange(len(thresholds))
    for d in range(detections if targets else 0):
        can = is_free & (ious[d] >= least)
        counted = can & ~ignored
        can = np.where(counted.any(1, keepdims=True), counted, can)
        scores = np.where(can, ious[d], -1.0)[:, ::-1]
        best = targets - 1 - scores.argmax(1)
        hit = can[rows, best]
        found[hit, d] = best[hit]
        is_free[rows[hit], best[hit]] = crowd[best[hit]]
    return found


class _Image(NamedTuple):
    """Detections and targets of one image, padding left out."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    target_boxes: np.ndarray
    target_labels: np.ndarray
    crowd: np.ndarray


class _Found(NamedTuple):
    """Detections of a class in falling order: scores, hits and what counts, by threshold."""

    scores: np.ndarray  # (detections,)
    is_hit: np.ndarray  # (thresholds, detections)
    is_ignored: np.ndarray
    targets: int  # that count


@dataclass(frozen=True, kw_only=True)
class MeanAveragePrecision(Metric):
    """COCO's average precision of detected boxes: over classes, and IoU from 0.5 to 0.95.

    `iou` is one threshold or some: 0.5 gives AP50. `area` is "all", "small", "medium" or "large",
    by COCO's pixels. `average=None` gives an array of classes 0, 1, …, NaN for those without
    targets; `max_detections` count for each image and class.
    """

    direction: ClassVar[Direction | None] = "max"

    iou: float | Sequence[float] = COCO_THRESHOLDS
    area: str = "all"
    max_detections: int = 100
    average: str | None = "macro"
    keeps_columns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = "MeanAveragePrecision"
        for threshold in self._thresholds():
            check_number(name, "iou", threshold, PROBABILITY)
        check_choice(name, "area", self.area, tuple(AREAS))
        check_whole(name, "max_detections", self.max_detections)
        if self.average not in ("macro", None):
            raise ArgumentError(name, f"average = {self.average!r}", 'Use "macro" or None.')

    def _thresholds(self) -> Sequence[Any]:
        return self.iou if isinstance(self.iou, (tuple, list)) else [self.iou]

    def update(self, scores: Any, target: Any, weight: Operand | None = None) -> Statistics:
        """What a batch has, all of it.

        `scores` are a dict of "boxes" (N, D, 4), "scores" and "labels" (N, D), `target` one of
        "boxes" (N, G, 4), "labels" (N, G) and perhaps "crowd" (N, G). A label below 0 is padding;
        `weight` (N,) is 0 for images that are left out.
        """
        boxes, values, labels = _taken("scores", scores, ("boxes", "scores", "labels"))
        target_boxes, target_labels = _taken("target", target, ("boxes", "labels"))
        given = target.get("crowd")
        crowd = target_labels * 0 if given is None else cast(as_tensor(given), dtypes.int32)
        _check_rows(boxes, values, labels)
        _check_rows(target_boxes, target_labels, crowd)
        if boxes.shape[0] != target_boxes.shape[0]:
            cause = f"boxes {boxes.type} for targets {target_boxes.type}"
            raise ShapeError("MeanAveragePrecision", cause, "Both have a row for each image.")
        images = zeros((boxes.shape[0],), dtypes.int32)
        return {
            "boxes": boxes,
            "scores": values,
            "labels": whole("MeanAveragePrecision", labels),
            "target_boxes": target_boxes,
            "target_labels": whole("MeanAveragePrecision", target_labels),
            "crowd": crowd,
            "weight": weights_of("MeanAveragePrecision", images, weight, None),
        }

    def compute(self, totals: Totals) -> Value:
        """The mean over classes that have targets and over thresholds; NaN if there are none."""
        total(self, totals, "weight")
        images = list(_images(totals))
        labels = np.concatenate([i.target_labels for i in images] or [np.zeros(0, np.int64)])
        classes = int(labels.max()) + 1 if len(labels) else 0
        values = np.array([self._of_class(images, c) for c in range(classes)])
        if self.average is None:
            return values
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else float("nan")

    def _of_class(self, images: Sequence[_Image], label: int) -> float:
        found = [self._in_image(image, label) for image in images]
        targets = sum(f.targets for f in found)
        if not targets:
            return float("nan")
        scores = np.concatenate([f.scores for f in found])
        order = np.argsort(-scores, kind="stable")
        is_hit = np.concatenate([f.is_hit for f in found], 1)[:, order]
        is_ignored = np.concatenate([f.is_ignored for f in found], 1)[:, order]
        rows = zip(is_hit, is_ignored, strict=True)
        return float(np.mean([interpolated_precision(h[~i], targets) for h, i in rows]))

    def _in_image(self, image: _Image, label: int) -> _Found:
        """Detections of a class in one image, matched with its targets."""
        own, wanted = image.labels == label, image.target_labels == label
        order = np.argsort(-image.scores[own], kind="stable")[: self.max_detections]
        boxes, scores = image.boxes[own][order], image.scores[own][order]
        targets, crowd = image.target_boxes[wanted], image.crowd[wanted]
        low, high = AREAS[self.area]
        size, target_size = _area(boxes), _area(targets)
        ignored = crowd | (target_size < low) | (target_size > high)
        inside = _intersection(boxes, targets)
        union = np.where(crowd, size[:, None], size[:, None] + target_size - inside)
        thresholds = np.array(self._thresholds(), np.float64)
        found = _matches(_divided(inside, union), thresholds, ignored, crowd)
        is_taken = found >= 0
        of_ignored = ignored[np.maximum(found, 0)] if len(targets) else np.zeros_like(is_taken)
        is_outside = (size < low) | (size > high)
        is_ignored = np.where(is_taken, of_ignored, is_outside)
        return _Found(scores, is_taken, is_ignored, int((~ignored).sum()))


def interpolated_precision(is_hit: np.ndarray, targets: int) -> float:
    """The mean over 101 recalls of the best precision at that recall or a greater one."""
    hits = np.cumsum(is_hit)
    precision = hits / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(hits / targets, RECALLS, side="left")
    return float(np.append(best, 0.0)[at].mean())


def _images(totals: Totals) -> Iterator[_Image]:
    """The images of all batches, whose numbers of boxes may differ."""
    names = ("boxes", "scores", "labels", "target_boxes", "target_labels", "crowd", "weight")
    for batch in zip(*(totals[n] for n in names), strict=True):
        for boxes, scores, labels, target_boxes, target_labels, crowd, weight in zip(
            *batch, strict=True
        ):
            if weight:
                own, there = labels >= 0, target_labels >= 0
                yield _Image(
                    boxes[own],
                    scores[own],
                    labels[own],
                    target_boxes[there],
                    target_labels[there],
                    crowd[there] != 0,
                )


def _taken(what: str, given: object, names: Sequence[str]) -> list[Tensor]:
    if not isinstance(given, Mapping) or any(n not in given for n in names):
        shown = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ArgumentError(
            "MeanAveragePrecision",
            f"the {what} are {shown or 'empty'}",
            f"Pass a dict of {', '.join(names)}.",
        )
    return [as_tensor(given[n]) for n in names]


def _check_rows(boxes: Tensor, *others: Tensor) -> None:
    is_right = boxes.ndim == 3 and boxes.shape[-1] == 4 and boxes.dtype.is_float
    if not is_right or any(t.shape != boxes.shape[:2] for t in others):
        shown = ", ".join(str(t.type) for t in (boxes, *others))
        raise ShapeError(
            "MeanAveragePrecision",
            f"boxes and what belongs to them are {shown}",
            "Boxes are floats (images, boxes, 4): x₁, y₁, x₂, y₂; the rest is (images, boxes).",
        )
