"""The definition of each composite, in primitives. The definition is the meaning."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from treadle.base.dtypes import DType, accumulator, int32, promote
from treadle.base.origin import Origin
from treadle.base.shapes import Shape
from treadle.frontend.coerce import broadcast_to, cast, constant
from treadle.frontend.functions.arithmetic import (
    eq,
    erf,
    exp,
    log,
    log1p,
    maximum,
    minimum,
    stop_gradient,
    tanh,
    where,
)
from treadle.frontend.functions.arithmetic import rsqrt as rsqrt_of
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.linear import contract
from treadle.frontend.functions.pooling import least, pool_windows
from treadle.frontend.functions.reductions import argmax as argmax_of
from treadle.frontend.functions.reductions import count_of, kept_shape
from treadle.frontend.functions.reductions import max as max_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import iota, reshape, unsqueeze
from treadle.frontend.scopes import bind1, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.op import Attributes, Op
from treadle.ir.ops.indexing import GATHER, Gather
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType

Definition = TypeVar("Definition", bound=Callable[..., Any])


def definition(op: Op) -> Callable[[Definition], Definition]:
    """Register a function of tensors as the definition of a composite."""

    def add(function: Definition) -> Definition:
        def build(*arguments: Attributes | TensorType) -> Graph:
            attributes = arguments[:1] if op.has_attributes else ()
            operands = [a for a in arguments if isinstance(a, TensorType)]
            with isolated_tracing(op.name) as trace:
                trace.origin = Origin("definition", 0, op.name)
                inputs = [trace.input(str(i), t) for i, t in enumerate(operands)]
                result = function(*attributes, *inputs)
                graph = trace.finish(result if isinstance(result, tuple) else (result,))
            return remove_dead_code(graph)

        c.DEFINITIONS(op)(build)
        return function

    return add


def finite_lowest(dtype: DType) -> float:
    """The most negative finite number: what masked scores become before the maximum."""
    return {"float64": -1.797e308, "float32": -3.4e38, "bfloat16": -3.38e38, "float16": -65504.0}[
        dtype.name
    ]


@definition(c.RELU)
def relu(x: Tensor) -> Tensor:
    return where(x <= 0, 0, x)


@definition(c.SIGMOID)
def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + exp(-x))


@definition(c.SILU)
def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


@definition(c.GELU)
def gelu(attributes: c.Gelu, x: Tensor) -> Tensor:
    if attributes.approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (1 + tanh(inner))
    return x * 0.5 * (1 + erf(x * math.sqrt(0.5)))


@definition(c.SOFTPLUS)
def softplus(attributes: c.Softplus, x: Tensor) -> Tensor:
    scaled = x * attributes.beta
    return where(scaled > attributes.threshold, x, log1p(exp(scaled)) / attributes.beta)


@definition(c.MEAN)
def mean(attributes: c.Axes, x: Tensor) -> Tensor:
    n = count_of(x, attributes.axes)
    total = sum_of(x, attributes.axes)
    return total / constant(n, total.shape, total.dtype)


@definition(c.VAR)
def var(attributes: c.Variance, x: Tensor) -> Tensor:
    n = count_of(x, attributes.axes)
    centre = x - broadcast_to(
        reshape(mean(c.Axes(attributes.axes), x), kept_shape(x, attributes.axes)), x.shape
    )
    total = sum_of(centre * centre, attributes.axes)
    # PyTorch divides by max(0, n − correction) and lets the result be NaN or infinite.
    return total / constant(max(0, n - attributes.correction), total.shape, total.dtype)


@definition(c.LOGSUMEXP)
def logsumexp(attributes: c.Axes, x: Tensor) -> Tensor:
    axes = attributes.axes
    top = stop_gradient(max_of(x, axes, keepdims=True))
    shift = finite(top)
    total = sum_of(exp(x - shift), axes)
    return log(total) + reshape(shift, total.shape)


@definition(c.SOFTMAX)
def softmax(attributes: c.Axis, x: Tensor) -> Tensor:
    axis = attributes.axis
    weights = exp(x - stop_gradient(max_of(x, axis, keepdims=True)))
    return weights / sum_of(weights, axis, keepdims=True)


@definition(c.LOG_SOFTMAX)
def log_softmax(attributes: c.Axis, x: Tensor) -> Tensor:
    axis = attributes.axis
    centred = x - stop_gradient(max_of(x, axis, keepdims=True))
    return centred - log(sum_of(exp(centred), axis, keepdims=True))


def _last_axes(x: Tensor, dims: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - dims, x.ndim))


@definition(c.LAYER_NORM)
def layer_norm(attributes: c.Norm, x: Tensor, *affine: Tensor) -> Tensor:
    axes = _last_axes(x, attributes.dims)
    kept = kept_shape(x, axes)
    centred = x - reshape(mean(c.Axes(axes), x), kept)
    spread = reshape(mean(c.Axes(axes), centred * centred), kept)
    result = centred * rsqrt_of(spread + attributes.eps)
    if affine:
        result = result * affine[0]
    return result + affine[1] if len(affine) > 1 else result


@definition(c.RMS_NORM)
def rms_norm(attributes: c.Norm, x: Tensor, *affine: Tensor) -> Tensor:
    axes = _last_axes(x, attributes.dims)
    power = reshape(mean(c.Axes(axes), x * x), kept_shape(x, axes))
    result = x * rsqrt_of(power + attributes.eps)
    return result * affine[0] if affine else result


@definition(c.BATCH_NORM)
def batch_norm(attributes: c.BatchNorm, x: Tensor, *affine: Tensor) -> Tensor:
    """Wide inside, and as narrow as x."""
    wide = cast(x, accumulator(x.dtype))
    axes = tuple(i for i in range(x.ndim) if i != 1)
    kept = kept_shape(x, axes)
    centred = wide - broadcast_to(reshape(mean(c.Axes(axes), wide), kept), x.shape)
    spread = reshape(mean(c.Axes(axes), centred * centred), kept)
    result = centred * rsqrt_of(spread + attributes.eps)
    scale, shift = (reshape(cast(t, wide.dtype), kept) for t in affine) if affine else (1, 0)
    return cast(result * scale + shift if affine else result, x.dtype)


@definition(c.GROUP_NORM)
def group_norm(attributes: c.GroupNorm, x: Tensor, *affine: Tensor) -> Tensor:
    """Wide inside, and as narrow as x."""
    wide = cast(x, accumulator(x.dtype))
    centred = wide - group_means(wide, attributes.groups)
    result = centred * rsqrt_of(group_means(centred * centred, attributes.groups) + attributes.eps)
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    scale, shift = (reshape(cast(t, wide.dtype), shape) for t in affine) if affine else (1, 0)
    return cast(result * scale + shift if affine else result, x.dtype)


def channel_sums(x: Tensor) -> Tensor:
    """(N, C, …) summed over all but the first two axes."""
    return sum_of(x, tuple(range(2, x.ndim))) if x.ndim > 2 else x


def group_means(x: Tensor, groups: int) -> Tensor:
    """The mean of each group of channels, along x."""
    count = max(1, math.prod(x.shape[1:]) // groups)
    return along_groups(channel_sums(x), groups, x.shape) / count


def along_groups(x: Tensor, groups: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers of channels (N, C), summed by groups, along a tensor (N, C, …).

    Channels come first: where they lie beside each other in memory, threads have one each, and
    the same sums are the gradients of a norm's weights.
    """
    n, channels = x.shape
    rows = reshape(x, (n, groups, channels // groups))
    spread = broadcast_to(sum_of(rows, 2, keepdims=True), rows.shape)
    return reshape(spread, (n, channels, *(1,) * (len(shape) - 2)))


def attention_scores(
    attributes: c.Attention, q: Tensor, k: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scores (B, G, R, T, S) of queries grouped as (B, G, R, T, D), and who may see whom."""
    wide = accumulator(q.dtype)
    scores = contract(q, k, ("bgrtd", "bgsd", "bgrts"), wide) * attributes.scale
    if bias is not None:
        b, heads, t, s = bias.shape
        of_heads = (1, 1) if heads == 1 else scores.shape[1:3]
        spread = broadcast_to(reshape(bias, (b, *of_heads, t, s)), scores.shape)
        scores = scores + cast(spread, wide)
    if not attributes.causal:
        return scores, None
    shape = scores.shape[-2:]
    seen = iota(shape, 1) <= iota(shape, 0)
    return scores, broadcast_to(seen, scores.shape)


def grouped(q: Tensor, groups: int) -> Tensor:
    """(B, H, T, D) as (B, G, H / G, T, D): neighbouring heads share keys."""
    b, h, t, d = q.shape
    return reshape(q, (b, groups, h // groups, t, d))


def masked(values: Tensor, seen: Tensor | None, other: float = 0) -> Tensor:
    return values if seen is None else where(seen, values, other)


def finite(x: Tensor) -> Tensor:
    """Zero in place of infinities: what a row of −∞ is shifted by."""
    return where(eq(x, -math.inf), 0, where(eq(x, math.inf), 0, x))


@definition(c.ATTENTION)
def attention(
    attributes: c.Attention, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The result and the logsumexp of each row's scores."""
    scores, seen = attention_scores(
        attributes, grouped(q, k.shape[1]), k, bias[0] if bias else None
    )
    lowest = finite_lowest(scores.dtype)
    top = finite(stop_gradient(max_of(masked(scores, seen, lowest), -1, keepdims=True)))
    weights = masked(exp(scores - top), seen)
    total = sum_of(weights, -1, keepdims=True)
    # By the logarithm of the sum, so that a row that sees nothing gives zeros, as PyTorch's does.
    lse = log(total) + top
    probabilities = cast(masked(exp(scores - finite(lse)), seen), v.dtype)
    mixed = contract(probabilities, v, ("bgrts", "bgsd", "bgrtd"), accumulator(v.dtype))
    result = cast(reshape(mixed, (*q.shape[:3], v.shape[3])), q.dtype)
    return result, reshape(lse, q.shape[:3])


@definition(c.ATTENTION_GRAD)
def attention_grad(
    attributes: c.Attention,
    ct: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *bias: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the bias from the result and its logsumexp; scores are redone.

    That of a bias is summed along the axes of which it has one element for all scores.
    """
    groups = k.shape[1]
    wide = accumulator(q.dtype)
    queries, upstream = grouped(q, groups), grouped(ct, groups)
    scores, seen = attention_scores(attributes, queries, k, bias[0] if bias else None)
    kept = (*scores.shape[:-1], 1)
    probabilities = masked(exp(scores - finite(reshape(lse, kept))), seen)
    d_v = contract(cast(probabilities, v.dtype), upstream, ("bgrts", "bgrtd", "bgsd"), wide)
    d_probabilities = contract(upstream, v, ("bgrtd", "bgsd", "bgrts"), wide)
    # Σ over s of p · dp is the row's ct · out.
    row = sum_of(cast(ct, wide) * cast(out, wide), -1)
    d_scores = probabilities * (d_probabilities - reshape(row, kept))
    d_narrow = cast(d_scores * attributes.scale, q.dtype)
    d_q = contract(d_narrow, k, ("bgrts", "bgsd", "bgrtd"), wide)
    d_k = contract(d_narrow, queries, ("bgrts", "bgrtd", "bgsd"), wide)
    results = [cast(reshape(d_q, q.shape), q.dtype), cast(d_k, k.dtype), cast(d_v, v.dtype)]
    of_heads = reshape(d_scores, (*q.shape[:3], k.shape[2]))
    return (*results, *(cast(_summed_to(of_heads, b.shape), b.dtype) for b in bias))


def _summed_to(x: Tensor, shape: Shape) -> Tensor:
    """The gradient of what was broadcast from a shape of as many axes."""
    axes = tuple(i for i, n in enumerate(shape) if n != x.shape[i])
    return sum_of(x, axes, keepdims=True) if axes else x


@definition(c.CROSS_ENTROPY)
def cross_entropy(attributes: c.CrossEntropy, logits: Tensor, targets: Tensor) -> Tensor:
    last = logits.ndim - 1
    total = logsumexp(c.Axes((last,)), logits)
    chosen = reshape(take_along_axis(logits, unsqueeze(targets, -1), -1), targets.shape)
    smoothing = Fraction(attributes.label_smoothing)
    if smoothing == 0:
        return total - chosen
    average = mean(c.Axes((last,)), logits)
    return total - chosen * (1 - smoothing) - average * smoothing


@definition(c.LINEAR_CROSS_ENTROPY)
def linear_cross_entropy(
    attributes: c.HeadCrossEntropy, x: Tensor, weight: Tensor, targets: Tensor, *bias: Tensor
) -> Tensor:
    """Cross-entropy of each row of x (N, D) through a weight (V, D)."""
    of_rows = c.CrossEntropy(attributes.label_smoothing)
    return cross_entropy(of_rows, _logits(attributes, x, weight, bias), targets)


def _held_inside(targets: Tensor, classes: int) -> Tensor:
    """Classes as gather reads them, so that the gradient is that of the loss for any targets."""
    wide = cast(targets, promote(targets.dtype, int32))
    return minimum(maximum(wide, 0), classes - 1)


def _logits(
    attributes: c.HeadCrossEntropy, x: Tensor, weight: Tensor, bias: tuple[Tensor, ...]
) -> Tensor:
    wide = accumulator(x.dtype)
    held = x.dtype if attributes.rounded else wide
    logits = cast(contract(x, weight, ("nd", "vd", "nv"), held), wide)
    return logits + cast(bias[0], wide) if bias else logits


@definition(c.LINEAR_CROSS_ENTROPY_GRAD)
def linear_cross_entropy_grad(
    attributes: c.HeadCrossEntropy,
    ct: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *bias: Tensor,
) -> tuple[Tensor, ...]:
    """The rows again, and the gradients of x, weight and bias for the cotangents of the rows."""
    logits = _logits(attributes, x, weight, bias)
    wide, classes = logits.dtype, weight.shape[0]
    held = _held_inside(targets, classes)
    rows = cross_entropy(c.CrossEntropy(attributes.label_smoothing), logits, targets)
    smoothing = Fraction(attributes.label_smoothing)
    target = one_hot(c.OneHot(classes, wide), held)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / classes
    slope = unsqueeze(ct, -1) * (softmax(c.Axis(1), logits) - target)
    narrow = cast(slope, x.dtype)
    d_x = contract(narrow, weight, ("nv", "vd", "nd"), wide)
    d_weight = contract(narrow, x, ("nv", "nd", "vd"), wide)
    results = [rows, cast(d_x, x.dtype), cast(d_weight, weight.dtype)]
    # Of the rounded gradients too, as a linear layer's bias has it.
    return (*results, *(cast(sum_of(cast(narrow, wide), 0), b.dtype) for b in bias))


@definition(c.MAX_POOL)
def max_pool(attributes: c.Pool, x: Tensor) -> Tensor:
    windows = pool_windows(attributes, x, least(x.dtype))
    first = argmax_of(windows, -1, keepdims=True)
    return reshape(take_along_axis(windows, first, -1), windows.shape[:-1])


@definition(c.AVG_POOL)
def avg_pool(attributes: c.Pool, x: Tensor) -> Tensor:
    windows = pool_windows(attributes, x, 0)
    total = sum_of(windows, -1)
    if attributes.count_padding or not any(attributes.padding):
        return total / math.prod(attributes.sizes)
    inside = pool_windows(attributes, constant(1, x.shape, x.dtype), 0)
    return total / sum_of(inside, -1)


@definition(c.ONE_HOT)
def one_hot(attributes: c.OneHot, indices: Tensor) -> Tensor:
    shape = (*indices.shape, attributes.classes)
    # At least int32: 8 bits may hold the indices, but not the number of classes.
    wide = cast(indices, promote(indices.dtype, int32))
    classes = iota(shape, -1, wide.dtype)
    return cast(classes == unsqueeze(wide, -1), attributes.dtype)


@definition(c.EMBEDDING)
def embedding(table: Tensor, indices: Tensor) -> Tensor:
    return bind1(GATHER, Gather(0), table, indices)
