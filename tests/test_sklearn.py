"""Estimators of scikit-learn's kind: its own checks, and what it builds of estimators."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification, make_regression
from sklearn.ensemble import BaggingClassifier, StackingRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import treadle as td
from treadle import callbacks, nn, optim
from treadle.interop import tabular
from treadle.interop.sklearn import Classifier, Regressor

SMALL: dict[str, Any] = {"hidden": (8,), "epochs": 12, "lr": 0.02, "random_state": 0}
QUICK = SMALL | {"device": "oracle"}  # nothing to compile
X, CODES = make_classification(
    90, 5, n_classes=3, n_informative=4, n_redundant=0, class_sep=2.0, random_state=1
)
LABELS = np.array(["ant", "bee", "cat"])[CODES]
INPUTS, NUMBERS = make_regression(90, 5, noise=1.0, n_targets=2, random_state=2)

# A handful; `pytest -m slow` runs all of them.
SOME = {
    "check_dict_unchanged",
    "check_estimators_nan_inf",
    "check_estimators_unfitted",
    "check_fit2d_1sample",
    "check_no_attributes_set_in_init",
    "check_sample_weight_equivalence_on_dense_data",
}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch) -> None:
    """Steps of microseconds: a second thread that others use would be waited for."""
    monkeypatch.setenv("TREADLE_THREADS", "1")


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier(**SMALL).fit(X, LABELS)


@pytest.mark.parametrize(
    "estimator", [Classifier(epochs=2, device="oracle"), Regressor(epochs=2, device="oracle")]
)
def test_some_checks_of_scikit_learn(estimator) -> None:
    found = list(estimator_checks.estimator_checks_generator(estimator))
    chosen = [c for _, c in found if getattr(c, "func", c).__name__ in SOME]
    assert len(chosen) >= len(SOME)
    for check in chosen:
        check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [
        Classifier(),
        Regressor(),
        Classifier(hidden=(8, 8), dropout=0.1, optimizer="sgd", lr=0.1, batch_size=16),
        Regressor(hidden=(), loss="huber"),
        Regressor(early_stopping=True, validation_fraction=0.3),
    ],
    ids=["classifier", "regressor", "deep", "linear", "stopping"],
)
def test_every_check_of_scikit_learn(estimator) -> None:
    found = estimator_checks.check_estimator(estimator, on_fail=None, on_skip=None)
    failed = [f"{r['check_name']}: {r['exception']}" for r in found if r["status"] == "failed"]
    skipped = {r["check_name"] for r in found if r["status"] == "skipped"}
    assert len(found) >= 60
    assert not failed
    assert skipped <= {"check_array_api_input"}  # it asks for an environment variable


def test_labels_probabilities_and_pickles(classifier) -> None:
    chances = classifier.predict_proba(X)
    assert classifier.classes_.tolist() == ["ant", "bee", "cat"]
    np.testing.assert_allclose(chances.sum(1), 1)
    np.testing.assert_allclose(np.log(chances), classifier.predict_log_proba(X))
    np.testing.assert_array_equal(classifier.classes_[chances.argmax(1)], classifier.predict(X))
    assert classifier.score(X, LABELS) > 0.75
    assert classifier.n_iter_ == len(classifier.loss_curve_) == 12
    assert classifier.loss_ < classifier.loss_curve_[0]
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(X), chances)
    assert not hasattr(clone(classifier), "classes_")
    # The network with its values is an ordinary one.
    forward = td.compile_forward(classifier.module_, lambda m, x: m(x), td.Spec((90, 5)))
    forward.load_params(classifier.params_)
    scaled = (X - X.mean(0)) / X.std(0)
    scores = forward(scaled.astype(np.float32))
    np.testing.assert_array_equal(scores.argmax(1), chances.argmax(1))


def test_one_program_for_all_seeds_rates_and_sizes_of_data(classifier, monkeypatch) -> None:
    """Hundreds of small fits compile once."""
    monkeypatch.setattr(tabular, "Program", None)  # compiling another would fail
    other = Classifier(**SMALL | {"lr": 1e-3, "random_state": 5, "weight_decay": 0.3})
    for rows in (90, 71, 70):
        other.fit(X[:rows], LABELS[:rows])
    assert (other.predict_proba(X) != classifier.predict_proba(X)).any()
    # Whoever predicts, the program has the values of that one.
    chances = [model.predict_proba(X) for model in (classifier, other, other, classifier)]
    assert (chances[0] != chances[1]).any()
    np.testing.assert_array_equal(chances[0], chances[3])
    np.testing.assert_array_equal(chances[1], chances[2])
    again = Classifier(**SMALL).fit(X, LABELS)
    np.testing.assert_array_equal(again.predict_proba(X), classifier.predict_proba(X))


def test_weights_are_repetitions_and_classes_have_weights(classifier) -> None:
    counts = np.random.default_rng(0).integers(0, 3, len(X))
    weighted = Classifier(**SMALL).fit(X, LABELS, sample_weight=counts)
    repeated = Classifier(**SMALL).fit(X.repeat(counts, 0), LABELS.repeat(counts))
    np.testing.assert_array_equal(weighted.predict_proba(X), repeated.predict_proba(X))
    favoured = Classifier(**SMALL, class_weight={"bee": 50}).fit(X, LABELS)
    assert (favoured.predict(X) == "bee").sum() > (classifier.predict(X) == "bee").sum()
    few = np.flatnonzero((CODES != 0) | (np.arange(90) % 9 == 0))
    balanced = Classifier(**SMALL, class_weight="balanced").fit(X[few], LABELS[few])
    plain = Classifier(**SMALL).fit(X[few], LABELS[few])
    assert balanced.predict_proba(X)[:, 0].mean() > plain.predict_proba(X)[:, 0].mean()


def test_passes_and_warm_starts_go_on(classifier) -> None:
    passed = Classifier(**QUICK)
    for _ in range(12):
        passed.partial_fit(X, LABELS, classes=["ant", "bee", "cat"])
    assert passed.n_iter_ == 1
    assert passed.loss_ < 0.7 * classifier.loss_curve_[0]
    with pytest.raises(ValueError, match="first call"):
        Classifier().partial_fit(X, LABELS)
    with pytest.raises(ValueError, match="dog"):
        passed.partial_fit(X[:1], ["dog"])
    warm = Classifier(**QUICK, warm_start=True).fit(X, LABELS)
    warm.set_params(epochs=1).fit(X, LABELS)
    assert warm.loss_ < 1.2 * classifier.loss_  # it did not begin anew
    warm.set_params(hidden=(3,))
    with pytest.raises(td.LoadError, match="shape"):
        warm.fit(X, LABELS)


def test_several_targets_and_losses() -> None:
    both = Regressor(**QUICK).fit(INPUTS, NUMBERS)
    assert both.predict(INPUTS).shape == (90, 2)
    assert both.score(INPUTS, NUMBERS) > 0.5
    column = Regressor(**QUICK, loss="huber").fit(INPUTS, NUMBERS[:, 0])
    assert column.predict(INPUTS).shape == (90,)
    with pytest.raises(td.ArgumentError, match="squared_error"):
        Regressor(loss="mse").fit(INPUTS, NUMBERS)
    with pytest.raises(td.ArgumentError, match="beyond float32"):
        Regressor(**QUICK, standardise=False).fit(INPUTS * 1e300, NUMBERS)


def test_modules_optimizers_and_callbacks_of_ones_own() -> None:
    def module(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(inputs, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, outputs)
        )

    def rule(lr: float) -> optim.Optimizer:
        return optim.ema(optim.sgd(lr, momentum=0.9), 0.9)

    seen: list[float] = []
    watch = callbacks.Lambda(on_step_end=lambda run: seen.append(run.out.loss))
    given = QUICK | {"module": module, "optimizer": rule, "epochs": 4}
    looked = Regressor(**given, callbacks=[watch]).fit(INPUTS, NUMBERS)
    alone = Regressor(**given).fit(INPUTS, NUMBERS)
    assert len(seen) == 4 * 2  # 90 rows in batches of 64
    np.testing.assert_array_equal(looked.predict(INPUTS), alone.predict(INPUTS))
    np.testing.assert_allclose(looked.loss_curve_, alone.loss_curve_, rtol=1e-6)
    with pytest.raises(td.ArgumentError, match="nn.Module"):
        Regressor(lambda inputs, outputs: 3).fit(INPUTS, NUMBERS)
    with pytest.raises(td.ArgumentError, match="adamww"):
        Regressor(optimizer="adamww").fit(INPUTS, NUMBERS)


def test_it_stops_when_held_out_rows_no_longer_improve() -> None:
    given = QUICK | {"lr": 0.5, "epochs": 200}
    found = Classifier(**given, early_stopping=True, patience=2, validation_fraction=0.2)
    found.fit(X, LABELS)
    curve = found.validation_loss_curve_
    assert len(curve) == found.n_iter_ < 200
    assert min(curve[-2:]) > min(curve[:-2]) - found.tol


def test_what_is_refused_is_named(classifier) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match="(?i)sparse"):
        Classifier().fit(sparse.csr_array(X), LABELS)
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abcde"))
    named = clone(classifier).fit(table, LABELS)
    assert named.feature_names_in_.tolist() == list("abcde")
    with pytest.raises(ValueError, match="feature names"):
        named.predict(table.rename(columns={"a": "z"}))
    with pytest.raises(td.NotFiniteError, match="lower lr"):
        Regressor(**QUICK | {"lr": 1e30, "optimizer": "sgd"}).fit(INPUTS, NUMBERS)
    with pytest.raises(td.ArgumentError, match="epochs"):
        Classifier(epochs=0).fit(X, LABELS)
    with pytest.raises(td.ArgumentError, match="activation"):
        Classifier(activation="relu7").fit(X, LABELS)
    with pytest.raises(td.ArgumentError, match="weight 0"):
        Classifier(class_weight=dict.fromkeys(["ant", "bee", "cat"], 0.0)).fit(X, LABELS)


def test_what_scikit_learn_builds_of_estimators(classifier) -> None:
    """Cross-validation, a search, a pipeline, bagging, calibration and stacking."""
    assert cross_val_score(Classifier(**QUICK), X, LABELS, cv=3).mean() > 0.6
    grid = {"classifier__lr": [1e-5, 0.02], "classifier__hidden": [(8,)]}
    search = GridSearchCV(make_pipeline(StandardScaler(), Classifier(**QUICK)), grid, cv=2)
    assert search.fit(X, LABELS).best_params_["classifier__lr"] == 0.02
    bagging = BaggingClassifier(Classifier(**QUICK), n_estimators=3, random_state=0)
    assert bagging.fit(X, LABELS).score(X, LABELS) > 0.7
    calibrated = CalibratedClassifierCV(Classifier(**QUICK), cv=2).fit(X, LABELS)
    np.testing.assert_allclose(calibrated.predict_proba(X).sum(1), 1)
    members = [("net", Regressor(**QUICK)), ("ridge", Ridge())]
    stacked = StackingRegressor(members, cv=2).fit(INPUTS, NUMBERS[:, 0])
    assert stacked.score(INPUTS, NUMBERS[:, 0]) > 0.9
