"""Optimizers from a rule for one parameter: what they share is written once.

A rule sees one parameter and gives its new value and the slots of its state that changed. Weight
decay, schedules, selectors and the loop over parameters are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

from treadle.base.errors import ArgumentError
from treadle.base.numbers import Numbers, check_flag
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor, constant
from treadle.frontend.functions.arithmetic import eq, log, tanh
from treadle.frontend.scopes import at_one_line
from treadle.frontend.tensor import Tensor
from treadle.optim.optimizer import Context, Definition, Optimizer, Params
from treadle.optim.schedules import Schedule, as_schedule
from treadle.optim.selecting import Selector, check_selector, check_selects, decays, selects

Rate = float | Schedule
Hyper = Mapping[str, Tensor]
Slot = Callable[[Tensor], Tensor | None]  # its first value; None where a parameter has none
Shared = Mapping[str, Tensor]


class Decay(Enum):
    """What becomes of `weight_decay`."""

    COUPLED = "added to the gradient, as λp"
    DECOUPLED = "subtracted from the parameter, as rate · λp"
    OWN = "left to the rule"


@dataclass(frozen=True, slots=True)
class One:
    """What a rule sees of one parameter, weight decay done unless it is the rule's own."""

    name: str
    p: Tensor
    g: Tensor
    state: Mapping[str, Tensor]
    shared: Shared  # scalars that all parameters have in common, advanced; `advance` may add some
    hyper: Hyper
    rate: Tensor
    t: Tensor  # the number of this update, from 1
    decay: Tensor | None  # λ where the rule applies it; None where the parameter is exempt
    extra: Tensor | None  # what `extra` made for this parameter
    corrections: dict[str, Tensor]  # those made so far, by β

    @property
    def is_first(self) -> Tensor:
        return eq(self.t, 1)

    def average(self, slot: str, value: Tensor, beta: str) -> Tensor:
        """The moving average of a slot: β · old + (1 − β) · value."""
        return self.state[slot] * self.hyper[beta] + value * (1 - self.hyper[beta])

    def correction(self, beta: str) -> Tensor:
        """1 − βᵗ, which is the same for all parameters."""
        if beta not in self.corrections:
            self.corrections[beta] = bias_correction(self.hyper[beta], self.t)
        return self.corrections[beta]


def bias_correction(beta: Tensor, t: Tensor) -> Tensor:
    """1 − βᵗ, without the digits that the difference would lose: −expm1(t log β) by tanh."""
    half = tanh(t * log(beta) * -0.5)
    return 2 * half / (1 + half)


def zeros(p: Tensor) -> Tensor:
    return constant(0, p.shape, p.dtype)


def filled(value: float) -> Slot:
    return lambda p: constant(value, p.shape, p.dtype)


def itself(p: Tensor) -> Tensor:
    """The parameter's first value."""
    return p


Rule = Callable[[One], tuple[Tensor, Mapping[str, Tensor]]]
Advance = Callable[[Shared, Hyper, Tensor, Tensor], Shared]  # of the numbers, the rate and t
Extra = Callable[[Params, Params, Context], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What an optimizer made of a rule has besides: state and how weight decay works."""

    slots: Mapping[str, Slot]
    decay: Decay = Decay.DECOUPLED
    shared: Mapping[str, float] | None = None  # scalars and their first values
    advance: Advance | None = None
    extra: Extra | None = None  # a tensor for each parameter that needs all of them
    flags: Mapping[str, bool] | None = None  # of the certificate's definition, where it has one


def per_parameter(
    name: str,
    lr: Rate,
    given: Numbers,
    rule: Rule,
    parts: Parts,
    selector: Selector | None,
    maximize: bool = False,
) -> Optimizer:
    """Return an optimizer that applies the same rule to each parameter.

    `selector` chooses the parameters with weight decay; `maximize` negates the gradients.
    """
    schedule = schedule_beside(name, lr, given)
    check_flag(name, maximize=maximize)
    check_selector(name, "decay", selector)
    shared = parts.shared or {}

    def init(params: Params) -> Tree:
        check_selects(name, selector, params)
        state: dict[str, Tree] = {}
        for slot, first in parts.slots.items():
            found = {n: first(p) for n, p in params.items()}
            state[slot] = {n: value for n, value in found.items() if value is not None}
        return state | {k: as_tensor(v) for k, v in shared.items()}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        rate, hyper, t = context.rate(schedule), context.hyper, context.updates + 1
        common: Shared = {k: state[k] for k in shared}
        if parts.advance is not None:
            common = parts.advance(common, hyper, rate, t)
        extra = {} if parts.extra is None else parts.extra(grads, params, context)
        after, new = dict(params), {slot: dict(state[slot]) for slot in parts.slots}
        corrections: dict[str, Tensor] = {}
        decayed = {n for n in grads if decays(selector, context, n)}
        with at_one_line():
            for key, slope in grads.items():
                g = -slope if maximize else slope
                p, amount = params[key], hyper["weight_decay"] if key in decayed else None
                if amount is not None and parts.decay is Decay.COUPLED:
                    g = g + p * amount
                elif amount is not None and parts.decay is Decay.DECOUPLED:
                    p = p * (1 - rate * amount)
                own = {slot: state[slot][key] for slot in parts.slots if key in state[slot]}
                more = extra.get(key)
                one = One(key, p, g, own, common, hyper, rate, t, amount, more, corrections)
                after[key], changed = rule(one)
                for slot, value in changed.items():
                    new[slot][key] = value
        return after, new | {k: common[k] for k in shared}

    known = None
    if parts.flags is not None:
        flags = {**parts.flags, "maximize": maximize}
        known = Definition(name, flags, schedule, partial(_selects, selector), update)
    return Optimizer(
        name,
        init,
        update,
        dict(schedule.hyper) | given.hyper,
        {"": schedule},
        domains=dict(schedule.domains) | given.domains,
        definition=known,
    )


def _selects(selector: Selector | None, name: str) -> bool:
    return selector is None or selects(selector, name)


def schedule_beside(name: str, lr: Rate, given: Numbers) -> Schedule:
    """The schedule, whose numbers stand beside the optimizer's under names of their own."""
    schedule = as_schedule(name, lr)
    both = sorted(schedule.hyper.keys() & given.hyper.keys())
    if both:
        raise ArgumentError(
            name,
            f"the schedule {schedule.name} and {name} both have a number {', '.join(both)}",
            "Rename the schedule's.",
        )
    return schedule
