"""Estimators of scikit-learn: a network with `fit`, `predict`, `predict_proba` and `score`.

They pass scikit-learn's own checks of estimators, so that pipelines, cross-validation, searches,
stacking, bagging and calibration work with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise ImportError(
        'td.interop.sklearn needs scikit-learn 1.6 or newer: pip install "treadle[sklearn]".'
    ) from error

from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_whole
from treadle.interop.tabular import (
    FRESH,
    LOSSES,
    PROGRAMS,
    Network,
    Program,
    Rows,
    Scaling,
    Start,
    State,
    batch_rows,
    check_network,
    distinct_rows,
    epoch_means,
)
from treadle.nn.module import Module
from treadle.optim.optimizer import Optimizer
from treadle.step.loading import model_values
from treadle.train.callback import Callback
from treadle.train.stopping import EarlyStopping
from treadle.train.trainer import Trainer

Arrays = dict[str, np.ndarray]

__all__ = ["Classifier", "Regressor"]


def _set(estimator: BaseEstimator, given: dict[str, Any]) -> None:
    """Arguments of a constructor as attributes, as they are: scikit-learn's rule."""
    names = estimator._get_param_names()
    vars(estimator).update({name: given[name] for name in names})


def _weights(x: np.ndarray, given: object) -> np.ndarray:
    """A weight for each row."""
    return np.asarray(_check_sample_weight(given, x, dtype=np.float64, ensure_non_negative=True))


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators are: rows in, batches of one size, one compiled step."""

    module: Callable[[int, int], Module] | None
    hidden: Sequence[int]
    activation: str
    dropout: float
    optimizer: str | Callable[[float], Optimizer]
    lr: float
    weight_decay: float | None
    epochs: int
    batch_size: int
    standardise: bool
    early_stopping: bool
    validation_fraction: float
    patience: int
    tol: float
    warm_start: bool
    callbacks: Iterable[Callback] | None
    device: str
    random_state: object
    verbose: bool
    n_features_in_: int
    n_outputs_: int

    def _network_for(self, loss: str, outputs: int, rows: int) -> Network:
        hidden = tuple(np.atleast_1d(self.hidden).tolist())  # one number is one layer
        size = check_whole("fit", "batch_size", self.batch_size)
        is_named = isinstance(self.optimizer, str)
        network = Network(
            self.module,
            hidden,
            self.activation,
            float(self.dropout),
            self.optimizer,
            loss,
            self.n_features_in_,
            outputs,
            batch_rows(size, rows),
            self.device,
            None if is_named else float(self.lr),
        )
        check_network(network)
        return network

    def _numbers(self) -> dict[str, float]:
        """Values of the optimizer, set in a program that is there already."""
        found = {"lr": self.lr} if isinstance(self.optimizer, str) else {}
        return found if self.weight_decay is None else found | {"weight_decay": self.weight_decay}

    def _learn(
        self,
        x: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        network: Network,
        start: Start,
        epochs: int | None = None,
    ) -> None:
        """Train on rows with weights: for epochs, or for one pass in which nothing is held out."""
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        if start is FRESH:
            self._scale(x, y, weights, network.loss != "classes")
        rows = self._rows(x, y, weights, network)
        stops = bool(self.early_stopping) and epochs is not None
        kept, held_out = self._parts(rows, network, seed) if stops else (rows, None)
        with PROGRAMS.lent(network) as program:
            program.begin(seed, self._numbers(), start)
            self._train(program, kept, held_out, epochs or 1, seed)
            self._state: State = program.step.state_dict()
        self._network = network

    def _start(self, is_pass: bool) -> Start:
        """A pass goes on as the step was; a warm start has its values and a new optimizer."""
        if self.__sklearn_is_fitted__() and (is_pass or self.warm_start):
            return Start(self._state, whole=is_pass)
        return FRESH

    def _scale(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray, is_number: bool) -> None:
        self._inputs = Scaling.of(x, weights if self.standardise else None)
        columns = y.reshape(len(y), -1)
        self._targets = Scaling.of(columns, weights if self.standardise and is_number else None)

    def _rows(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray, network: Network) -> Arrays:
        """As the network sees them: weights of mean 1, which float32 holds whatever they were."""
        is_classes = network.loss == "classes"
        targets = y.astype(np.int32) if is_classes else self._targets.applied(y)
        scaled = (weights / weights.mean()).astype(np.float32)
        return {"x": self._inputs.applied(x), "y": targets, "weights": scaled}

    def _parts(self, rows: Arrays, network: Network, seed: int) -> tuple[Arrays, Arrays]:
        """Rows to train on, and those to stop by: some of each class where there are as many."""
        strata = None
        if network.loss == "classes" and np.unique(rows["y"], return_counts=True)[1].min() > 1:
            strata = rows["y"]
        found = train_test_split(
            *rows.values(), test_size=self.validation_fraction, random_state=seed, stratify=strata
        )
        return dict(zip(rows, found[::2])), dict(zip(rows, found[1::2]))

    def _train(
        self, program: Program, rows: Arrays, held_out: Arrays | None, epochs: int, seed: int
    ) -> None:
        """Where nobody looks between steps, an epoch stays in native code."""
        size = program.network.rows
        loader = Rows(**rows, size=size).loader(seed)
        callbacks = [] if self.callbacks is None else list(self.callbacks)
        if held_out is None and not callbacks and not self.verbose:
            each = np.concatenate([program.run_epoch(loader) for _ in range(epochs)])
            program.check_finite(each)
            self._tell(each, len(loader))
            return
        if held_out is not None:
            stopping = EarlyStopping("val/loss", "min", self.patience, self.tol, restore_best=True)
            callbacks = [*callbacks, stopping]
        trainer = Trainer(program.step, callbacks, progress="auto" if self.verbose else "off")
        validation = None if held_out is None else Rows(**held_out, size=size).loader(None)
        history = trainer.fit(loader, epochs=epochs, validation=validation)
        self._tell(history.series("loss")[1], len(loader))
        if held_out is not None:
            self.validation_loss_curve_ = history.series("val/loss")[1].tolist()

    def _tell(self, found: np.ndarray, steps: int) -> None:
        """What is asked of a fitted estimator."""
        self.loss_curve_ = epoch_means(found, steps)
        self.n_iter_, self.loss_ = len(self.loss_curve_), self.loss_curve_[-1]

    def __sklearn_is_fitted__(self) -> bool:
        return "_state" in vars(self)

    def _raw(self, X: object) -> np.ndarray:
        """What the network gives for rows: (n, outputs)."""
        check_is_fitted(self)
        x = validate_data(self, X, reset=False)
        scaled = self._inputs.applied(x)
        with PROGRAMS.lent(self._network) as program:
            return program.outputs(self._state, scaled)

    @property
    def module_(self) -> Module:
        """The network as a module, to be compiled with `params_`."""
        check_is_fitted(self)
        return self._network.build()

    @property
    def params_(self) -> State:
        """Values of the module by name, as files have them."""
        check_is_fitted(self)
        return model_values(self._state)


class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A network that tells classes: of numbers or strings, with probabilities.

    `module(inputs, outputs)` makes the network; without it there are layers of the sizes in
    `hidden`. `class_weight` is a dict of labels, or "balanced".
    """

    def __init__(
        self,
        module: Callable[[int, int], Module] | None = None,
        *,
        hidden: Sequence[int] = (64,),
        activation: str = "relu",
        dropout: float = 0.0,
        optimizer: str | Callable[[float], Optimizer] = "adamw",
        lr: float = 3e-3,
        weight_decay: float | None = None,
        epochs: int = 100,
        batch_size: int = 64,
        class_weight: Mapping[Any, float] | str | None = None,
        standardise: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        tol: float = 1e-4,
        warm_start: bool = False,
        callbacks: Iterable[Callback] | None = None,
        device: str = "cpu",
        random_state: object = None,
        verbose: bool = False,
    ):
        _set(self, locals())

    def fit(self, X: object, y: object, sample_weight: object = None) -> Classifier:
        """Train on rows X (n, features) and labels y (n,)."""
        epochs = check_whole("fit", "epochs", self.epochs)
        start = self._start(is_pass=False)
        x, labels = self._checked(X, y, reset=start is FRESH)
        if start is FRESH:
            self.classes_ = np.unique(labels)
        rows = self._distinct(x, labels, sample_weight)
        network = self._network_for("classes", len(self.classes_), len(rows[0]))
        self._learn(*rows, network, start, epochs)
        return self

    def partial_fit(
        self, X: object, y: object, classes: Any = None, sample_weight: object = None
    ) -> Classifier:
        """One pass over rows. The first call says all classes that will come."""
        start = self._start(is_pass=True)
        if start is FRESH and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        if self.class_weight == "balanced":
            raise ValueError("class_weight='balanced' needs all rows: pass a dict to partial_fit.")
        x, labels = self._checked(X, y, reset=start is FRESH)
        if start is FRESH:
            self.classes_ = np.unique(np.asarray(classes))
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"classes={classes!r} is not what the first call had: {self.classes_}."
            )
        rows = self._distinct(x, labels, sample_weight)
        fresh = start is FRESH
        count = len(self.classes_)
        network = self._network_for("classes", count, len(rows[0])) if fresh else self._network
        self._learn(*rows, network, start)
        return self

    def _distinct(
        self, x: np.ndarray, labels: np.ndarray, sample_weight: object
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights = self._weights(x, labels, sample_weight)
        return distinct_rows(x, self._codes(labels), weights)

    def _checked(self, X: object, y: object, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        x, labels = validate_data(self, X, y, reset=reset)
        labels = column_or_1d(labels, warn=True)
        check_classification_targets(labels)
        return x, labels

    def _codes(self, labels: np.ndarray) -> np.ndarray:
        """The number of each label among the classes."""
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y has the classes {unknown[:5].tolist()}, which are not among {self.classes_}."
            )
        return np.searchsorted(self.classes_, labels)

    def _weights(self, x: np.ndarray, labels: np.ndarray, given: object) -> np.ndarray:
        found = _weights(x, given)
        if self.class_weight is None:
            return found
        of_class = self._class_weights(labels, found)
        return found * of_class[self._codes(labels)]

    def _class_weights(self, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        count = len(self.classes_)
        if self.class_weight == "balanced":
            sums = np.bincount(self._codes(labels), weights, minlength=count)
            return weights.sum() / (count * np.where(sums > 0, sums, 1.0))
        if not isinstance(self.class_weight, Mapping):
            cause = f"class_weight = {self.class_weight!r}"
            raise ArgumentError("fit", cause, 'A dict of labels and weights, "balanced" or None.')
        known = {label: i for i, label in enumerate(self.classes_.tolist())}
        unknown = [label for label in self.class_weight if label not in known]
        if unknown:
            raise ValueError(f"class_weight has the classes {unknown}, y has {self.classes_}.")
        found = np.ones(count)
        for label, weight in self.class_weight.items():
            found[known[label]] = weight
        return found

    def predict_log_proba(self, X: object) -> np.ndarray:
        """Logarithms of the probabilities of classes, (n, classes), in the order of `classes_`."""
        scores = self._raw(X)
        shifted = scores - scores.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    def predict_proba(self, X: object) -> np.ndarray:
        """Probabilities of classes, (n, classes), in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: object) -> np.ndarray:
        """The most probable class of each row."""
        scores = self._raw(X)
        return self.classes_[scores.argmax(axis=1)]


class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A network that tells numbers: one for each row, or several.

    `module(inputs, outputs)` makes the network; without it there are layers of the sizes in
    `hidden`. `loss` is "squared_error", "absolute_error" or "huber". Targets are standardised for
    training where inputs are, and predictions are in their units.
    """

    def __init__(
        self,
        module: Callable[[int, int], Module] | None = None,
        *,
        loss: str = "squared_error",
        hidden: Sequence[int] = (64,),
        activation: str = "relu",
        dropout: float = 0.0,
        optimizer: str | Callable[[float], Optimizer] = "adamw",
        lr: float = 3e-3,
        weight_decay: float | None = None,
        epochs: int = 100,
        batch_size: int = 64,
        standardise: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        tol: float = 1e-4,
        warm_start: bool = False,
        callbacks: Iterable[Callback] | None = None,
        device: str = "cpu",
        random_state: object = None,
        verbose: bool = False,
    ):
        _set(self, locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: object, y: object, sample_weight: object = None) -> Regressor:
        """Train on rows X (n, features) and targets y, (n,) or (n, targets)."""
        epochs, start = check_whole("fit", "epochs", self.epochs), self._start(is_pass=False)
        rows = self._distinct(X, y, sample_weight, start)
        network = self._network_for(self.loss, self.n_outputs_, len(rows[0]))
        self._learn(*rows, network, start, epochs)
        return self

    def partial_fit(self, X: object, y: object, sample_weight: object = None) -> Regressor:
        """One pass over rows."""
        start = self._start(is_pass=True)
        rows = self._distinct(X, y, sample_weight, start)
        fresh = start is FRESH
        new = self._network_for(self.loss, self.n_outputs_, len(rows[0])) if fresh else None
        self._learn(*rows, new or self._network, start)
        return self

    def _distinct(
        self, X: object, y: object, sample_weight: object, start: Start
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.loss not in LOSSES:
            raise ArgumentError("fit", f"loss = {self.loss!r}", f"One of {', '.join(LOSSES)}.")
        fresh = start is FRESH
        x, targets = validate_data(self, X, y, reset=fresh, multi_output=True, y_numeric=True)
        columns = np.asarray(targets, np.float64).reshape(len(x), -1)
        if not fresh and columns.shape[1] != self.n_outputs_:
            raise ValueError(f"y has {columns.shape[1]} targets, it had {self.n_outputs_} before.")
        self.n_outputs_, self._is_vector = columns.shape[1], np.ndim(targets) == 1
        return distinct_rows(x, columns, _weights(x, sample_weight))

    def predict(self, X: object) -> np.ndarray:
        """Targets of each row: (n,), or (n, targets) where y had that shape."""
        found = self._raw(X)
        columns = self._targets.undone(found)
        return columns[:, 0] if self._is_vector else columns
