"""Every metric with few classes and many rows: compiled statistics, scikit-learn's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

import treadle as td
from sizes import MOST, assert_near, compiled, rounded
from test_metrics import _quietly
from treadle import metrics
from treadle.metrics.metric import Metric

Reference = Callable[..., Any]  # of target, scores and weight


def of_labels(function: Reference, **options: Any) -> Reference:
    """A function of predicted labels as one of scores."""

    def of_scores(target: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> Any:
        return function(target, scores.argmax(1), sample_weight=weight, **options)

    return of_scores


def with_labels(function: Reference, **options: Any) -> Reference:
    """The same with all classes named, whether they occur or not."""

    def of_scores(target: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> Any:
        labels = range(scores.shape[1])
        given = {"sample_weight": weight, "labels": labels} | options
        return function(target, scores.argmax(1), **given)

    return of_scores


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def top_two(target: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> float:
    if scores.shape[1] == 2:
        return 1.0  # scikit-learn wants more classes than k
    labels = range(scores.shape[1])
    return sk.top_k_accuracy_score(target, scores, k=2, labels=labels, sample_weight=weight)


def perplexity(target: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> float:
    labels = range(scores.shape[1])
    return np.exp(sk.log_loss(target, softmax(scores), labels=labels, sample_weight=weight))


def gaps(target: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> tuple[Any, Any]:
    """How far confidence is from accuracy in each of 15 bins, times their weight; and the weight."""
    p = softmax(scores)
    sure, right = p.max(1), p.argmax(1) == target
    places = np.ceil(sure * 15).astype(int) - 1  # (low, high]
    sums = [
        np.bincount(places, w * weight, minlength=15) for w in (sure, right, np.ones_like(sure))
    ]
    return np.abs(sums[0] - sums[1]), sums[2]


def ece(*given: np.ndarray) -> float:
    apart, weight = gaps(*given)
    return apart.sum() / weight.sum()


def mce(*given: np.ndarray) -> float:
    apart, weight = gaps(*given)
    return (apart[weight > 0] / weight[weight > 0]).max()


def one_against_rest(function: Reference) -> Reference:
    """The mean over classes of a function of two."""

    def of_scores(target: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> Any:
        pairs = ((target == k, scores[:, k]) for k in range(scores.shape[1]))
        return np.mean([function(*pair, sample_weight=weight) for pair in pairs])

    return of_scores


ZERO = {"average": "macro", "zero_division": 0.0}
CLASSES: dict[str, tuple[Metric, Reference]] = {
    "Accuracy": (metrics.Accuracy(), of_labels(sk.accuracy_score)),
    "TopK": (metrics.TopK(2), top_two),
    "Precision": (metrics.Precision(**ZERO), of_labels(sk.precision_score, **ZERO)),
    "Recall": (metrics.Recall(**ZERO), of_labels(sk.recall_score, **ZERO)),
    "F1": (metrics.F1(**ZERO), of_labels(sk.f1_score, **ZERO)),
    "Dice": (metrics.Dice(**ZERO), of_labels(sk.f1_score, **ZERO)),
    "IoU": (metrics.IoU(**ZERO), of_labels(sk.jaccard_score, **ZERO)),
    "BalancedAccuracy": (metrics.BalancedAccuracy(), of_labels(sk.balanced_accuracy_score)),
    "MatthewsCorrelation": (metrics.MatthewsCorrelation(), of_labels(sk.matthews_corrcoef)),
    "CohenKappa": (metrics.CohenKappa(), with_labels(sk.cohen_kappa_score)),
    "ConfusionMatrix": (metrics.ConfusionMatrix(), with_labels(sk.confusion_matrix)),
    "Perplexity": (metrics.Perplexity(), perplexity),
    "ECE": (metrics.ECE(), ece),
    "MCE": (metrics.MCE(), mce),
    "RocAuc": (metrics.RocAuc(), one_against_rest(sk.roc_auc_score)),
    "AveragePrecision": (
        metrics.AveragePrecision(),
        one_against_rest(sk.average_precision_score),
    ),
}


def curve(function: Reference) -> Reference:
    def of_scores(target: np.ndarray, scores: np.ndarray, weight: np.ndarray) -> Any:
        return function(target, scores, sample_weight=weight)

    return of_scores


# Of the score of one class, and of relevances (rows, items).
TWO: dict[str, tuple[Metric, Reference]] = {
    "RocCurve": (metrics.RocCurve(), curve(sk.roc_curve)),
    "PrecisionRecallCurve": (metrics.PrecisionRecallCurve(), curve(sk.precision_recall_curve)),
}
OTHERS = {
    "NDCG": "test_rankings_by_relevance",
    "Average": "test_averages",
    "MeanAveragePrecision": "of boxes: test_boxes.py",
    "Group": "holds all others",
    "Metric": "the base",
}


def test_every_metric_has_a_row_or_a_reason() -> None:
    public = {n for n, v in vars(metrics).items() if isinstance(v, type)}
    assert CLASSES.keys() | TWO.keys() | OTHERS.keys() == public
    assert all(type(m).__name__ == n for n, (m, _) in (CLASSES | TWO).items())


def batches() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Scores, targets with every class in them, and weights, for each size."""
    found = []
    for f, n in MOST:
        rng = np.random.default_rng(f * n)
        target = rng.permutation(np.arange(n) % f).astype(np.int32)
        scores = rng.normal(size=(n, f)) + np.eye(f)[target]
        found.append((rounded(scores), target, rounded(rng.uniform(0.5, 2.0, n))))
    return found


def check(table: dict[str, tuple[Metric, Reference]], given: list[tuple[np.ndarray, ...]]) -> None:
    """Statistics of all sizes by one program, the value of each beside its reference."""
    group = metrics.Group({n: m for n, (m, _) in table.items()})

    def together(given: list[Any]) -> Any:
        return [group.update(*each) for each in given]

    for (f, n), statistics, (scores, target, weight) in zip(
        MOST, compiled(together, given), given, strict=True
    ):
        totals = group.init()
        group.add(totals, statistics)
        for name, value in group.compute(totals).items():
            expected = _quietly(table[name][1], target, scores, weight)
            shown = f"{name} of {f} classes, batch {n}"
            for a, b in zip(np.atleast_1d(value), np.atleast_1d(expected), strict=True):
                assert_near(a, b, shown)


def test_of_classes() -> None:
    check(CLASSES, batches())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_curves() -> None:
    group = metrics.Group({n: m for n, (m, _) in TWO.items()})
    given = [(x[:, 0], (y == 0).astype(np.int32), w) for x, y, w in batches()]
    found = compiled(lambda given: [group.update(*each) for each in given], given)
    for statistics, (scores, target, weight) in zip(found, given, strict=True):
        totals = group.init()
        group.add(totals, statistics)
        for name, value in group.compute(totals).items():
            for a, b in zip(value, TWO[name][1](target, scores, weight), strict=True):
                assert_near(a[np.isfinite(b)], b[np.isfinite(b)], name)


def test_rankings_by_relevance() -> None:
    metric = metrics.NDCG()
    gains = [
        (x, np.random.default_rng(i).integers(0, 4, x.shape).astype(np.float64), w)
        for i, (x, _, w) in enumerate(batches())
    ]
    found = compiled(lambda given: [metric.update(*each) for each in given], gains)
    for statistics, (scores, gain, weight) in zip(found, gains, strict=True):
        totals = metric.init()
        metric.add(totals, statistics)
        expected = sk.ndcg_score(gain, scores, sample_weight=weight)
        assert_near(metric.compute(totals), expected, f"NDCG of {scores.shape}")


def test_averages() -> None:
    metric = metrics.Average()
    given = [(x, w[:, None]) for x, _, w in batches()]

    def together(given: list[Any]) -> Any:
        return [metric.update(td.tanh(x), weight=td.expand(w, *x.shape)) for x, w in given]

    for statistics, (x, w) in zip(compiled(together, given), given, strict=True):
        totals = metric.init()
        metric.add(totals, statistics)
        expected = np.average(np.tanh(x), weights=np.broadcast_to(w, x.shape))
        assert_near(metric.compute(totals), expected, f"the mean of {x.shape}")
