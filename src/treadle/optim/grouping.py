"""Groups: an optimizer each, chosen by name; groups that are frozen, for good or for a while."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence

from treadle.base import trees
from treadle.base.errors import ArgumentError
from treadle.base.numbers import FLAG
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import ne, where
from treadle.frontend.tensor import Tensor
from treadle.optim.optimizer import Context, Optimizer, Params

Selector = str | Callable[[str], bool]
Choose = Callable[[str, Tensor], int]
FROZEN = "frozen"


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

    A selector is a pattern of names ("*.bias", "encoder.*") or a function of the name. Each group
    has a number `frozen`: while it is 1, its parameters and state stay as they are.
    """
    _check_members(members)
    prefixes = [f"group{i}." for i in range(len(members))]
    optimizers = [o if o.name == "freeze" else _freezable(o) for _, o in members]

    def owner(name: str, _: object = None) -> int:
        return _member(members, name)

    def check(params: Params) -> None:
        for i, (selector, optimizer) in enumerate(members):
            if optimizer.name != "freeze" and not any(owner(n) == i for n in params):
                check_selects("groups", selector, params)

    found = partition("groups", list(zip(prefixes, optimizers, strict=True)), owner, check)

    def acts_on(key: str, name: str) -> bool:
        i = owner(name)
        prefix = prefixes[i]
        return key.startswith(prefix) and optimizers[i].acts_on(key[len(prefix) :], name)

    return dataclasses.replace(
        found, acts_on=acts_on, trains=lambda name: optimizers[owner(name)].trains(name)
    )


def partition(
    name: str,
    members: Sequence[tuple[str, Optimizer]],
    owner: Choose,
    check: Callable[[Params], None] = lambda params: None,
) -> Optimizer:
    """Optimizers, each with a prefix of its numbers, for disjoint parts of the parameters."""

    def split(params: Params) -> list[Params]:
        parts: list[Params] = [{} for _ in members]
        for key, value in params.items():
            parts[owner(key, value)][key] = value
        return parts

    def init(params: Params) -> Tree:
        check(params)
        return [o.init(part) for (_, o), part in zip(members, split(params), strict=True)]

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        after, states = dict(params), []
        for (prefix, optimizer), part, own in zip(members, split(params), state, strict=True):
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

    return Optimizer(
        name,
        init,
        update,
        {f"{p}{k}": v for p, o in members for k, v in o.hyper.items()},
        {f"{p}{k}": s for p, o in members for k, s in o.schedules.items()},
        eval_params,
        domains={f"{p}{k}": d for p, o in members for k, d in o.domains.items()},
    )


def _freezable(inner: Optimizer) -> Optimizer:
    """The optimizer with a number that stops it, and a count of the updates it did.

    Bias corrections follow that count, so that a group which starts late starts like any other.
    """

    def init(params: Params) -> Tree:
        return {"updates": as_tensor(0.0), "optimizer": inner.init(params)}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        is_frozen = ne(context.hyper[FROZEN], 0)
        done, own = state["updates"], state["optimizer"]
        new, after = inner.update(grads, own, params, dataclasses.replace(context, updates=done))
        kept = {n: where(is_frozen, p, new[n]) for n, p in params.items() if n in new}
        old, structure = trees.flatten(own)
        leaves = [
            a if a.handle == b.handle else where(is_frozen, b, a)
            for a, b in zip(map(as_tensor, trees.flatten(after)[0]), old, strict=True)
        ]
        updates = where(is_frozen, done, done + 1)
        return kept, {"updates": updates, "optimizer": structure.rebuild(leaves)}

    return dataclasses.replace(
        inner,
        init=init,
        update=update,
        hyper=dict(inner.hyper) | {FROZEN: 0.0},
        domains=dict(inner.domains) | {FROZEN: FLAG},
        eval_params=lambda state, params: inner.eval_params(state["optimizer"], params),
    )


def _check_members(members: Sequence[object]) -> None:
    if not members:
        raise ArgumentError("groups", "there are no groups", 'Pass ("*", optimizer).')
    for member in members:
        is_pair = isinstance(member, tuple) and len(member) == 2
        if not is_pair or not isinstance(member[1], Optimizer):  # type: ignore[index]
            raise ArgumentError(
                "groups", f"{member!r} is not a group", 'Pass pairs: ("*.bias", optim.sgd(0.1)).'
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


def check_selector(operation: str, name: str, selector: object) -> None:
    if selector is not None and not isinstance(selector, str) and not callable(selector):
        raise ArgumentError(
            operation, f"{name} = {selector!r}", "It is a pattern of names or a function of one."
        )


def check_selects(operation: str, selector: Selector | None, params: Mapping[str, object]) -> None:
    """A pattern that selects nothing is a typing error."""
    if not isinstance(selector, str) or selector == "*":
        return
    if not any(selects(selector, n) for n in params):
        raise ArgumentError(
            operation, f"{selector!r} selects no parameter", f"There are: {', '.join(params)}."
        )


def decays(selector: Selector | None, context: Context, name: str) -> bool:
    """Whether weight decay applies: the parameter allows it, and the filter if there is one."""
    return context.decays.get(name, True) and (selector is None or selects(selector, name))


def only(selector: Selector, optimizer: Optimizer) -> Optimizer:
    """Train what a selector names, freeze the rest."""
    return groups((selector, optimizer), ("*", freeze()))
