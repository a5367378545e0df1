"""What a trainer trains: a step, or several by name with a function that calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from numbers import Real
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.runtime.session import Session
from treadle.step.programs import UNWATCHED, Watched
from treadle.step.results import StepResult
from treadle.step.train_step import TrainStep
from treadle.step.watching import Histogram
from treadle.train.restoring import Steps, steps_by_name

TrainingStep = Callable[[Any, Tree], Any]
State = dict[str, dict[str, np.ndarray]]
Calls = list[dict[str, int]]


class StepResults:
    """What the steps of one call told, by name, and numbers beside them.

    Metrics, norms and histograms have the name in front: "g/loss".
    """

    def __init__(self, results: Mapping[str, StepResult], numbers: Mapping[str, float]):
        self.results, self.numbers = dict(results), dict(numbers)

    def __getitem__(self, name: str) -> StepResult:
        return self.results[name]

    @property
    def metrics(self) -> dict[str, float]:
        own = {f"{n}/{k}": v for n, r in self.results.items() for k, v in r.metrics.items()}
        return own | self.numbers

    @property
    def grad_norms(self) -> dict[str, float]:
        return {f"{n}/{k}": v for n, r in self.results.items() for k, v in r.grad_norms.items()}

    @property
    def histograms(self) -> dict[str, Histogram]:
        return {f"{n}/{k}": h for n, r in self.results.items() for k, h in r.histograms.items()}

    def __repr__(self) -> str:
        parts = [f"{n}={v!r}" for n, v in {**self.results, **self.numbers}.items()]
        return f"StepResults({', '.join(parts)})"


Out = StepResult | StepResults


def results_of(out: Out) -> dict[str, StepResult]:
    """Each step's own, by what its numbers begin with."""
    if isinstance(out, StepResult):
        return {"": out}
    return {f"{name}/": result for name, result in out.results.items()}


def losses_of(out: Out) -> dict[str, float]:
    return {f"{start}loss": result.loss for start, result in results_of(out).items()}


def step_values(out: Out) -> dict[str, float]:
    """The numbers of a step that go into the history."""
    values: dict[str, float] = {}
    for start, result in results_of(out).items():
        values[f"{start}loss"] = result.loss
        if result.grad_norm is not None:
            values[f"{start}grad_norm"] = result.grad_norm
    return values | out.metrics


class Trained:
    """Steps that are trained together. The first counts updates, and is the one that validates."""

    def __init__(self, given: Steps, training_step: TrainingStep | None = None):
        self.saved = given  # as checkpoints have them
        self.named = _checked(given)
        self.main = next(iter(self.named.values()))
        self._function = training_step
        if training_step is not None and not callable(training_step):
            cause = f"training_step is {training_step!r}"
            raise ArgumentError("Trainer", cause, "Pass a function of the steps and a batch.")
        if training_step is None and len(self.named) > 1:
            raise ArgumentError(
                "Trainer",
                f"there are {len(self.named)} steps, and nothing says how they are called",
                "Pass training_step=, a function of the steps and a batch.",
            )

    def __call__(self, batch: Tree, watched: Watched) -> Out:
        """One call for one batch."""
        if self._function is None:
            return self.main(batch) if watched == UNWATCHED else self.main(batch, *watched)
        with ExitStack() as stack:
            if watched != UNWATCHED:
                for step in self.named.values():
                    stack.enter_context(step.watching(*watched))
            return _as_out(self._function(self.saved, batch))

    @property
    def skips_overflows(self) -> bool:
        """Whether a loss that is not finite may be a matter of the loss scale."""
        return any(s.recipe.precision is dtypes.float16 for s in self.named.values())

    @property
    def position(self) -> object:
        """What changes whenever a step or a forward beside it was called, on the host."""
        return [s.position for s in self.named.values()], self.calls()

    @property
    def can_tear(self) -> bool:
        """Whether a call is more than one step, so that an error may come in between."""
        return self._function is not None

    def not_finite(self) -> tuple[str, ...]:
        """Names of what is NaN or infinite and should not be."""
        if len(self.named) == 1:
            return self.main.not_finite()
        found = {name: step.not_finite() for name, step in self.named.items()}
        return tuple(f"{name}: {own}" for name, names in found.items() for own in names)

    def state(self) -> tuple[State, Calls]:
        """Everything the next call depends on."""
        return {name: step.state_dict() for name, step in self.named.items()}, self.calls()

    def load(self, state: tuple[State, Calls]) -> None:
        for name, step in self.named.items():
            step.load_state_dict(state[0][name])
        self.load_calls(state[1])

    def params(self) -> dict[str, np.ndarray]:
        """Copies of all parameters and states; of several steps with the step's name in front."""
        if len(self.named) == 1:
            return self.main.params
        steps = self.named.items()
        return {f"{name}/{n}": a for name, step in steps for n, a in step.params.items()}

    def load_params(self, params: Mapping[str, np.ndarray]) -> None:
        """Take what `params` gave."""
        for name, step in self.named.items():
            start = f"{name}/" if len(self.named) > 1 else ""
            step.load_params({n[len(start) :]: a for n, a in params.items() if n.startswith(start)})

    def _sessions(self) -> list[Session]:
        return list({id(s.session): s.session for s in self.named.values()}.values())

    def calls(self) -> Calls:
        """How often forwards were called: what they draw depends on it. JSON, for each session."""
        return [{str(k): n for k, n in session.calls.items() if n} for session in self._sessions()]

    def load_calls(self, calls: Calls) -> None:
        for session, own in zip(self._sessions(), calls, strict=False):
            session.calls = {int(number): count for number, count in own.items()}


def _checked(given: object) -> dict[str, TrainStep]:
    try:
        return steps_by_name(given)
    except ArgumentError:
        cause = f"{type(given).__name__} is not a training step"
        if isinstance(given, Mapping):
            wrong = [n for n, s in given.items() if not isinstance(s, TrainStep)]
            said = ", ".join(map(repr, wrong or given)) or "nothing"
            cause = f"{said} is not a step by a plain name"
        remedy = "Pass what td.compile_step gives, or a dict of such steps."
        raise ArgumentError("Trainer", cause, remedy) from None


def _as_out(returned: object) -> Out:
    """What a training step returned: a result, or results and numbers by name."""
    if isinstance(returned, StepResult):
        return returned
    if not isinstance(returned, Mapping) or not returned:
        raise ArgumentError(
            "fit",
            f"training_step returns {returned!r}",
            'Return what the steps gave: {"d": d_result, "g": g_result}.',
        )
    results = {str(n): r for n, r in returned.items() if isinstance(r, StepResult)}
    rest = {str(n): v for n, v in returned.items() if not isinstance(v, StepResult)}
    wrong = [f"{n}: {v!r}" for n, v in rest.items() if not _is_number(v)]
    if wrong:
        cause = f"training_step returns {', '.join(wrong)}"
        raise ArgumentError("fit", cause, "Values are results of steps, or numbers.")
    return StepResults(results, {n: float(v) for n, v in rest.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, np.ndarray) and value.shape == ())
