"""What an optimizer is: a pair of pure, traced functions; and how they are put together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError
from treadle.base.numbers import NOT_NEGATIVE, Domain, Numbers, check_number, check_rounding
from treadle.base.trees import Tree
from treadle.frontend.tensor import Tensor
from treadle.ir.types import TensorType
from treadle.optim.schedules import Schedule

Params = dict[str, Tensor]
Init = Callable[[Params], Tree]


@dataclass(frozen=True, slots=True)
class Context:
    """What an update may know besides gradients, state and parameters.

    Gradients at other parameters are of the same loss on the same batch; parameters that are not
    given stay as they are.
    """

    count: Tensor  # updates done before this one, a float scalar: what schedules follow
    updates: Tensor  # those that this optimizer did: fewer where its group was frozen
    hyper: Mapping[str, Tensor]
    lr_scale: Tensor
    decays: Mapping[str, bool]  # which parameters allow weight decay
    metrics: Mapping[str, Tensor]
    grad_at: Callable[[Params], Params]
    evaluate_at: Callable[[Params], tuple[Tensor, Params]]  # the loss and those gradients
    loss: Tensor  # at these parameters
    sampled_grad_at: Callable[[Params], tuple[Params, int]]  # labels drawn from the model; how many
    clip: Callable[[Params], Params]  # the step's own clipping, for gradients of grad_at
    parts: Mapping[str, Tensor]  # of the loss, as they stand in its sum: see losses.weighted
    grad_of_part: Callable[[str], Params]  # the gradient of one of them, at these parameters

    def rate(self, schedule: Schedule) -> Tensor:
        """The learning rate in force."""
        return schedule.value(self.count, self.hyper) * self.lr_scale

    def inside(self, prefix: str) -> Context:
        """The context of a part whose hyperparameters have a prefix."""
        own = {k[len(prefix) :]: v for k, v in self.hyper.items() if k.startswith(prefix)}
        return dataclasses.replace(self, hyper=own)


Update = Callable[[Params, Tree, Params, Context], tuple[Params, Tree]]


def keep_params(state: Tree, params: Params) -> Params:
    """Evaluation uses the parameters that are trained."""
    return params


@dataclass(frozen=True, slots=True)
class Definition:
    """An update that the certificate's checker has a definition of, by name.

    `flags` are the choices that change its formula. It holds for `update` alone: an optimizer made
    of another one by `dataclasses.replace` has another update.
    """

    name: str
    flags: Mapping[str, bool]
    schedule: Schedule
    decays: Callable[[str], bool]  # which parameters `decay` selects
    update: Update


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`init(params) -> state` and `update(grads, state, params, context) -> (params, state)`.

    States are trees of tensors. `hyper` are named numbers that become scalar state of the step;
    `domains` say where they may lie, by default anywhere from 0.
    """

    name: str
    init: Init
    update: Update
    hyper: Mapping[str, float]
    schedules: Mapping[str, Schedule]  # by the prefix of their hyperparameters
    eval_params: Callable[[Tree, Params], Params] = keep_params
    trains: Callable[[str], bool] = lambda name: True
    domains: Mapping[str, Domain] = field(default_factory=dict)
    acts_on: Callable[[str, str], bool] = lambda key, name: True  # which number on which parameter
    definition: Definition | None = None

    @property
    def known(self) -> Definition | None:
        """The definition, if the update is still the one that it is of."""
        is_own = self.definition is not None and self.definition.update is self.update
        return self.definition if is_own else None

    def check(self, key: str, value: object, types: Mapping[str, TensorType]) -> float:
        """A number for `key`, also after rounding to the dtype of the parameters it acts on."""
        domain = self.domains.get(key, NOT_NEGATIVE)
        number = check_number(self.name, key, value, domain)
        narrowest: DType = dtypes.float32
        for name, type_ in types.items():
            if type_.dtype.bits < narrowest.bits and self.acts_on(key, name):
                narrowest = type_.dtype
        check_rounding(self.name, key, number, domain, narrowest)
        return number


@dataclass(frozen=True, slots=True)
class Transform:
    """Gradients to gradients: `init(params)`, `update(grads, state, params, context)`."""

    name: str
    init: Init
    update: Update
    hyper: Mapping[str, float]
    domains: Mapping[str, Domain] = field(default_factory=dict)


def stateless(name: str, given: Numbers, changed: Callable[..., Params]) -> Transform:
    """A transform without state: `changed(grads, params, context)`."""

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        return changed(grads, params, context), state

    return Transform(name, lambda params: {}, update, given.hyper, given.domains)


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
            shown = getattr(part, "name", repr(part))
            cause = f"part {i} ({shown}) is not a transform of gradients"
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

    named = list(zip(prefixes, transforms, strict=True))
    return dataclasses.replace(
        last,
        name="chain",
        init=init,
        update=update,
        hyper={f"{p}{k}": v for p, t in named for k, v in t.hyper.items()} | dict(last.hyper),
        domains={f"{p}{k}": d for p, t in named for k, d in t.domains.items()} | dict(last.domains),
        eval_params=lambda state, params: last.eval_params(state["optimizer"], params),
    )


def wrap(
    inner: Optimizer,
    name: str,
    given: Numbers,
    init: Init,
    update: Update,
    eval_params: Callable[[Tree, Params], Params] | None = None,
) -> Optimizer:
    """An optimizer around another, whose state is under "inner".

    The numbers of its own have its name in front: "ema.decay".
    """
    own = {f"{name}.{k}": v for k, v in given.hyper.items()}
    if own.keys() & inner.hyper.keys():
        raise ArgumentError(name, f"there is {name} inside it already", "Use it once.")
    return dataclasses.replace(
        inner,
        name=name,
        init=init,
        update=update,
        hyper=dict(inner.hyper) | own,
        domains=dict(inner.domains) | {f"{name}.{k}": d for k, d in given.domains.items()},
        eval_params=eval_params
        or (lambda state, params: inner.eval_params(state["inner"], params)),
    )


def check_inner(name: str, inner: object) -> None:
    if not isinstance(inner, Optimizer):
        raise ArgumentError(
            name, f"it is around {inner!r}", "Pass an optimizer first: optim.adamw(1e-3)."
        )
