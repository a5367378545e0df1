"""What an optimizer is: a pair of pure, traced functions; and how they are put together."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.frontend.tensor import Tensor
from treadle.optim.schedules import Schedule

Params = dict[str, Tensor]
Selector = str | Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Context:
    """What an update may know besides gradients, state and parameters."""

    count: Tensor  # updates done before this one, a float scalar
    hyper: Mapping[str, Tensor]
    lr_scale: Tensor
    decays: Mapping[str, bool]  # which parameters allow weight decay
    metrics: Mapping[str, Tensor]
    grad_at: Callable[[Params], Params]  # gradients of the same loss at other parameters

    def rate(self, schedule: Schedule) -> Tensor:
        """The learning rate in force."""
        return schedule.value(self.count, self.hyper) * self.lr_scale

    def inside(self, prefix: str) -> Context:
        """The context of a part whose hyperparameters have a prefix."""
        own = {k[len(prefix) :]: v for k, v in self.hyper.items() if k.startswith(prefix)}
        return dataclasses.replace(self, hyper=own)


def keep_params(state: Tree, params: Params) -> Params:
    """Evaluation uses the parameters that are trained."""
    return params


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`init(params) -> state` and `update(grads, state, params, context) -> (params, state)`.

    States are trees of tensors. `hyper` are named numbers that become scalar state of the step.
    """

    name: str
    init: Callable[[Params], Tree]
    update: Callable[[Params, Tree, Params, Context], tuple[Params, Tree]]
    hyper: Mapping[str, float]
    schedules: Mapping[str, Schedule]  # by the prefix of their hyperparameters
    eval_params: Callable[[Tree, Params], Params] = keep_params
    trains: Callable[[str], bool] = lambda name: True


@dataclass(frozen=True, slots=True)
class Transform:
    """Gradients to gradients: `init(params)`, `update(grads, state, params, context)`."""

    name: str
    init: Callable[[Params], Tree]
    update: Callable[[Params, Tree, Params, Context], tuple[Params, Tree]]
    hyper: Mapping[str, float]


def chain(*parts: Transform | Optimizer) -> Optimizer:
    """Transforms of the gradients one after the other, and an optimizer last."""
    if not parts or not isinstance(parts[-1], Optimizer):
        raise ArgumentError(
            "chain", "the last part is not an optimizer", "End with one, like adamw."
        )
    last = parts[-1]
    transforms: list[Transform] = []
    for i, part in enumerate(parts[:-1]):
        if not isinstance(part, Transform):
            cause = f"part {i} ({part.name}) is not a transform of gradients"
            raise ArgumentError("chain", cause, "Only the last part is an optimizer.")
        transforms.append(part)
    # An inner chain has numbered its own transforms; these are counted on.
    inner = len({k.rpartition(".")[0] for k in last.hyper if re.match(r"\w+\.\d+\.", k)})
    prefixes = [f"{t.name}.{i + inner}." for i, t in enumerate(transforms)]

    def init(params: Params) -> Tree:
        return {"transforms": [t.init(params) for t in transforms], "optimizer": last.init(params)}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        after = []
        for t, prefix, own in zip(transforms, prefixes, state["transforms"], strict=True):
            grads, new = t.update(grads, own, params, context.inside(prefix))
            after.append(new)
        params, new = last.update(grads, state["optimizer"], params, context)
        return params, {"transforms": after, "optimizer": new}

    hyper = {
        f"{p}{k}": v for p, t in zip(prefixes, transforms, strict=True) for k, v in t.hyper.items()
    }
    return dataclasses.replace(
        last,
        name="chain",
        init=init,
        update=update,
        hyper=hyper | dict(last.hyper),
        eval_params=lambda state, params: last.eval_params(state["optimizer"], params),
    )


def freeze() -> Optimizer:
    """Leaves its parameters as they are; their gradients are not even computed."""
    return Optimizer(
        "freeze",
        lambda params: {},
        lambda grads, state, params, context: (params, state),
        {},
        {},
        trains=lambda name: False,
    )


def groups(*members: tuple[Selector, Optimizer]) -> Optimizer:
    """An optimizer for each group of parameters; a parameter belongs to the first that selects it.

    A selector is a pattern of names ("*.bias", "encoder.*") or a function of the name.
    """
    if not members:
        raise ArgumentError("groups", "there are no groups", 'Pass ("*", optimizer).')
    prefixes = [f"group{i}." for i in range(len(members))]

    def split(params: Params) -> list[Params]:
        parts: list[Params] = [{} for _ in members]
        for name, value in params.items():
            parts[_member(members, name)][name] = value
        return parts

    def init(params: Params) -> Tree:
        parts = split(params)
        for (selector, optimizer), part in zip(members, parts, strict=True):
            if optimizer.name != "freeze" and not part:
                check_selects("groups", selector, params)
        return [o.init(part) for (_, o), part in zip(members, parts, strict=True)]

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        after, states = dict(params), []
        parts = zip(members, prefixes, split(params), state, strict=True)
        for (_, optimizer), prefix, part, own in parts:
            own_grads = {n: grads[n] for n in part if n in grads}
            new, kept = optimizer.update(own_grads, own, part, context.inside(prefix))
            after |= new
            states.append(kept)
        return after, states

    def eval_params(state: Tree, params: Params) -> Params:
        after = dict(params)
        for (_, optimizer), part, own in zip(members, split(params), state, strict=True):
            after |= optimizer.eval_params(own, part)
        return after

    optimizers = [o for _, o in members]
    return Optimizer(
        "groups",
        init,
        update,
        {
            f"{p}{k}": v
            for p, o in zip(prefixes, optimizers, strict=True)
            for k, v in o.hyper.items()
        },
        {
            f"{p}{k}": s
            for p, o in zip(prefixes, optimizers, strict=True)
            for k, s in o.schedules.items()
        },
        eval_params,
        lambda name: members[_member(members, name)][1].trains(name),
    )


def _member(members: Sequence[tuple[Selector, Optimizer]], name: str) -> int:
    for i, (selector, _) in enumerate(members):
        if selects(selector, name):
            return i
    shown = ", ".join(s if isinstance(s, str) else "a function" for s, _ in members)
    raise ArgumentError(
        "groups", f"no group selects {name!r} (selectors: {shown})", 'End with ("*", optimizer).'
    )


def selects(selector: Selector, name: str) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    return bool(selector(name))


def check_selects(operation: str, selector: Selector | None, params: Params) -> None:
    """A pattern that selects nothing is a typing error."""
    if not isinstance(selector, str) or selector == "*":
        return
    if not any(selects(selector, n) for n in params):
        raise ArgumentError(
            operation, f"{selector!r} selects no parameter", f"There are: {', '.join(params)}."
        )


def only(selector: Selector, optimizer: Optimizer) -> Optimizer:
    """Train what a selector names, freeze the rest."""
    return groups((selector, optimizer), ("*", freeze()))
