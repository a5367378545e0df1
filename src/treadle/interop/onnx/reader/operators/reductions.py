"""Reductions, running sums, ordering and losses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.base import dtypes
from treadle.base.shapes import without
from treadle.frontend.coerce import as_tensor, broadcast_to
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import reductions as r
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.activations import log_softmax
from treadle.frontend.functions.indexing import take, take_along_axis
from treadle.frontend.functions.sequences import cumprod
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import OPERATORS, Call, Operator, Value, operator
from treadle.interop.onnx.reader.operators.shaping import axes_given

Reduction = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _reduced(function: Reduction, empty: float | None = None) -> Operator:
    """A reduction over axes that are an operand, an attribute, or all.

    Of no elements it is `empty`, or else what the function makes of them.
    """

    def run(call: Call, x: Value, axes: Value = None) -> Tensor:
        tensor = as_tensor(x)
        chosen = axes_given(call, axes, tensor.ndim)
        if not chosen:
            if call.flag("noop_with_empty_axes"):
                return tensor if function in NEUTRAL else function(tensor, (), True)
            chosen = tuple(range(tensor.ndim))
        keep = call.flag("keepdims", True)
        if empty is not None and any(tensor.shape[i] == 0 for i in chosen):
            kept = [1 if i in chosen else n for i, n in enumerate(tensor.shape)]
            sizes = tuple(kept) if keep else without(tensor.shape, chosen)
            return s.full(sizes, _edge(tensor.dtype, empty), tensor.dtype)
        found = function(tensor, chosen, keep)
        return cast_to(found, tensor.dtype)

    return run


def _edge(dtype: dtypes.DType, value: float) -> float:
    if dtype.is_float:
        return value
    low, high = dtype.range()
    return bool(value > 0) if dtype is dtypes.bool_ else high if value > 0 else low


def _max(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    if x.dtype is dtypes.bool_:
        return r.any(x, axes, keep)
    return r.max(x, axes, keep)


def _min(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return r.all(x, axes, keep) if x.dtype is dtypes.bool_ else r.min(x, axes, keep)


def _mean(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    if x.dtype.is_float:
        return r.mean(x, axes, keep)
    count = max(1, r.count_of(x, axes))
    return a.floor_divide(r.sum(x, axes, keep, x.dtype), count)


def _sum(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return r.sum(x, axes, keep, x.dtype)


def _prod(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return r.prod(x, axes, keep, x.dtype)


def _of(outer: Callable[[Tensor], Tensor] | None, inner: Callable[[Tensor], Tensor]) -> Reduction:
    """outer(Σ inner(x))"""

    def reduction(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        wide = x if x.dtype.is_float or outer is None else cast_to(x, dtypes.float64)
        total = r.sum(inner(wide), axes, keep, wide.dtype)
        return total if outer is None else outer(total)

    return reduction


def _square(x: Tensor) -> Tensor:
    return x * x


def _logsumexp(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    wide = x if x.dtype.is_float else cast_to(x, dtypes.float64)
    return r.logsumexp(wide, axes, keep) if axes else wide


NEUTRAL = {_max, _min, _mean, _sum, _prod}  # of one element, that element
INFINITE = float("inf")
OPERATORS["ReduceSum"] = _reduced(_sum)
OPERATORS["ReduceMean"] = _reduced(_mean)
OPERATORS["ReduceMax"] = _reduced(_max, -INFINITE)
OPERATORS["ReduceMin"] = _reduced(_min, INFINITE)
OPERATORS["ReduceProd"] = _reduced(_prod)
OPERATORS["ReduceL1"] = _reduced(_of(None, a.abs))
OPERATORS["ReduceL2"] = _reduced(_of(a.sqrt, _square))
OPERATORS["ReduceSumSquare"] = _reduced(_of(None, _square))
OPERATORS["ReduceLogSum"] = _reduced(_of(a.log, lambda x: x))
OPERATORS["ReduceLogSumExp"] = _reduced(_logsumexp, -INFINITE)


@operator("ArgMax", "ArgMin")
def _arg(call: Call, x: Value) -> Tensor:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", 0), tensor.ndim)
    function = r.argmax if call.op == "ArgMax" else r.argmin
    is_last = call.flag("select_last_index")
    found = function(s.flip(tensor, axis) if is_last else tensor, axis, call.flag("keepdims", True))
    if is_last:
        found = tensor.shape[axis] - 1 - found
    return cast_to(found, dtypes.int64)


@operator("CumSum", "CumProd")
def _cumulated(call: Call, x: Value, axis: Value) -> Tensor:
    tensor = as_tensor(x)
    at = call.axis(int(call.number(axis, "the axis")), tensor.ndim)
    is_reverse, size = call.flag("reverse"), tensor.shape[at]
    if is_reverse:
        tensor = s.flip(tensor, at)
    if call.flag("exclusive"):  # without the element itself
        pairs = [(int(i == at), 0) for i in range(tensor.ndim)]
        longer = s.pad(tensor, pairs, 0 if call.op == "CumSum" else 1)
        tensor = s.slice_along(longer, at, 0, size)
    running = r.cumsum if call.op == "CumSum" else cumprod
    found = running(tensor, at, dtype=tensor.dtype)
    return s.flip(found, at) if is_reverse else found


@operator("TopK")
def _top_k(call: Call, x: Value, k: Value) -> list[Tensor]:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", -1), tensor.ndim)
    count = int(call.number(k, "k"))
    if not 0 <= count <= tensor.shape[axis]:
        raise call.refuse(f"{count} of {tensor.type} along axis {axis}")
    values, indices = r.topk(tensor, count, axis, call.flag("largest", True))
    return [values, cast_to(indices, dtypes.int64)]


# Losses


@operator("NegativeLogLikelihoodLoss")
def negative_log_likelihood(call: Call, x: Value, target: Value, weight: Value = None) -> Tensor:
    """x (N, C, …), target (N, …)."""
    scores, chosen = as_tensor(x), cast_to(as_tensor(target), dtypes.int64)
    ignored = call.integer("ignore_index") if call.has("ignore_index") else None
    is_counted = a.ne(chosen, -1 if ignored is None else ignored)
    safe = a.where(is_counted, chosen, 0)
    picked = take_along_axis(scores, s.unsqueeze(safe, 1), 1)
    loss = a.neg(s.squeeze(picked, 1))
    ones = s.ones(safe.shape, scores.dtype)
    weights = ones if weight is None else take(as_tensor(weight), safe)
    if ignored is not None:
        weights = a.where(is_counted, weights, 0)
    loss = loss * weights
    reduction = call.choice("reduction", "mean", ("none", "sum", "mean"))
    if reduction == "none":
        return loss
    return r.sum(loss) if reduction == "sum" else r.sum(loss) / r.sum(weights)


@operator("SoftmaxCrossEntropyLoss")
def _cross_entropy(call: Call, x: Value, target: Value, weight: Value = None) -> list[Tensor]:
    logarithms = log_softmax(as_tensor(x), 1)
    return [negative_log_likelihood(call, logarithms, target, weight), logarithms]


@operator("OneHot")
def _one_hot(call: Call, indices: Value, depth: Value, values: Value) -> Tensor:
    index, count = as_tensor(indices), int(call.number(depth, "the depth"))
    axis = call.axis(call.integer("axis", -1), index.ndim + 1)
    sizes = (*index.shape[:axis], count, *index.shape[axis:])
    wide = cast_to(index, dtypes.int64)
    wrapped = a.where(wide < 0, wide + count, wide)
    hits = a.eq(s.iota(sizes, axis, dtypes.int64), s.unsqueeze(wrapped, axis))
    pair = as_tensor(values)
    if pair.shape != (2,):
        raise call.refuse(f"the values are {pair.type}")
    off, on = (broadcast_to(pair[i], sizes) for i in (0, 1))
    return a.where(hits, on, off)


@operator("HannWindow", "HammingWindow", "BlackmanWindow")
def _window(call: Call, size: Value) -> np.ndarray:
    count = int(call.number(size, "the size"))
    call.bounded(count)
    whole = count if call.flag("periodic", True) else count - 1
    angle = 2 * np.pi * np.arange(count) / max(whole, 1)
    factors = {
        "HannWindow": (0.5, -0.5, 0.0),
        "HammingWindow": (25 / 46, -21 / 46, 0.0),
        "BlackmanWindow": (0.42, -0.5, 0.08),
    }[call.op]
    found = factors[0] + factors[1] * np.cos(angle) + factors[2] * np.cos(2 * angle)
    if call.integer("output_datatype", 1) not in (1, 11):
        raise call.refuse("its numbers are neither float32 nor float64")
    return found.astype(np.float32 if call.integer("output_datatype", 1) == 1 else np.float64)
