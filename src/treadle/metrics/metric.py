"""What a metric is: statistics of a batch, traced; totals of many, on the host; a value at the end.

totals = metric.init()
for batch in batches:
    metric.add(totals, metric.update(scores, target))   # update runs inside a program
value = metric.compute(totals)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.frontend.tensor import Operand, Tensor
from treadle.frontend.tracing import capture
from treadle.metrics.direction import Direction

# Numbers by name, as int64 or float64; or all arrays that came, for what needs every score.
Totals = dict[str, Any]
Statistics = Mapping[str, Any]
Value = Any  # float, or arrays where a metric is not one number

CAPTURED = "metrics"


class Metric(ABC):
    """Statistics that add up, and a value of their sums. Metrics hold no numbers themselves."""

    direction: ClassVar[Direction | None] = None  # of better values; None: it has none, or any
    keeps_columns: ClassVar[bool] = False  # statistics are kept one after the other, not added

    @abstractmethod
    def update(self, scores: Operand, target: Operand, weight: Operand | None = None) -> Statistics:
        """Statistics of one batch as tensors. Works on traced tensors and on NumPy arrays."""

    @abstractmethod
    def compute(self, totals: Totals) -> Value:
        """The value of what was added up. scikit-learn's, where it has one."""

    def init(self) -> Totals:
        """Totals of nothing yet."""
        return {}

    def add(self, totals: Totals, statistics: Statistics) -> None:
        """Take in the statistics of a batch, in int64 and float64: no count is lost to rounding."""
        arrays = {k: _wide(v) for k, v in statistics.items()}
        name = type(self).__name__
        if totals and totals.keys() != arrays.keys():
            was, now = ", ".join(totals), ", ".join(arrays)
            raise ArgumentError(name, f"statistics were {was} and now are {now}", "Use one metric.")
        for key, array in arrays.items():
            if self.keeps_columns:
                totals.setdefault(key, []).append(array)
                continue
            before = totals.get(key)
            if before is not None and before.shape != array.shape:
                raise ArgumentError(
                    name,
                    f"{key} was of shape {before.shape} and now is {array.shape}",
                    "The number of classes must not change.",
                )
            totals[key] = array if before is None else before + array

    def __call__(self, *operands: Any, **options: Any) -> Value:
        """The value for arrays, at once: of `update`'s arguments."""
        totals = self.init()
        self.add(totals, self.update(*operands, **options))
        return self.compute(totals)


def _wide(value: object) -> np.ndarray:
    array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    return array.astype(np.float64)


def total(metric: Metric, totals: Totals, key: str) -> np.ndarray:
    """One of the totals; an error if nothing was added."""
    if key not in totals:
        raise ArgumentError(
            type(metric).__name__, "nothing was added", "The data is empty, or add was not called."
        )
    found = totals[key]
    return np.concatenate(found) if metric.keeps_columns else found


def ratio(numerator: np.ndarray, denominator: np.ndarray, otherwise: float) -> np.ndarray:
    """Elementwise quotients, and `otherwise` where the denominator is 0."""
    top, bottom = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    is_zero = bottom == 0
    return np.where(is_zero, otherwise, top / np.where(is_zero, 1, bottom))


class Group:
    """Metrics by name that are updated together.

    `capture` goes into a loss, where scores and targets are at hand; `captured` finds its
    statistics among the captures of `step.evaluate(batch, captures=True)`.
    """

    def __init__(self, metrics: Mapping[str, Metric]):
        if not isinstance(metrics, Mapping):
            raise ArgumentError("Group", f"metrics = {metrics!r}", "Pass a dict of them by name.")
        wrong = [n for n, m in metrics.items() if not isinstance(m, Metric) or ":" in n]
        if wrong or not metrics:
            raise ArgumentError(
                "Group",
                f"{', '.join(map(repr, wrong))}: not metrics by name" if wrong else "no metrics",
                'For instance Group({"accuracy": Accuracy()}); names are without a colon.',
            )
        self.metrics = dict(metrics)

    @property
    def directions(self) -> dict[str, Direction]:
        """ "min" or "max" by name, of the metrics that have a direction."""
        return {n: m.direction for n, m in self.metrics.items() if m.direction is not None}

    def init(self) -> dict[str, Totals]:
        """Totals of nothing yet, by name."""
        return {name: metric.init() for name, metric in self.metrics.items()}

    def update(
        self,
        scores: Operand,
        target: Operand,
        weight: Operand | None = None,
        only: Iterable[str] | None = None,
    ) -> dict[str, Statistics]:
        """Statistics of one batch, by name: of all metrics, or of `only` some."""
        names = [only] if isinstance(only, str) else list(self.metrics if only is None else only)
        self._check(names)
        return {n: self.metrics[n].update(scores, target, weight) for n in names}

    def capture(
        self,
        scores: Operand,
        target: Operand,
        weight: Operand | None = None,
        only: Iterable[str] | None = None,
    ) -> None:
        """Leave the statistics in a trace as captures, which cost nothing until asked for."""
        for name, statistics in self.update(scores, target, weight, only).items():
            for key, tensor in statistics.items():
                capture(f"{CAPTURED}:{name}:{key}", tensor)

    def captured(self, captures: Mapping[str, np.ndarray]) -> dict[str, Statistics]:
        """What `capture` left, by name."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for path, value in captures.items():
            kind, _, rest = path.partition(":")
            name, _, key = rest.partition(":")
            if kind == CAPTURED and name in self.metrics:
                found.setdefault(name, {})[key] = value
        missing = [n for n in self.metrics if n not in found]
        if missing:
            raise ArgumentError(
                "Group",
                f"there are no captures of {', '.join(missing)}",
                "Call capture in the loss, and evaluate with captures=True.",
            )
        return dict(found)

    def add(self, totals: dict[str, Totals], statistics: Mapping[str, Statistics]) -> None:
        """Take in the statistics of a batch."""
        self._check(statistics)
        for name, given in statistics.items():
            self.metrics[name].add(totals[name], given)

    def compute(self, totals: Mapping[str, Totals]) -> dict[str, Value]:
        """The values of what was added up, by name."""
        return {name: metric.compute(totals[name]) for name, metric in self.metrics.items()}

    def _check(self, names: Iterable[str]) -> None:
        unknown = [n for n in names if n not in self.metrics]
        if unknown:
            raise ArgumentError(
                "Group", f"no metric {', '.join(unknown)}", f"There are {', '.join(self.metrics)}."
            )
