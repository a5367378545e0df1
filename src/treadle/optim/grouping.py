"""Groups: an optimizer each, chosen by name; groups that are frozen, for good or for a while."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treadle.base import trees
from treadle.base.errors import ArgumentError
from treadle.base.numbers import FLAG, NOT_NEGATIVE, check_number
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.arithmetic import ne, where
from treadle.frontend.tensor import Tensor
from treadle.optim.optimizer import Context, Optimizer, Params, check_inner
from treadle.optim.selecting import Selector, Under, check_selector, check_selects, selects, shown

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


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are trained alike, by a name that begins the names of their numbers."""

    name: str
    select: Selector
    optimizer: Optimizer | None  # None: that of all the others
    numbers: Mapping[str, float]


def group(
    name: str,
    select: Selector | None = None,
    optimizer: Optimizer | None = None,
    **numbers: float,
) -> Group:
    """A group with a name, for `groups`: `group("head", lr=1e-2)` has the number "head.lr".

    Without `select` it is what the model has under that name. Without an optimizer it is the last
    one of `groups`, with other numbers.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError("group", f"the name is {name!r}", 'Use a word: "head".')
    check_selector("group", "select", select)
    if optimizer is not None:
        check_inner("group", optimizer)
    chosen: Selector = Under(name) if select is None else select
    return Group(name, chosen, optimizer, numbers)


Member = tuple[Selector, Optimizer] | Group | Optimizer


def groups(*members: Member) -> Optimizer:
    """An optimizer for each group of parameters; a parameter belongs to the first that selects it.

    A group is a `group` with a name, or a pair of a selector and an optimizer. A selector is a
    pattern of names ("*.bias", "encoder.*"), a function of the name, a module or parameter of the
    model, or a list of those. An optimizer by itself, the last, is for all others, and what groups
    that only have other numbers are made of. Each group has a number `frozen`: while it is True,
    its parameters and state stay as they are.
    """
    named = _by_prefix(members)
    prefixes, selectors = [p for p, _, _ in named], [s for _, s, _ in named]
    optimizers = [o if o.name == "freeze" else _freezable(o) for _, _, o in named]

    def owner(name: str, _: object = None) -> int:
        return _member(selectors, name)

    def check(params: Params) -> None:
        for i, (selector, optimizer) in enumerate(zip(selectors, optimizers, strict=True)):
            is_empty = not any(owner(n) == i for n in params)
            if optimizer.name != "freeze" and (is_empty or not isinstance(selector, str)):
                check_selects("groups", selector, params)

    found = partition("groups", list(zip(prefixes, optimizers, strict=True)), owner, check)

    def acts_on(key: str, name: str) -> bool:
        i = owner(name)
        prefix = prefixes[i]
        return key.startswith(prefix) and optimizers[i].acts_on(key[len(prefix) :], name)

    return dataclasses.replace(
        found, acts_on=acts_on, trains=lambda name: optimizers[owner(name)].trains(name)
    )


def _by_prefix(members: Sequence[Member]) -> list[tuple[str, Selector, Optimizer]]:
    """Groups as they are numbered or named: the prefix of the numbers, who is meant, and how."""
    last = members[-1] if len(members) > 1 and isinstance(members[-1], Optimizer) else None
    found: list[tuple[str, Selector, Optimizer]] = []
    for i, member in enumerate(members if last is None else members[:-1]):
        if isinstance(member, Group):
            found.append((f"{member.name}.", member.select, _optimizer_of(member, last)))
        else:
            selector, optimizer = _checked_pair(member)
            found.append((f"group{i}.", selector, optimizer))
    if last is not None:
        found.append(("", "*", last))
    if not found:
        raise ArgumentError("groups", "there are no groups", 'Pass ("*", optimizer).')
    prefixes = [prefix for prefix, _, _ in found]
    twice = sorted({p[:-1] for p in prefixes if prefixes.count(p) > 1})
    if twice:
        raise ArgumentError("groups", f"there are two groups {', '.join(twice)}", "Rename one.")
    return found


def _optimizer_of(member: Group, last: Optimizer | None) -> Optimizer:
    """The optimizer of a group, with the numbers of its own."""
    base = member.optimizer or last
    if base is None:
        raise ArgumentError(
            "groups",
            f"the group {member.name!r} has no optimizer",
            "Give it one, or end with one for all others: groups(group(...), optim.adamw(1e-3)).",
        )
    unknown = [k for k in member.numbers if k not in base.hyper]
    if unknown:
        cause = f"{base.name} has no number {', '.join(unknown)}"
        raise ArgumentError("group", cause, f"There are: {', '.join(base.hyper)}.")
    checked = {
        k: check_number("group", k, v, base.domains.get(k, NOT_NEGATIVE))
        for k, v in member.numbers.items()
    }
    return dataclasses.replace(base, hyper=dict(base.hyper) | checked)


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


def _checked_pair(member: object) -> tuple[Selector, Optimizer]:
    selector, optimizer = member if isinstance(member, tuple) and len(member) == 2 else ("", None)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            "groups",
            f"{member!r} is not a group",
            'Pass pairs, ("*.bias", optim.sgd(0.1)), or groups with names, group("head", lr=0.1).',
        )
    check_selector("groups", "the selector", selector)
    return selector, optimizer


def _member(selectors: Sequence[Selector], name: str) -> int:
    for i, selector in enumerate(selectors):
        if selects(selector, name):
            return i
    raise ArgumentError(
        "groups",
        f"no group selects {name!r} (selectors: {', '.join(map(shown, selectors))})",
        'End with ("*", optimizer).',
    )


def only(selector: Selector, optimizer: Optimizer) -> Optimizer:
    """Train what a selector names, freeze the rest.

    It is a pattern of names, a function of a name, a module or parameter, or a list of those.
    """
    check_inner("only", optimizer)
    return groups((selector, optimizer), ("*", freeze()))
