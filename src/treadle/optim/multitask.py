"""Several losses in one step: gradients of each part, and how they are put together."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.numbers import NOT_NEGATIVE, RATE, Numbers, check_flag, numbers
from treadle.base.trees import Tree
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import eq, maximum, minimum, pow, sign, sqrt, where
from treadle.frontend.functions.indexing import one_hot, take
from treadle.frontend.functions.reductions import argsort, mean
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import ones, stack, zeros
from treadle.frontend.tensor import Tensor
from treadle.optim.optimizer import Context, Params, Transform, stateless
from treadle.optim.selecting import Selector, check_selector, selects

LEAST_WEIGHT = 1e-4  # of a task in gradnorm: one that is no longer trained never comes back
TINY = 1e-30  # a gradient of zeros is in nobody's way


def pcgrad(*tasks: str, shuffle: bool = True) -> Transform:
    """Gradient surgery (Yu and others, 2020): tasks whose gradients conflict are projected.

    Tasks are parts of `losses.weighted` by name, by default all. The gradient of each loses what
    points against those of the others, one after the other in random order, or in theirs with
    `shuffle=False`; then they are summed. What else is in the loss stays. It comes first in a
    chain.
    """
    _check_tasks("pcgrad", tasks, least=0)
    check_flag("pcgrad", shuffle=shuffle)

    def changed(grads: Params, params: Params, context: Context) -> Params:
        own = [context.grad_of_part(n) for n in _parts("pcgrad", tasks, context)]
        return _added(grads, own, _surgery(_products(own), shuffle) - 1)

    return stateless("pcgrad", Numbers(), changed)


def _surgery(products: Tensor, shuffle: bool) -> Tensor:
    """How much of each gradient is in the sum of the projected ones.

    A projected gradient is a sum of gradients, so that its coefficients say all: products with
    others follow from those of the gradients among each other, (tasks, tasks).
    """
    count = products.shape[0]
    total = zeros((count,), products.dtype)
    for i in range(count):
        own = one_hot(as_tensor(i), count, products.dtype)
        order = argsort(random.uniform((count,))) if shuffle else None
        for k in range(count):
            j = as_tensor(k) if order is None else order[k]
            other = take(products, j)  # (tasks,): products of gradient j with all
            against = minimum(sum_of(own * other), 0)
            length = maximum(take(other, j), TINY)
            is_other = where(eq(j, i), 0, 1)
            step = against / length * cast(is_other, products.dtype)
            own = own - one_hot(j, count, products.dtype) * step
        total = total + own
    return total


def gradnorm(
    *tasks: str, alpha: float = 1.5, rate: float = 0.025, select: Selector | None = None
) -> Transform:
    """Weights of tasks that balance their gradients (GradNorm; Chen and others, 2018).

    Tasks are parts of `losses.weighted` by name. Each has a weight, from 1 on, by which the step
    trains it; the weights move by `rate` so that the norms of the weighted gradients come close to
    their mean, times (relative loss)^alpha: tasks that learn slowly get more. They sum to the
    number of tasks. Norms are of the parameters that `select` names, by default those that all
    tasks share. It comes first in a chain.
    """
    _check_tasks("gradnorm", tasks, least=2)
    check_selector("gradnorm", "select", select)
    given = numbers("gradnorm", alpha=(alpha, NOT_NEGATIVE), rate=(rate, RATE))
    count = len(tasks)

    def init(params: Params) -> Tree:
        return {"weights": ones((count,)), "first": ones((count,))}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        _parts("gradnorm", tasks, context)
        own = [context.grad_of_part(n) for n in tasks]
        losses = stack([cast(context.parts[n], dtypes.float32) for n in tasks])
        first = where(eq(context.updates, 0), losses, state["first"])
        weights = state["weights"]
        norms = stack([_norm(g, _shared(own, select)) for g in own])
        relative = losses / first
        share = relative / mean(relative)
        scaled = weights * norms
        wanted = mean(scaled) * pow(maximum(share, TINY), context.hyper["alpha"])
        moved = weights - sign(scaled - wanted) * norms * context.hyper["rate"]
        kept = maximum(moved, LEAST_WEIGHT)
        after = kept * (count / sum_of(kept))
        return _added(grads, own, weights - 1), {"weights": after, "first": first}

    return Transform("gradnorm", init, update, given.hyper, given.domains)


def _check_tasks(name: str, tasks: Sequence[object], least: int) -> None:
    wrong = [t for t in tasks if not isinstance(t, str)]
    if wrong or len(set(tasks)) != len(tasks) or len(tasks) < least or len(tasks) == 1:
        raise ArgumentError(
            name,
            f"the tasks are {', '.join(map(repr, tasks)) or 'none'}",
            f'Give the names of at least two parts of losses.weighted: {name}("a", "b").',
        )


def _parts(name: str, tasks: Sequence[str], context: Context) -> Sequence[str]:
    """The tasks that are meant, which must be parts of the loss."""
    known = list(context.parts)
    missing = [t for t in tasks if t not in known]
    if missing or len(known) < 2:
        cause = f"the loss has no part {', '.join(missing)}" if missing else "the loss has no parts"
        remedy = f"There are: {', '.join(known) or 'none'}. losses.weighted(a=…, b=…) makes them."
        raise ArgumentError(name, cause, remedy)
    return tasks or known


def _products(own: Sequence[Params]) -> Tensor:
    """Inner products of gradients, (tasks, tasks), in float32."""
    found = [[_product(a, b) for b in own[: i + 1]] for i, a in enumerate(own)]
    count = len(own)
    rows = [[found[max(i, j)][min(i, j)] for j in range(count)] for i in range(count)]
    return stack([stack(row) for row in rows])


def _product(a: Params, b: Params) -> Tensor:
    both = [n for n in a if n in b]
    pairs = ((cast(a[n], dtypes.float32), cast(b[n], dtypes.float32)) for n in both)
    total = as_tensor(0.0)
    for x, y in pairs:
        total = total + sum_of(x * y)
    return total


def _shared(own: Sequence[Params], select: Selector | None) -> set[str]:
    """Parameters whose gradients are weighed against each other."""
    if select is None:
        return set.intersection(*(set(g) for g in own))
    return {n for g in own for n in g if selects(select, n)}


def _norm(gradients: Params, names: set[str]) -> Tensor:
    part = {n: g for n, g in gradients.items() if n in names}
    return sqrt(maximum(_product(part, part), TINY))


def _added(grads: Params, own: Sequence[Params], more: Tensor) -> Params:
    """Gradients with so much more of each part's."""
    after = dict(grads)
    for i, part in enumerate(own):
        factor = more[i]
        for name in part:
            if name in after:
                after[name] = after[name] + part[name] * cast(factor, part[name].dtype)
    return after
