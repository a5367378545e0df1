"""What an ensemble tells and is told: numbers for each member."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from treadle.base import trees
from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import FACTOR, RATE, check_number, check_rounding
from treadle.base.trees import Tree
from treadle.frontend.scopes import RANDOM_STATE
from treadle.optim.append import UpdatePlan
from treadle.pipeline import StepRecipe
from treadle.runtime.session import Session
from treadle.step.batches import Arrays, ByShape
from treadle.step.forward import Built
from treadle.step.index_guard import run_guarded

OWN_NUMBERS = {"lr_scale": RATE, "clip_norm": FACTOR}  # of the step, beside the optimizer's


def by_member(values: Sequence[Any]) -> np.ndarray:
    """Values of the members as one array with an axis of them in front."""
    return np.stack([np.asarray(value) for value in values])


class EnsembleResult:
    """What a step, or an evaluation, of all members tells: arrays of n; a GPU waits to be asked."""

    def __init__(self, outputs: Mapping[str, Any]):
        self.outputs = outputs

    @cached_property
    def losses(self) -> np.ndarray:
        return np.asarray(self.outputs["result:loss"])

    @property
    def loss(self) -> float:
        """The mean of the members' losses."""
        return float(self.losses.mean())

    @cached_property
    def grad_norms(self) -> np.ndarray | None:
        """Of each member's mean gradient, before clipping; None without an update."""
        found = self.outputs.get("result:grad_norm")
        return None if found is None else np.asarray(found)

    @cached_property
    def metrics(self) -> Arrays:
        prefix = "metric:"
        return {
            name[len(prefix) :]: np.asarray(value)
            for name, value in self.outputs.items()
            if name.startswith(prefix)
        }

    def __repr__(self) -> str:
        return f"EnsembleResult(losses={self.losses!r}, metrics={self.metrics!r})"


class MemberHyperparameters(MutableMapping[str, np.ndarray]):
    """The optimizer's numbers, `lr_scale` and `clip_norm`, of each member: arrays of n.

    Setting one (a number for all, or one for each) takes effect at the next step, uncompiled.
    """

    def __init__(self, session: Session, plan: UpdatePlan, recipe: StepRecipe, members: int):
        self._session, self._plan, self._recipe, self._members = session, plan, recipe, members
        own = [n for n in OWN_NUMBERS if n != "clip_norm" or plan.clip_norm is not None]
        self._names = {k: plan.name("hyper", k) for k in plan.optimizer.hyper}
        self._names |= {k: plan.name(k) for k in own}

    def _name(self, key: str) -> str:
        if key not in self._names:
            raise ArgumentError(
                "ensemble",
                f"there is no number {key!r} that members may differ in",
                f"There are: {', '.join(self._names)}. What else differs is another model, or a "
                "state of it: see load_params.",
            )
        return self._names[key]

    def _checked(self, key: str, value: object) -> float:
        if key not in OWN_NUMBERS:
            with self._recipe.naming():
                return self._plan.optimizer.check(key, value, self._plan.parameters)
        number = check_number("ensemble", key, value, OWN_NUMBERS[key])
        check_rounding("ensemble", key, number, OWN_NUMBERS[key], float32)
        return number

    def __getitem__(self, key: str) -> np.ndarray:
        return np.array(self._session.values[self._name(key)], np.float64)

    def __setitem__(self, key: str, value: Any) -> None:
        name = self._name(key)
        given = [value] * self._members if np.ndim(value) == 0 else list(value)
        if len(given) != self._members:
            raise ShapeError(
                "ensemble",
                f"{key} has {len(given)} values for {self._members} members",
                "Give one number for all, or one for each.",
            )
        numbers = np.array([self._checked(key, v) for v in given], np.float64)
        self._session.write({name: numbers})

    def __delitem__(self, key: str) -> None:
        raise ArgumentError("ensemble", f"{key!r} cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr({key: self[key].tolist() for key in self})


class MemberPredictions:
    """A forward program of all members: a batch gives results with an axis of n in front."""

    def __init__(self, session: Session, programs: ByShape[Built], key: Callable[[], np.ndarray]):
        self._session, self._programs, self._key = session, programs, key

    def __call__(self, batch: Tree) -> Tree:
        """Every member's result."""
        built, arrays = self._programs.get("ensemble", batch)
        given = arrays | {RANDOM_STATE: self._key()}
        outputs = run_guarded(self._session, "ensemble", built, built.program, given)
        structure = built.traced.structure
        results = [np.asarray(outputs[f"result:{i}"]) for i in range(structure.leaves)]
        return structure.rebuild(results)

    def mean(self, batch: Tree) -> Tree:
        """The mean over the members."""
        return trees.map_leaves(lambda a: a.mean(0, dtype=np.float64).astype(a.dtype), self(batch))

    def std(self, batch: Tree) -> Tree:
        """How far members lie apart: the standard deviation over them."""
        return trees.map_leaves(lambda a: a.std(0, dtype=np.float64).astype(a.dtype), self(batch))

    def vote(self, batch: Tree) -> Tree:
        """The class that most members give the largest of the last axis; the lowest of equals."""
        return trees.map_leaves(_voted, self(batch))


def _voted(scores: np.ndarray) -> np.ndarray:
    if scores.ndim < 2:
        raise ShapeError(
            "vote", f"a member gives the shape {scores.shape[1:]}", "Give scores (…, classes)."
        )
    chosen = scores.argmax(-1)[..., None]  # (n, …, 1)
    votes = (chosen == np.arange(scores.shape[-1])).sum(0)
    return np.asarray(votes.argmax(-1))
