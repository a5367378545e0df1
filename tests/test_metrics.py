"""Metrics against scikit-learn, on random and degenerate data; streamed, compiled, captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sklearn import calibration
from sklearn import metrics as reference

import treadle as td
from treadle import losses, metrics, nn, optim
from treadle.metrics.metric import Metric

Arrays = tuple[np.ndarray, ...]
CLASSES = 4


def _scores(labels: np.ndarray) -> np.ndarray:
    """Scores whose greatest is at the label."""
    return np.eye(CLASSES)[labels] * 5 + np.linspace(0, 1, CLASSES)


def _class_cases() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Scores (N, 4) and targets: random, and everything that divides by zero somewhere."""
    rng = np.random.default_rng(0)
    for i, count in enumerate((1, 2, 7, 100)):
        yield f"random{i}", rng.normal(size=(count, CLASSES)), rng.integers(0, CLASSES, count)
    target = rng.integers(0, CLASSES, 40)
    yield "ties", rng.integers(0, 2, (40, CLASSES)).astype(float), target
    yield "all equal", np.zeros((40, CLASSES)), target
    yield "one class predicted", _scores(np.full(40, 2)), target
    yield "one class true", rng.normal(size=(40, CLASSES)), np.full(40, 1)
    yield "one class both", _scores(np.full(40, 3)), np.full(40, 3)
    yield "always right", _scores(target), target
    yield "always wrong", _scores((target + 1) % CLASSES), target
    yield "a class is missing", _scores(rng.integers(0, 2, 40) * 3), rng.integers(0, 2, 40) * 3
    yield "predicted only", _scores(rng.integers(0, CLASSES, 40)), rng.integers(0, 2, 40)


CLASS_CASES = {name: arrays for name, *arrays in _class_cases()}
Reference = Callable[..., Any]


def _by_labels(function: Reference, **options: Any) -> Reference:
    """A function of labels as one of scores."""

    def of_scores(target: np.ndarray, scores: np.ndarray, **more: Any) -> Any:
        return function(target, scores.argmax(-1), **options, **more)

    return of_scores


def _averaged(name: str, ours: type[Metric], function: Reference) -> Iterator[Any]:
    for average in ("macro", "micro", "weighted"):
        options = {"average": average, "zero_division": 0.0}
        yield pytest.param(ours(**options), _by_labels(function, **options), id=f"{name}-{average}")
    every = {"average": None, "zero_division": 1.0}
    labels = {"labels": range(CLASSES)}
    yield pytest.param(ours(**every), _by_labels(function, **every, **labels), id=f"{name}-none")


def _f2(*arguments: Any, **options: Any) -> Any:
    return reference.fbeta_score(*arguments, beta=2.0, **options)


def _top_k(k: int) -> Reference:
    def function(target: np.ndarray, scores: np.ndarray, **more: Any) -> Any:
        labels = range(CLASSES)
        return reference.top_k_accuracy_score(target, scores, k=k, labels=labels, **more)

    return function


def _perplexity(target: np.ndarray, scores: np.ndarray, **more: Any) -> float:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    p = powers / powers.sum(-1, keepdims=True)
    return np.exp(reference.log_loss(target, p, labels=range(CLASSES), **more))


LABELS = range(CLASSES)
CLASS_METRICS = [
    pytest.param(metrics.Accuracy(), _by_labels(reference.accuracy_score), id="accuracy"),
    *(pytest.param(metrics.TopK(k), _top_k(k), id=f"top{k}") for k in (1, 2, 3, 4)),
    *_averaged("precision", metrics.Precision, reference.precision_score),
    *_averaged("recall", metrics.Recall, reference.recall_score),
    *_averaged("f1", metrics.F1, reference.f1_score),
    *_averaged("dice", metrics.Dice, reference.f1_score),
    pytest.param(
        metrics.F1(beta=2.0), _by_labels(_f2, average="macro", zero_division=0.0), id="f2"
    ),
    *_averaged("iou", metrics.IoU, reference.jaccard_score),
    pytest.param(
        metrics.BalancedAccuracy(), _by_labels(reference.balanced_accuracy_score), id="balanced"
    ),
    pytest.param(metrics.MatthewsCorrelation(), _by_labels(reference.matthews_corrcoef), id="mcc"),
    *(
        pytest.param(
            metrics.CohenKappa(weights=weights),
            _by_labels(reference.cohen_kappa_score, weights=weights, labels=LABELS),
            id=f"kappa-{weights}",
        )
        for weights in (None, "linear", "quadratic")
    ),
    *(
        pytest.param(
            metrics.ConfusionMatrix(normalize=normalize),
            _by_labels(reference.confusion_matrix, normalize=normalize, labels=LABELS),
            id=f"confusion-{normalize}",
        )
        for normalize in (None, "true", "pred", "all")
    ),
    pytest.param(metrics.Perplexity(), _perplexity, id="perplexity"),
]


def _quietly(function: Reference, *arguments: Any, **options: Any) -> Any:
    """scikit-learn warns where it divides by zero; the value is what counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **options)


def _same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CLASS_CASES)
@pytest.mark.parametrize(("metric", "function"), CLASS_METRICS)
def test_of_classes(metric: Metric, function: Reference, case: str) -> None:
    scores, target = CLASS_CASES[case]
    _same(metric(scores, target), _quietly(function, target, scores))


@pytest.mark.parametrize(("metric", "function"), CLASS_METRICS)
def test_of_classes_with_weights(metric: Metric, function: Reference) -> None:
    rng = np.random.default_rng(1)
    scores, target = rng.normal(size=(60, CLASSES)), rng.integers(0, CLASSES, 60)
    weight = rng.random(60)
    found = metric(scores, target, weight=weight)
    _same(found, _quietly(function, target, scores, sample_weight=weight))


@pytest.mark.parametrize("case", CLASS_CASES)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize(
    ("ours", "function"),
    [
        (metrics.Precision, reference.precision_score),
        (metrics.Recall, reference.recall_score),
        (metrics.F1, reference.f1_score),
    ],
)
def test_nan_for_a_division_by_zero(
    ours: type[Metric], function: Reference, average: str, case: str
) -> None:
    """Classes without a value are left out of the mean."""
    scores, target = CLASS_CASES[case]
    options = {"average": average, "zero_division": np.nan}
    _same(ours(**options)(scores, target), _quietly(function, target, scores.argmax(1), **options))


def test_balanced_accuracy_adjusted() -> None:
    scores, target = CLASS_CASES["random3"]
    found = metrics.BalancedAccuracy(adjusted=True)(scores, target)
    _same(found, reference.balanced_accuracy_score(target, scores.argmax(1), adjusted=True))
    assert np.isnan(metrics.BalancedAccuracy(adjusted=True)(*CLASS_CASES["one class both"]))


@pytest.mark.parametrize(
    ("ours", "function"),
    [
        (metrics.Precision, reference.precision_score),
        (metrics.Recall, reference.recall_score),
        (metrics.F1, reference.f1_score),
        (metrics.IoU, reference.jaccard_score),
    ],
)
@pytest.mark.parametrize("target", [[0, 1, 1, 0, 1], [0] * 5, [1] * 5])
@pytest.mark.parametrize("scores", [[0.1, 0.9, 0.4, 0.6, 0.5], [0.0] * 5, [1.0] * 5])
def test_of_two_classes(
    ours: type[Metric], function: Reference, target: list[int], scores: list[float]
) -> None:
    """A score above the threshold is class 1: 0.5 is not."""
    p, y = np.array(scores), np.array(target)
    expected = function(y, p > 0.5, average="binary", zero_division=0)
    _same(ours(average="binary")(p, y), expected)
    _same(ours(average="binary", threshold=0.0)(p - 0.5, y), expected)
    _same(ours(average="binary")(p > 0.5, y.astype(bool)), expected)
    _same(ours(average="binary", classes=2)((p > 0.5).astype(np.uint8), y), expected)


def _binary_cases() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(2)
    for i, count in enumerate((2, 5, 200)):
        yield f"random{i}", rng.normal(size=count), rng.integers(0, 2, count)
    yield "ties", rng.integers(0, 4, 100).astype(float), rng.integers(0, 2, 100)
    yield "all equal", np.ones(50), rng.integers(0, 2, 50)
    yield "no positives", rng.normal(size=20), np.zeros(20, int)
    yield "only positives", rng.normal(size=20), np.ones(20, int)
    yield "one row", np.array([0.5]), np.array([1])
    yield "separable", np.arange(20.0), (np.arange(20) > 9).astype(int)
    yield "reversed", -np.arange(20.0), (np.arange(20) > 9).astype(int)
    yield "infinite", np.array([np.inf, -np.inf, 0.0, np.inf]), np.array([1, 0, 1, 0])


BINARY_CASES = {name: arrays for name, *arrays in _binary_cases()}


@pytest.mark.parametrize("case", BINARY_CASES)
@pytest.mark.parametrize("weighted", [False, True])
def test_of_rankings(case: str, weighted: bool) -> None:
    scores, target = BINARY_CASES[case]
    weight = np.random.default_rng(3).random(len(target)) if weighted else None
    if weight is not None:
        weight[:1] = 0 if len(weight) > 2 else 1  # a row that does not count
    shown = np.clip(scores, -1e30, 1e30)  # scikit-learn does not take infinities
    options = {"sample_weight": weight}
    ours = (scores, target, weight)
    auc = _quietly(reference.roc_auc_score, target, shown, **options)
    if case in ("no positives", "only positives", "one row"):
        assert np.isnan(auc)
    # Without its weightless row a class may be gone, which scikit-learn does not see.
    is_gone = weight is not None and len(np.unique(target[weight != 0])) < 2
    _same(metrics.RocAuc()(*ours), np.nan if is_gone else auc)
    precision = _quietly(reference.average_precision_score, target, shown, **options)
    _same(metrics.AveragePrecision()(*ours), precision)
    expected = _quietly(reference.roc_curve, target, shown, pos_label=1, **options)
    found = metrics.RocCurve()(*ours)
    _same(found[0], expected[0])
    _same(found[1], expected[1])
    _same(np.clip(found[2][1:], -1e30, 1e30), expected[2][1:])
    expected = _quietly(reference.precision_recall_curve, target, shown, pos_label=1, **options)
    found = metrics.PrecisionRecallCurve()(*ours)
    for a, b in zip(found, expected, strict=True):
        _same(np.clip(a, -1e30, 1e30), b)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", None])
@pytest.mark.parametrize("with_ties", [False, True])
def test_of_rankings_with_labels(average: str | None, with_ties: bool) -> None:
    rng = np.random.default_rng(4)
    scores, target = rng.normal(size=(50, 3)), rng.integers(0, 2, (50, 3))
    scores = np.round(scores) if with_ties else scores
    options = {"average": average, "sample_weight": rng.random(50)}
    ours = (scores, target, options["sample_weight"])
    found = metrics.RocAuc(average=average)(*ours)
    _same(found, reference.roc_auc_score(target, scores, **options))
    found = metrics.AveragePrecision(average=average)(*ours)
    _same(found, reference.average_precision_score(target, scores, **options))


def test_labels_without_positives() -> None:
    scores = np.random.default_rng(5).random((20, 2))
    target = np.zeros((20, 2), int)
    target[:7, 0] = 1
    for average in ("macro", "weighted", None):
        expected = _quietly(reference.average_precision_score, target, scores, average=average)
        _same(metrics.AveragePrecision(average=average)(scores, target), expected)
        expected = _quietly(reference.roc_auc_score, target, scores, average=average)
        _same(metrics.RocAuc(average=average)(scores, target), expected)


@pytest.mark.parametrize("multi_class", ["ovr", "ovo"])
@pytest.mark.parametrize("average", ["macro", "weighted"])
@pytest.mark.parametrize("missing", [False, True])
def test_of_rankings_with_classes(multi_class: str, average: str, missing: bool) -> None:
    rng = np.random.default_rng(6)
    p = rng.dirichlet(np.ones(CLASSES), 80)
    target = rng.integers(0, CLASSES - missing, 80)
    expected = _quietly(
        reference.roc_auc_score,
        target,
        p,
        multi_class=multi_class,
        average=average,
        labels=range(CLASSES),
    )
    _same(metrics.RocAuc(multi_class=multi_class, average=average)(p, target), expected)
    assert np.isnan(expected) == (missing and (multi_class, average) == ("ovr", "macro"))
    is_class = np.eye(CLASSES, dtype=int)[target]
    expected = _quietly(reference.average_precision_score, is_class, p, average=average)
    _same(metrics.AveragePrecision(average=average)(p, target), expected)


@pytest.mark.parametrize("k", [None, 1, 3, 20])
@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "irrelevant", "whole"])
def test_ndcg(kind: str, k: int | None) -> None:
    rng = np.random.default_rng(7)
    scores, gain = rng.normal(size=(30, 6)), rng.random((30, 6))
    if kind == "ties":
        scores, gain = np.round(scores), np.round(gain * 3)
    if kind == "all equal":
        scores[:] = 1
    if kind == "irrelevant":
        gain[::2] = 0
    if kind == "whole":
        gain = rng.integers(0, 5, (30, 6))
    _same(metrics.NDCG(k)(scores, gain), reference.ndcg_score(gain, scores, k=k))
    weight = rng.random(30)
    expected = reference.ndcg_score(gain, scores, k=k, sample_weight=weight)
    _same(metrics.NDCG(k)(scores, gain, weight=weight), expected)


def _calibration(sure: np.ndarray, right: np.ndarray, bins: int) -> tuple[float, float]:
    """From scikit-learn's curve and the number of rows in each of its bins."""
    edges = np.linspace(0, 1, bins + 1)
    counts = np.bincount(np.searchsorted(edges[1:-1], sure), minlength=bins)
    accuracy, confidence = calibration.calibration_curve(right, sure, n_bins=bins, pos_label=True)
    gaps = np.abs(accuracy - confidence)
    return float(np.average(gaps, weights=counts[counts > 0])), float(gaps.max())


@pytest.mark.parametrize("bins", [1, 4, 15])
@pytest.mark.parametrize("kind", ["random", "on edges", "all equal", "never right"])
def test_calibration(kind: str, bins: int) -> None:
    rng = np.random.default_rng(8)
    p, target = rng.random(200), rng.integers(0, 2, 200)
    if kind == "on edges":
        p = rng.integers(0, 5, 200) / 4
    if kind == "all equal":
        p[:] = 0.75
    if kind == "never right":
        target[:] = 0
    expected = _calibration(p, target.astype(bool), bins)
    options: dict[str, Any] = {"bins": bins, "from_logits": False}
    _same([metrics.ECE(**options)(p, target), metrics.MCE(**options)(p, target)], expected)
    both = np.stack([1 - p, p], 1)
    sure, right = both.max(1), both.argmax(1) == target
    expected = _calibration(sure, right, bins)
    _same([metrics.ECE(**options)(both, target), metrics.MCE(**options)(both, target)], expected)


def test_calibration_of_logits() -> None:
    rng = np.random.default_rng(9)
    logits, target = rng.normal(size=(50, 3)), rng.integers(0, 3, 50)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    _same(metrics.ECE()(logits, target), metrics.ECE(from_logits=False)(p, target))
    one = 1 / (1 + np.exp(-logits[:, 0]))
    found = metrics.MCE()(logits[:, 0], target % 2)
    _same(found, metrics.MCE(from_logits=False)(one, target % 2))


EVERY = [
    metrics.Accuracy(),
    metrics.TopK(2),
    metrics.F1(),
    metrics.BalancedAccuracy(),
    metrics.MatthewsCorrelation(),
    metrics.CohenKappa(),
    metrics.ConfusionMatrix(),
    metrics.IoU(average=None),
    metrics.Perplexity(),
    metrics.ECE(),
    metrics.MCE(),
    metrics.RocAuc(),
    metrics.AveragePrecision(),
]


@pytest.mark.parametrize("metric", EVERY, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_streams_through_a_program(metric: Metric, device: str) -> None:
    """Batches of unequal size through a compiled update give what all rows at once give."""
    rng = np.random.default_rng(10)
    scores = np.round(rng.normal(size=(70, CLASSES)), 1).astype(np.float32)
    target = rng.integers(0, CLASSES, 70).astype(np.int32)
    weight = rng.integers(0, 2, 70).astype(np.float32)
    options = td.CompileOptions(on_new_shape="specialise")
    specs = td.Spec((32, CLASSES)), td.Spec((32,), td.int32), td.Spec((32,))
    program = td.compile(metric.update, *specs, device=device, options=options)
    totals = metric.init()
    for rows in (slice(0, 32), slice(32, 64), slice(64, 70)):
        metric.add(totals, program(scores[rows], target[rows], weight[rows]))
    _same(metric.compute(totals), metric(scores, target, weight), 1e-5)


def test_ndcg_streams_through_a_program() -> None:
    rng = np.random.default_rng(11)
    scores = np.round(rng.normal(size=(8, 5))).astype(np.float32)
    gain = rng.integers(0, 3, (8, 5)).astype(np.float32)
    metric = metrics.NDCG()
    program = td.compile(metric.update, scores[:4], gain[:4], device="cpu")
    totals = metric.init()
    for i in (0, 4):
        metric.add(totals, program(scores[i : i + 4], gain[i : i + 4]))
    _same(metric.compute(totals), metric(scores, gain), 1e-5)


class _Net(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(3, CLASSES)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: td.Tensor) -> td.Tensor:
        return self.dropout(self.layer(x))


def _batches(*sizes: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(12)
    return [
        {
            "x": rng.normal(size=(n, 3)).astype(np.float32),
            "y": rng.integers(0, CLASSES, n).astype(np.int32),
        }
        for n in sizes
    ]


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_captures_of_a_step(device: str) -> None:
    """Metrics in the loss: evaluated without dropout, nothing in the results of training."""
    group = metrics.Group({"accuracy": metrics.Accuracy(), "auc": metrics.RocAuc()})

    def loss(model: Any, batch: Any) -> Any:
        scores = model(batch["x"])
        group.capture(scores, batch["y"])
        td.capture("other", scores)
        return losses.cross_entropy(scores, batch["y"])

    batches = _batches(16, 16, 5)
    step = td.compile_step(_Net(), loss, optim.sgd(0.1), batches[0], device=device)
    assert step(batches[0]).captures == {}
    assert step.evaluate(batches[0]).captures == {}
    totals = group.init()
    for batch in batches:
        out = step.evaluate(batch, captures=True)
        assert out.loss == pytest.approx(step.evaluate(batch).loss, rel=1e-6)
        assert out.captures["other"].shape == (len(batch["y"]), CLASSES)
        group.add(totals, group.captured(out.captures))
    forward = step.attach(
        lambda model, b: model(b["x"]),
        {"x": batches[0]["x"]},
        options=td.CompileOptions(on_new_shape="specialise"),
    )
    scores = np.concatenate([forward({"x": b["x"]}) for b in batches])
    target = np.concatenate([b["y"] for b in batches])
    found = group.compute(totals)
    _same(found["accuracy"], metrics.Accuracy()(scores, target))
    _same(found["auc"], metrics.RocAuc()(scores, target))
    group.captured(step(batches[0], captures=True).captures)  # in training too


def test_group_of_some() -> None:
    group = metrics.Group({"accuracy": metrics.Accuracy(), "loss": metrics.Average()})
    scores, target = CLASS_CASES["random3"]
    totals = group.init()
    group.add(totals, group.update(scores, target, only=["accuracy"]))
    rows = losses.cross_entropy(scores, target)
    group.add(totals, {"loss": group.metrics["loss"].update(rows)})
    expected = reference.log_loss(target, _softmax(scores), labels=LABELS)
    found = group.compute(totals)
    _same([found["accuracy"], found["loss"]], [metrics.Accuracy()(scores, target), expected])


def _softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def test_average() -> None:
    rng = np.random.default_rng(13)
    x, weight = rng.normal(size=(5, 3)), rng.random((5, 3))
    _same(metrics.Average()(x), x.mean())
    _same(metrics.Average()(x, weight=weight), np.average(x, weights=weight))
    x[0, 0], weight[0, 0] = np.nan, 0
    assert np.isfinite(metrics.Average()(x, weight=weight))
    assert np.isnan(metrics.Average()(x, weight=0))


def test_counts_beyond_float32() -> None:
    """Programs count in int32, totals in int64: 2²⁴ + 1 is not 2²⁴."""
    metric = metrics.Accuracy()
    totals = metric.init()
    batch = metric.update(np.zeros(2**20, int), np.zeros(2**20, int))
    for _ in range(16):
        metric.add(totals, batch)
    metric.add(totals, metric.update(np.zeros(1, int), np.ones(1, int)))
    assert totals["weight"] == 2**24 + 1
    assert metric.compute(totals) == 2**24 / (2**24 + 1)


def test_axis_and_ignored_targets() -> None:
    """Images of scores (N, C, H, W), with a target that is left out."""
    rng = np.random.default_rng(14)
    scores, target = rng.normal(size=(2, CLASSES, 3, 5)), rng.integers(0, CLASSES, (2, 3, 5))
    target[0, 0] = -100
    kept = target != -100
    rows = np.moveaxis(scores, 1, -1)[kept]
    for metric in (metrics.Accuracy, metrics.IoU, metrics.Perplexity, metrics.TopK, metrics.ECE):
        found = metric(axis=1, ignore_index=-100)(scores, target)
        _same(found, metric()(rows, target[kept]))
        _same(metric(axis=1)(scores, np.maximum(target, 0), weight=kept), found)


@pytest.mark.parametrize(
    "metric",
    [metrics.F1(), metrics.CohenKappa(), metrics.TopK(2), metrics.Perplexity(), metrics.RocAuc()],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("label", [-1, CLASSES])
def test_labels_of_no_class_are_refused(metric: Metric, label: int) -> None:
    scores, target = (a.copy() for a in CLASS_CASES["random3"])
    target[3] = label
    with pytest.raises(td.ArgumentError, match="1 (labels are|targets lie)"):
        metric(scores, target)


@pytest.mark.parametrize("metric", [*EVERY, metrics.Average(), metrics.NDCG()])
def test_nothing_has_no_value(metric: Metric) -> None:
    with pytest.raises(td.ArgumentError, match="nothing was added"):
        metric.compute(metric.init())


@pytest.mark.parametrize(
    "metric", [metrics.RocAuc(), metrics.AveragePrecision(), metrics.NDCG(), metrics.ECE()]
)
def test_nan_scores_give_nan(metric: Metric) -> None:
    shape = (4, 3) if isinstance(metric, metrics.NDCG) else (4,)
    scores = np.ones(shape)
    scores[0] = np.nan
    assert np.isnan(metric(scores, np.ones(shape, int)))


@pytest.mark.parametrize("metric", [*EVERY, metrics.NDCG()], ids=lambda m: type(m).__name__)
def test_what_has_no_weight_does_not_count(metric: Metric) -> None:
    """Not even NaN."""
    rng = np.random.default_rng(15)
    scores, target = rng.normal(size=(20, CLASSES)), rng.integers(0, CLASSES, 20)
    if isinstance(metric, metrics.NDCG):
        target = rng.integers(0, 3, (20, CLASSES))
    scores[0], weight = np.nan, np.ones(20)
    weight[0] = 0
    _same(metric(scores, target, weight=weight), metric(scores[1:], target[1:]))


def test_top_k_of_nan_is_wrong() -> None:
    assert metrics.TopK(1)(np.full((3, 2), np.nan), np.zeros(3, int)) == 0


def test_perplexity_of_the_impossible() -> None:
    logits = np.array([[0.0, -np.inf]])
    assert metrics.Perplexity()(logits, np.array([1])) == np.inf


def _wrong() -> Iterator[tuple[str, Callable[[], Any]]]:
    accuracy, y = metrics.Accuracy(), np.zeros(4, int)
    yield "scores", lambda: accuracy(np.zeros((3, 2)), y)
    yield "scores", lambda: accuracy(np.zeros((4, 2, 2)), y)
    yield "targets are", lambda: accuracy(np.zeros((4, 2)), np.zeros(4))
    yield "classes along axis", lambda: metrics.Accuracy(axis=0)(np.zeros((4, 2)), y)
    yield "Pass classes=", lambda: metrics.F1()(y, y)
    yield "classes = 3", lambda: metrics.F1(classes=3)(np.zeros((4, 2)), y)
    yield "average", lambda: metrics.F1(average="mean")
    yield "binary", lambda: metrics.F1(average="binary")(np.zeros((4, 3)), y)
    yield "normalize", lambda: metrics.ConfusionMatrix(normalize="rows")
    yield "weights", lambda: metrics.CohenKappa(weights="cubic")
    yield "weights", lambda: accuracy(np.zeros((4, 2)), y, weight=np.ones((2, 4)))
    yield "broadcast", lambda: accuracy(np.zeros((4, 2)), y, weight=np.ones(3))
    yield "k = 0", lambda: metrics.TopK(0)
    yield "bins = 0", lambda: metrics.ECE(bins=0)
    yield "scores are", lambda: metrics.ECE()(y, y)
    yield "rows, items", lambda: metrics.NDCG()(np.zeros(4), np.zeros(4))
    yield "negative", lambda: metrics.NDCG()(np.zeros((1, 2)), np.array([[1.0, -1.0]]))
    yield "multi_class", lambda: metrics.RocAuc(multi_class="one")
    yield "ovo", lambda: metrics.RocAuc(multi_class="ovo", average=None)
    yield "ovo", lambda: metrics.RocAuc(multi_class="ovo")(np.zeros((4, 2)), y, y + 2.0)
    yield "average", lambda: metrics.RocAuc(average="mean")
    yield "scores of 2 classes", lambda: metrics.RocCurve()(np.zeros((4, 2)), y)
    yield "scores", lambda: metrics.RocAuc()(np.zeros((4, 2)), np.zeros((4, 3), int))
    yield "a target", lambda: metrics.Average()(np.zeros(3), np.zeros(3))
    yield "It is a float", lambda: metrics.Average()(y)
    yield "no metrics", lambda: metrics.Group({})
    yield "not metrics", lambda: metrics.Group({"a": "accuracy"})  # type: ignore[dict-item]
    yield "colon", lambda: metrics.Group({"a:b": accuracy})
    yield "no metric b", lambda: metrics.Group({"a": accuracy}).update(y, y, only=["b"])
    yield "captures=True", lambda: metrics.Group({"a": accuracy}).captured({})


@pytest.mark.parametrize(("message", "call"), list(_wrong()))
def test_mistakes(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(td.TreadleError, match=message):
        call()


def test_statistics_must_fit() -> None:
    metric, y = metrics.ConfusionMatrix(), np.zeros(3, int)
    totals = metric.init()
    metric.add(totals, metric.update(np.zeros((3, 2)), y))
    with pytest.raises(td.ArgumentError, match="number of classes"):
        metric.add(totals, metric.update(np.zeros((3, 3)), y))
    with pytest.raises(td.ArgumentError, match="Use one metric"):
        metric.add(totals, metrics.Accuracy().update(y, y))


def test_a_traced_value_is_refused() -> None:
    with pytest.raises(td.TraceError):
        td.trace(metrics.Accuracy(), td.Spec((3, 2)), td.Spec((3,), td.int32))
