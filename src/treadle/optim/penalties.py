"""Regularisers: penalties as transforms that add their gradient, and the bound on norms.

A penalty acts on what weight decay would: parameters that allow it, and of those the selected ones.
The loss that a step reports does not include it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.base.numbers import FRACTION, NOT_NEGATIVE, POSITIVE, Numbers, numbers
from treadle.base.trees import Tree
from treadle.frontend.coerce import cast
from treadle.frontend.functions.arithmetic import gt, maximum, sign, where
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.shaping import eye, reshape
from treadle.frontend.tensor import Tensor
from treadle.optim.building import Hyper
from treadle.optim.clipping import unit_norm
from treadle.optim.optimizer import Context, Optimizer, Params, Transform, check_inner, wrap
from treadle.optim.selecting import Selector, check_selector, check_selects, decays, selects

Slope = Callable[[Tensor, Hyper], Tensor]


def _penalty(name: str, given: Numbers, slope: Slope, select: Selector | None) -> Transform:
    """A transform that adds the gradient of a penalty on each selected parameter."""
    check_selector(name, "select", select)

    def init(params: Params) -> Tree:
        check_selects(name, select, params)
        return {}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        after = {
            n: g + cast(slope(params[n], context.hyper), g.dtype)
            if decays(select, context, n)
            else g
            for n, g in grads.items()
        }
        return after, state

    return Transform(name, init, update, given.hyper, given.domains)


def l1_penalty(amount: float, select: Selector | None = None) -> Transform:
    """amount · Σ|w|, whose gradient at 0 is 0."""
    given = numbers("l1_penalty", amount=(amount, NOT_NEGATIVE))
    return _penalty("l1_penalty", given, lambda w, hyper: sign(w) * hyper["amount"], select)


def l2_penalty(amount: float, select: Selector | None = None) -> Transform:
    """amount · ½ Σw²: coupled weight decay, before whatever the optimizer makes of gradients."""
    given = numbers("l2_penalty", amount=(amount, NOT_NEGATIVE))
    return _penalty("l2_penalty", given, lambda w, hyper: w * hyper["amount"], select)


def elastic_net_penalty(
    amount: float, l1_ratio: float = 0.5, select: Selector | None = None
) -> Transform:
    """amount · (ρ Σ|w| + (1 − ρ) ½ Σw²), ρ the l1_ratio, as scikit-learn has it."""
    given = numbers(
        "elastic_net_penalty", amount=(amount, NOT_NEGATIVE), l1_ratio=(l1_ratio, FRACTION)
    )

    def slope(w: Tensor, hyper: Hyper) -> Tensor:
        ratio = hyper["l1_ratio"]
        return (sign(w) * ratio + w * (1 - ratio)) * hyper["amount"]

    return _penalty("elastic_net_penalty", given, slope, select)


def group_lasso_penalty(amount: float, select: Selector | None = None) -> Transform:
    """amount · Σ √size · ‖row‖ over the entries of the first axis; a vector is one group.

    Whole groups go to zero together; the gradient of one that is there is 0.
    """
    given = numbers("group_lasso_penalty", amount=(amount, NOT_NEGATIVE))

    def slope(w: Tensor, hyper: Hyper) -> Tensor:
        length = unit_norm(w)
        is_there = gt(length, 0)
        unit = w / where(is_there, length, 1.0)
        size = w.size // length.size if length.size else 1
        return where(is_there, unit, 0.0) * (hyper["amount"] * math.sqrt(size))

    return _penalty("group_lasso_penalty", given, slope, select)


def orthogonal_penalty(amount: float, select: Selector | None = None) -> Transform:
    """amount · ‖WWᵀ − I‖² for the shorter side of W, its axes after the first taken as one.

    Vectors and scalars have none.
    """
    given = numbers("orthogonal_penalty", amount=(amount, NOT_NEGATIVE))

    def slope(w: Tensor, hyper: Hyper) -> Tensor:
        if w.ndim < 2:
            return w * 0.0
        flat = reshape(w, (w.shape[0], w.size // w.shape[0]))
        is_tall = flat.shape[0] > flat.shape[1]
        rows = flat.T if is_tall else flat
        off = matmul(rows, rows.T) - eye(rows.shape[0], dtype=w.dtype)
        found = matmul(off, rows) * (hyper["amount"] * 4)
        return reshape(found.T if is_tall else found, w.shape)

    return _penalty("orthogonal_penalty", given, slope, select)


def max_norm(optimizer: Optimizer, limit: float, select: Selector | None = None) -> Optimizer:
    """After each update, units longer than `limit` are scaled back to it.

    A unit is an entry of the first axis; a vector is one unit. By default matrices and what has
    more axes are bounded, and vectors are not.
    """
    check_inner("max_norm", optimizer)
    check_selector("max_norm", "select", select)
    given = numbers("max_norm", limit=(limit, POSITIVE))

    def is_bounded(name: str, p: Tensor) -> bool:
        return p.ndim > 1 if select is None else selects(select, name)

    def init(params: Params) -> Tree:
        check_selects("max_norm", select, params)
        return {"inner": optimizer.init(params)}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        after, inner = optimizer.update(grads, state["inner"], params, context)
        limit = context.hyper["max_norm.limit"]
        bounded = {
            n: p * (limit / maximum(unit_norm(p), limit)) if is_bounded(n, p) else p
            for n, p in after.items()
        }
        return bounded, {"inner": inner}

    return wrap(optimizer, "max_norm", given, init, update)
