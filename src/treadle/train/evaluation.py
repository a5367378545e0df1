"""Evaluation and prediction over many batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from treadle.base import trees
from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.metrics.metric import Group
from treadle.step.forward import Forward
from treadle.step.train_step import TrainStep

PREDICTED_SHAPES = 4  # whole batches, a tail, and some to spare


class WeightedMean:
    """Σ w x / Σ w; NaN where nothing had a weight."""

    __slots__ = ("total", "weight")

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, value: float, weight: float) -> None:
        if weight:
            self.total += value * weight
            self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


def evaluate(
    step: TrainStep, batches: Iterable[Tree], group: Group | None = None, most: int | None = None
) -> dict[str, Any]:
    """Loss and metrics over all batches, or over the first few, each row counted once."""
    loss = WeightedMean()
    means: dict[str, WeightedMean] = {}
    totals = None if group is None else group.init()
    is_empty = True
    for batch in islice(iter(batches), most):
        is_empty = False
        result = step.evaluate(batch, captures=group is not None)
        loss.add(result.loss, result.weight)
        for name, value in result.metrics.items():
            means.setdefault(name, WeightedMean()).add(value, result.weights[name])
        if group is not None and totals is not None:
            group.add(totals, group.captured(result.captures))
    if is_empty:
        raise ArgumentError("evaluate", "there are no batches", "The data is empty.")
    values: dict[str, Any] = {"loss": loss.value}
    values |= {name: mean.value for name, mean in means.items()}
    if group is not None and totals is not None:
        values |= group.compute(totals)
    return values


def only_x(model: Any, batch: Tree) -> Any:
    """What `predict` computes if nothing else is said: the model of the batch, or of its "x"."""
    return model(batch["x"] if isinstance(batch, dict) else batch)


class Predictor:
    """Forwards that were attached to a step, by the function they compile."""

    def __init__(self, step: TrainStep):
        self._step = step
        self._attached: dict[Callable[..., Any], Forward] = {}

    def predict(self, batches: Iterable[Tree], forward: Callable[..., Any] | None) -> Tree:
        """`forward(model, batch)` of every batch, one after the other along the first axis."""
        chosen = only_x if forward is None else forward
        results = [self._program(chosen, batch)(self._inputs(chosen, batch)) for batch in batches]
        if not results:
            raise ArgumentError("predict", "there are no batches", "The data is empty.")
        columns = zip(*(trees.flatten(r)[0] for r in results), strict=True)
        structure = trees.flatten(results[0])[1]
        return structure.rebuild(_joined(column) for column in columns)

    def _inputs(self, chosen: Callable[..., Any], batch: Tree) -> Tree:
        """Only what the default needs, so that data with and without targets is one program."""
        if chosen is not only_x or not isinstance(batch, dict):
            return batch
        if "x" not in batch:
            raise ArgumentError(
                "predict",
                f"the batch has {', '.join(map(str, batch))}, and no 'x'",
                "Pass forward=lambda model, batch: ....",
            )
        return {"x": batch["x"]}

    def _program(self, chosen: Callable[..., Any], batch: Tree) -> Forward:
        if chosen not in self._attached:
            options = replace(
                self._step.recipe.options, on_new_shape="specialise", max_shapes=PREDICTED_SHAPES
            )
            inputs = self._inputs(chosen, batch)
            self._attached[chosen] = self._step.attach(chosen, inputs, options=options)
        return self._attached[chosen]


def _joined(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Scalars become a row of scalars."""
    return np.concatenate(parts) if np.ndim(parts[0]) else np.stack(parts)
