"""Transforms of gradients that change their scale or centre."""

from __future__ import annotations

from treadle.base.numbers import POSITIVE, Numbers, check_choice, numbers
from treadle.frontend.coerce import cast
from treadle.frontend.functions.reductions import mean
from treadle.optim.clipping import global_norm
from treadle.optim.optimizer import Context, Params, Transform, stateless


def normalize_gradients(by: str = "parameter", eps: float = 1e-8) -> Transform:
    """Gradients divided by their norm: each by its own, or all by the "global" one."""
    check_choice("normalize_gradients", "by", by, ("parameter", "global"))
    given = numbers("normalize_gradients", eps=(eps, POSITIVE))

    def changed(grads: Params, params: Params, context: Context) -> Params:
        shared = global_norm(grads.values()) if by == "global" else None
        after = {}
        for name, g in grads.items():
            length = global_norm([g]) if shared is None else shared
            after[name] = g / cast(length + context.hyper["eps"], g.dtype)
        return after

    return stateless("normalize_gradients", given, changed)


def centralize_gradients() -> Transform:
    """Each unit's gradient without its mean, over all axes but the first (Yong and others, 2020).

    Vectors and scalars stay as they are.
    """

    def changed(grads: Params, params: Params, context: Context) -> Params:
        return {
            n: g - mean(g, tuple(range(1, g.ndim)), keepdims=True) if g.ndim > 1 else g
            for n, g in grads.items()
        }

    return stateless("centralize_gradients", Numbers(), changed)
