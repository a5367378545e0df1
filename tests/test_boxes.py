"""Metrics of boxes beside COCO's definition, written out plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treadle as td
from refusals import refused
from treadle import losses, metrics, optim

# The reference: image by image, class by class, threshold by threshold, one pair at a time.

AREAS = {"all": (0, 1e10), "small": (0, 1024), "medium": (1024, 9216), "large": (9216, 1e10)}


def area(box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def iou(box, other, is_crowd: bool = False) -> float:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    inside = max(0.0, width) * max(0.0, height)
    union = area(box) if is_crowd else area(box) + area(other) - inside
    return inside / union if union > 0 else 0.0


def matched(detections, targets, threshold, low, high):
    """COCOeval.evaluateImg: (score, whether it hit, whether it is ignored), and targets."""
    targets = [(box, crowd, bool(crowd) or not low <= area(box) <= high) for box, crowd in targets]
    targets.sort(key=lambda t: t[2])
    taken = [False] * len(targets)
    found = []
    for score, box in detections:
        best, at = min(threshold, 1 - 1e-10), None
        for g, (other, crowd, ignored) in enumerate(targets):
            if taken[g] and not crowd:
                continue
            if at is not None and not targets[at][2] and ignored:
                break
            overlap = iou(box, other, crowd)
            if overlap < best:
                continue
            best, at = overlap, g
        if at is not None:
            taken[at] = True
        outside = not low <= area(box) <= high
        found.append((score, at is not None, outside if at is None else targets[at][2]))
    return found, sum(not ignored for _, _, ignored in targets)


def precision_of(images, label, threshold, most, limits) -> float | None:
    """COCOeval.accumulate for one class and threshold."""
    found, count = [], 0
    for detections, targets in images:
        own = sorted(((s, b) for s, b, c in detections if c == label), key=lambda d: -d[0])[:most]
        wanted = [(b, crowd) for b, c, crowd in targets if c == label]
        hits, there = matched(own, wanted, threshold, *limits)
        found += hits
        count += there
    if not count:
        return None
    found.sort(key=lambda d: -d[0])
    true = false = 0
    recalls, precisions = [], []
    for _, is_hit, ignored in found:
        if not ignored:
            true, false = true + is_hit, false + (not is_hit)
            recalls.append(true / count)
            precisions.append(true / (true + false))
    total = 0.0
    for wanted in np.linspace(0, 1, 101):
        total += max(
            (p for r, p in zip(recalls, precisions, strict=True) if r >= wanted), default=0
        )
    return total / 101


def coco(images, thresholds, most=100, which="all") -> np.ndarray:
    """By class; NaN where there are no targets."""
    labels = [c for _, targets in images for _, c, _ in targets]
    classes = max(labels, default=-1) + 1
    rows = []
    for label in range(classes):
        values = [precision_of(images, label, t, most, AREAS[which]) for t in thresholds]
        rows.append([np.nan if v is None else v for v in values])
    return np.array(rows).reshape(classes, len(thresholds)).mean(1)


# Scenes: detections that are near targets, far ones, several of one, crowds, all sizes


def scene(seed: int, images: int = 4, boxes: int = 7, targets: int = 5, classes: int = 3):
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 300, (images, targets, 2))
    side = np.exp(rng.uniform(2, 5.3, (images, targets, 2)))
    truth = np.concatenate([corner, corner + side], -1)
    labels = rng.integers(0, classes, (images, targets))
    chosen = rng.integers(0, targets, (images, boxes))
    near = np.take_along_axis(truth, chosen[..., None], 1)
    moved = near + rng.normal(size=near.shape) * 0.1 * (near[..., 2:3] - near[..., :1])
    found = np.where(rng.random((images, boxes, 1)) < 0.8, moved, rng.uniform(0, 300, near.shape))
    own = np.take_along_axis(labels, chosen, 1)
    own = np.where(rng.random(own.shape) < 0.8, own, rng.integers(0, classes, own.shape))
    scores = rng.choice(np.linspace(0.1, 0.9, 9), (images, boxes))  # some are equal
    padded = rng.random((images, targets)) < 0.15
    unused = rng.random((images, boxes)) < 0.1
    return (
        {"boxes": found.astype(np.float32), "scores": scores.astype(np.float32),
         "labels": np.where(unused, -1, own).astype(np.int32)},
        {"boxes": truth.astype(np.float32), "labels": np.where(padded, -1, labels).astype(np.int32),
         "crowd": (rng.random((images, targets)) < 0.2).astype(np.int32)},
    )  # fmt: skip


def as_lists(found: dict[str, Any], target: dict[str, Any]) -> list[Any]:
    images = []
    for n in range(len(found["boxes"])):
        detections = [
            (float(s), b.astype(float), int(c))
            for s, b, c in zip(
                found["scores"][n], found["boxes"][n], found["labels"][n], strict=True
            )
            if c >= 0
        ]
        crowds = target.get("crowd", target["labels"] * 0)[n]
        targets = [
            (b.astype(float), int(c), int(crowd))
            for b, c, crowd in zip(target["boxes"][n], target["labels"][n], crowds, strict=True)
            if c >= 0
        ]
        images.append((detections, targets))
    return images


COCO = [0.5 + 0.05 * i for i in range(10)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"iou": 0.5},
        {"iou": [0.3, 0.75, 1.0]},
        {"area": "small"},
        {"area": "medium"},
        {"area": "large"},
        {"max_detections": 1},
    ],
    ids=repr,
)
def test_average_precision_is_cocos(options: dict[str, Any]) -> None:
    thresholds = options.get("iou", COCO)
    thresholds = thresholds if isinstance(thresholds, list) else [thresholds]
    most, which = options.get("max_detections", 100), options.get("area", "all")
    some = 0
    for seed in range(6):
        found, target = scene(seed, boxes=1 + 4 * seed)
        if seed % 2:
            target.pop("crowd")
        expected = coco(as_lists(found, target), np.round(thresholds, 2), most, which)
        by_class = metrics.MeanAveragePrecision(average=None, **options)(found, target)
        np.testing.assert_allclose(by_class, expected, rtol=1e-12, err_msg=f"seed {seed}")
        value = metrics.MeanAveragePrecision(**options)(found, target)
        mean = np.nanmean(expected) if not np.isnan(expected).all() else np.nan
        np.testing.assert_allclose(value, mean, rtol=1e-12)
        some += value > 0
    assert some >= 2


def test_batches_of_other_sizes_and_images_without_weight() -> None:
    """The value is that of all images together; an image without weight is not there."""
    one, two = scene(1, boxes=9, targets=6), scene(2, images=3, boxes=2, targets=4)
    metric = metrics.MeanAveragePrecision()
    totals = metric.init()
    metric.add(totals, metric.update(*one))
    metric.add(totals, metric.update(*two, weight=np.array([1.0, 0.0, 1.0], np.float32)))
    images = as_lists(*one) + [i for n, i in enumerate(as_lists(*two)) if n != 1]
    np.testing.assert_allclose(metric.compute(totals), np.nanmean(coco(images, np.round(COCO, 2))))


def test_edges() -> None:
    metric = metrics.MeanAveragePrecision()
    found, target = scene(3)
    exact = {"boxes": target["boxes"], "scores": np.ones((4, 5), np.float32)}
    kept = {n: target[n] for n in ("boxes", "labels")}
    assert metric(exact | {"labels": target["labels"]}, kept) == 1
    assert metric(found | {"labels": found["labels"] * 0 - 1}, target) == 0  # nothing is found
    assert np.isnan(metric(found, kept | {"labels": kept["labels"] * 0 - 1}))  # nothing is there
    empty = {"boxes": np.zeros((4, 0, 4), np.float32), "labels": np.zeros((4, 0), np.int32)}
    assert np.isnan(metric(found, empty))
    assert metric(empty | {"scores": np.zeros((4, 0), np.float32)}, kept) == 0
    with pytest.raises(td.ArgumentError, match="nothing was added"):
        metric.compute(metric.init())


def test_overlaps_and_matches() -> None:
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 5, (17, 2))
    boxes = np.concatenate([low, low + rng.uniform(-0.5, 4, (17, 2))], 1)  # some are empty
    found = metrics.box_iou(boxes[:9], boxes[9:])
    expected = [[iou(a, b) for b in boxes[9:]] for a in boxes[:9]]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    pairs = losses.box_iou(boxes[:8], boxes[8:16]).numpy()  # those of the loss, each with its own
    np.testing.assert_allclose(np.diag(metrics.box_iou(boxes[:8], boxes[8:16])), pairs, atol=1e-6)
    for threshold in (0.0, 0.1, 0.4):
        own = metrics.match_boxes(found, threshold)
        taken: set[int] = set()
        for d, row in enumerate(found):
            free = [g for g in range(8) if g not in taken and row[g] >= threshold]
            best = max(free, key=lambda g: (row[g], g), default=-1)
            assert own[d] == best
            taken |= {best} - {-1}
    assert metrics.match_boxes(np.zeros((3, 0))).tolist() == [-1, -1, -1]


def test_inside_a_step() -> None:
    """Captured by the evaluation of a trainer, as any metric."""
    found, target = scene(5)
    group = metrics.Group(
        {"map": metrics.MeanAveragePrecision(), "map50": metrics.MeanAveragePrecision(iou=0.5)}
    )

    def loss(model, batch):
        scores = batch["found"]["scores"] * model["scale"]
        group.capture(batch["found"] | {"scores": scores}, batch["target"])
        return losses.mse(scores, td.ones_like(scores))

    batch = {"found": found, "target": target}
    model = {"scale": np.float32(1)}
    step = td.compile_step(model, loss, optim.sgd(0.0), batch, device="cpu")
    values = td.Trainer(step, metrics=group, progress="off").evaluate([batch, batch])
    images = as_lists(found, target)
    np.testing.assert_allclose(values["map"], np.nanmean(coco(images * 2, np.round(COCO, 2))))
    np.testing.assert_allclose(values["map50"], np.nanmean(coco(images * 2, [0.5])))


def test_wrong_boxes() -> None:
    metric = metrics.MeanAveragePrecision()
    found, target = scene(0)
    few = {n: v[:2] for n, v in target.items()}
    flat = target | {"boxes": target["boxes"][..., 0]}
    for call, error, said in (
        (lambda: metric(found["boxes"], target), td.ArgumentError, "boxes, scores, labels"),
        (lambda: metric(found, {"boxes": target["boxes"]}), td.ArgumentError, "boxes, labels"),
        (lambda: metric(found, few), td.ShapeError, "a row for each image"),
        (lambda: metric(found, flat), td.ShapeError, "(images, boxes, 4)"),
        (lambda: metrics.MeanAveragePrecision(iou=1.5), td.ArgumentError, "iou"),
        (lambda: metrics.MeanAveragePrecision(area="tiny"), td.ArgumentError, "tiny"),
        (lambda: metrics.MeanAveragePrecision(average="micro"), td.ArgumentError, "micro"),
        (lambda: metrics.MeanAveragePrecision(max_detections=0), td.ArgumentError, "max_det"),
    ):
        refused(call, error, "MeanAveragePrecision", said)
    refused(lambda: metrics.box_iou(np.ones(4), np.ones((1, 4))), td.ShapeError, "box_iou", "(4,)")
    refused(lambda: metrics.match_boxes(np.ones(4)), td.ShapeError, "match_boxes", "(4,)")
