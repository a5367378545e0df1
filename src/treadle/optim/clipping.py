"""Transforms of gradients that bound their size."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import minimum, sqrt
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.tensor import Tensor
from treadle.optim.optimizer import Context, Params, Transform


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, in float32 or wider."""
    total: Tensor = as_tensor(0.0)
    for g in gradients:
        wide = cast(g, dtypes.promote(g.dtype, dtypes.float32))
        total = total + sum_of(wide * wide)
    return sqrt(total)


def scaled_to_norm(gradients: Params, norm: Tensor, limit: Tensor) -> Params:
    """Gradients scaled so that their norm is at most the limit, as torch's clip_grad_norm_."""
    scale = minimum(limit / (norm + 1e-6), 1.0)
    return {name: g * cast(scale, g.dtype) for name, g in gradients.items()}


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scale all gradients together so that their norm is at most `max_norm`."""
    if not max_norm > 0:
        raise ArgumentError("clip_by_global_norm", f"max_norm = {max_norm}", "It must be positive.")

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        norm = global_norm(grads.values())
        return scaled_to_norm(grads, norm, context.hyper["max_norm"]), state

    return Transform("clip_by_global_norm", lambda params: {}, update, {"max_norm": max_norm})
