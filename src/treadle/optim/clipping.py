"""Transforms of gradients that bound their size."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.base import dtypes
from treadle.base.numbers import POSITIVE, Domain, Numbers, check_whole, numbers
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor, cast, constant
from treadle.frontend.functions.arithmetic import (
    clamp,
    eq,
    floor,
    lt,
    maximum,
    minimum,
    remainder,
    sqrt,
    where,
)
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.reductions import length as norm
from treadle.frontend.functions.reductions import sort
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import iota
from treadle.frontend.tensor import Tensor
from treadle.optim.optimizer import Context, Params, Transform, stateless

PERCENTAGE = Domain("a number from 0 to 100", high=100.0, is_working=False)


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

    def clipped(grads: Params, params: Params, context: Context) -> Params:
        return scaled_to_norm(grads, global_norm(grads.values()), context.hyper["max_norm"])

    return stateless("clip_by_global_norm", _limit("clip_by_global_norm", max_norm), clipped)


def clip_by_norm(max_norm: float) -> Transform:
    """Scale each gradient by itself so that its norm is at most `max_norm`."""

    def clipped(grads: Params, params: Params, context: Context) -> Params:
        limit = context.hyper["max_norm"]
        return {n: scaled_to_norm({n: g}, global_norm([g]), limit)[n] for n, g in grads.items()}

    return stateless("clip_by_norm", _limit("clip_by_norm", max_norm), clipped)


def _limit(name: str, max_norm: float) -> Numbers:
    return numbers(name, max_norm=(max_norm, POSITIVE))


def clip_by_value(limit: float) -> Transform:
    """Every element of every gradient between −limit and limit."""

    def clipped(grads: Params, params: Params, context: Context) -> Params:
        limit = context.hyper["limit"]
        return {n: clamp(g, -cast(limit, g.dtype), cast(limit, g.dtype)) for n, g in grads.items()}

    return stateless("clip_by_value", numbers("clip_by_value", limit=(limit, POSITIVE)), clipped)


def clip_adaptively(clipping: float = 0.01, eps: float = 1e-3) -> Transform:
    """Each unit's gradient at most `clipping` times as long as its weights (Brock, 2021).

    A unit is an entry of the first axis; vectors and scalars are one unit. Weights count as at
    least `eps` long.
    """
    given = numbers("clip_adaptively", clipping=(clipping, POSITIVE), eps=(eps, POSITIVE))

    def clipped(grads: Params, params: Params, context: Context) -> Params:
        hyper = context.hyper
        after = {}
        for name, g in grads.items():
            limit = maximum(unit_norm(params[name]), hyper["eps"]) * hyper["clipping"]
            scale = minimum(limit / maximum(unit_norm(g), 1e-6), 1.0)
            after[name] = g * cast(scale, g.dtype)
        return after

    return stateless("clip_adaptively", given, clipped)


def unit_norm(x: Tensor) -> Tensor:
    """Norms over all axes but the first, kept as axes of one element; of a vector, over all."""
    axes = tuple(range(1, x.ndim)) if x.ndim > 1 else tuple(range(x.ndim))
    return norm(x, axes, keepdims=True) if axes else norm(x)


def clip_by_percentile(percentile: float = 10.0, history: int = 128) -> Transform:
    """Scale all gradients to the given percentile of their norms so far (Seetharaman, 2020).

    The last `history` norms count, this one among them.
    """
    given = numbers("clip_by_percentile", percentile=(percentile, PERCENTAGE))
    check_whole("clip_by_percentile", "history", history)

    def init(params: Params) -> Tree:
        return {"norms": constant(0.0, (history,))}

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        now = global_norm(grads.values())
        place = iota((history,), 0, dtypes.float32)
        norms = where(eq(place, remainder(context.updates, history)), now, state["norms"])
        seen = minimum(context.updates + 1, history)
        ordered, _ = sort(where(lt(place, seen), norms, float("inf")))
        limit = _at(ordered, context.hyper["percentile"] / 100 * (seen - 1), seen - 1)
        return scaled_to_norm(grads, now, limit), {"norms": norms}

    return Transform("clip_by_percentile", init, update, given.hyper, given.domains)


def _at(ordered: Tensor, position: Tensor, last: Tensor) -> Tensor:
    """Between two neighbours, as far as the position's fraction."""
    low = floor(position)
    below = take(ordered, cast(low, dtypes.int32))
    above = take(ordered, cast(minimum(low + 1, last), dtypes.int32))
    return below + (above - below) * (position - low)
