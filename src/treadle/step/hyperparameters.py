"""The numbers of an optimizer, and a schedule's value at a count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import cast
from treadle.frontend.scopes import isolated_tracing
from treadle.ir.graph import Output, OutputKind
from treadle.ir.ops.leaves import STATE
from treadle.optim.append import COUNT, SCALAR, UpdatePlan
from treadle.optim.schedules import Schedule
from treadle.runtime.oracle import OracleProgram
from treadle.runtime.session import Session

Naming = Callable[[], AbstractContextManager[None]]


class Hyperparameters(MutableMapping[str, float]):
    """The optimizer's numbers by name. Setting one takes effect at the next step, uncompiled."""

    def __init__(self, session: Session, plan: UpdatePlan, naming: Naming):
        self._session, self._plan, self._names = session, plan, tuple(plan.optimizer.hyper)
        self._naming = naming

    def _name(self, key: str) -> str:
        if key not in self._names:
            known = ", ".join(self._names)
            raise ArgumentError("hyperparameters", f"there is no {key!r}", f"There are: {known}.")
        return self._plan.name("hyper", key)

    def __getitem__(self, key: str) -> float:
        return float(self._session.values[self._name(key)])

    def __setitem__(self, key: str, value: float) -> None:
        name = self._name(key)
        with self._naming():
            number = self._plan.optimizer.check(key, value, self._plan.parameters)
        self._session.write({name: np.float64(number)})

    def __delitem__(self, key: str) -> None:
        raise ArgumentError("hyperparameters", f"{key!r} cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))

    def learning_rate(self, count: int) -> float:
        """The rate after so many updates, by the only schedule that there is."""
        key, schedule = self._schedule()
        return schedule_value(schedule, count, {k: self[f"{key}{k}"] for k in schedule.hyper})

    def set_learning_rate(self, rate: float) -> None:
        """Another rate, where it is one number."""
        key, schedule = self._schedule()
        if not schedule.is_constant:
            raise ArgumentError(
                "learning_rate",
                f"the rate follows the schedule {schedule.name}",
                "Set lr_scale, which multiplies it, or the schedule's numbers in hyperparameters.",
            )
        self[f"{key}lr"] = rate

    def _schedule(self) -> tuple[str, Schedule]:
        schedules = self._plan.optimizer.schedules
        if len(schedules) != 1:
            raise ArgumentError(
                "learning_rate",
                f"there are {len(schedules)} groups with rates of their own",
                f"Use hyperparameters: {', '.join(self)}.",
            )
        return next(iter(schedules.items()))


def schedule_value(schedule: Schedule, count: int, hyper: Mapping[str, float]) -> float:
    """A schedule at a count, through the oracle."""
    with isolated_tracing(schedule.name) as trace:
        numbers = {k: trace.leaf(STATE, k, SCALAR) for k in schedule.hyper}
        at = cast(trace.leaf(STATE, "count", COUNT), dtypes.float32)
        rate = schedule.value(at, numbers)
        graph = trace.finish_outputs([Output(OutputKind.RESULT, "rate", rate.handle)])
    values = {k: np.array(v) for k, v in hyper.items()} | {"count": np.array(count)}
    return float(OracleProgram(graph).run(values)[0])
