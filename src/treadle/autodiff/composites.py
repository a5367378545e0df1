"""The vjp of composites that have a better one than their definition's.

The others (pooling) are differentiated through their definition, computed again from the operands:
what that needs is views and elementwise work.
"""

from __future__ import annotations

import math
from fractions import Fraction

from treadle.autodiff.backward import (
    VJP,
    Cotangent,
    definition_vjp,
    no_gradient,
    waits_for,
)
from treadle.autodiff.structure import unreduced
from treadle.base.dtypes import accumulator
from treadle.frontend.coerce import cast
from treadle.frontend.definitions import along_groups, channel_sums, finite, group_means
from treadle.frontend.functions.activations import sigmoid, softmax
from treadle.frontend.functions.arithmetic import erf, exp, rsqrt, stop_gradient, tanh, where
from treadle.frontend.functions.indexing import one_hot
from treadle.frontend.functions.reductions import count_of, mean
from treadle.frontend.functions.reductions import max as max_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import reshape, unsqueeze
from treadle.frontend.scopes import Trace, bind, bind1
from treadle.frontend.tensor import Tensor
from treadle.ir import composites as c
from treadle.ir.ops.indexing import SCATTER_ADD, ScatterAdd

vjp = VJP
Cts = tuple[Cotangent, ...]

vjp(c.ONE_HOT)(no_gradient)


@vjp(c.RELU)
def relu_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (where(x <= 0, 0, ct),)


@vjp(c.SIGMOID)
def sigmoid_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · s (1 − s)"""
    return (ct * (out * (1 - out)),)


@vjp(c.SILU)
def silu_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · s (1 + x (1 − s))"""
    s = sigmoid(x)
    return (ct * (s * (1 + x * (1 - s))),)


@vjp(c.GELU)
def gelu_vjp(attributes: c.Gelu, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · (Φ(x) + x φ(x)), one factor; numbers stay apart, so that it is exact in a field."""
    if attributes.approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        value = tanh((x + x * x * x * 0.044715) * scale)
        slope = (1 - value * value) * ((1 + x * x * 0.044715 * 3) * scale)
    else:
        u = x * math.sqrt(0.5)
        value = erf(u)
        slope = exp(-(u * u)) * (2 / math.sqrt(math.pi)) * math.sqrt(0.5)
    return (ct * ((1 + value) * 0.5 + x * 0.5 * slope),)


@vjp(c.SOFTPLUS)
def softplus_vjp(attributes: c.Softplus, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · sigmoid(βx), ct beyond the threshold"""
    scaled = x * attributes.beta
    return (where(scaled > attributes.threshold, ct, ct * sigmoid(scaled)),)


@vjp(c.MEAN)
def mean_vjp(attributes: c.Axes, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (unreduced(ct / count_of(x, attributes.axes), x.shape, attributes.axes),)


@vjp(c.VAR)
def var_vjp(attributes: c.Variance, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = 2 ct (x − mean) / (n − correction)

    The mean is rounded at the size of x, which may be far from its spread. What that leaves is
    taken off too, so that the gradients add up to nothing, as they must.
    """
    axes = attributes.axes
    centred = x - mean(x, axes, keepdims=True)
    centred = centred - mean(centred, axes, keepdims=True)
    scale = ct * 2 / max(0, count_of(x, axes) - attributes.correction)
    return (centred * unreduced(scale, x.shape, axes),)


@vjp(c.SOFTMAX)
def softmax_vjp(attributes: c.Axis, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = p (ct − Σ ct p)"""
    return (out * (ct - sum_of(ct * out, attributes.axis, keepdims=True)),)


@vjp(c.LOG_SOFTMAX)
def log_softmax_vjp(attributes: c.Axis, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct − p Σ ct"""
    return (ct - softmax(x, attributes.axis) * sum_of(ct, attributes.axis, keepdims=True),)


@vjp(c.LOGSUMEXP)
def logsumexp_vjp(attributes: c.Axes, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · e^(x − out)"""
    axes = attributes.axes
    shift = unreduced(where(out == -math.inf, 0, out), x.shape, axes)
    return (unreduced(ct, x.shape, axes) * exp(x - shift),)


@vjp(c.LAYER_NORM)
def layer_norm_vjp(attributes: c.Norm, ct: Tensor, out: Tensor, x: Tensor, *affine: Tensor) -> Cts:
    """dx = r (g − mean g − x̂ mean(g x̂)) with g = ct · weight; statistics are computed again."""
    axes = tuple(range(x.ndim - attributes.dims, x.ndim))
    batch = tuple(range(x.ndim - attributes.dims))
    centred = x - mean(x, axes, keepdims=True)
    root = rsqrt(mean(centred * centred, axes, keepdims=True) + attributes.eps)
    normal = centred * root
    g = ct * affine[0] if affine else ct
    along = mean(g * normal, axes, keepdims=True)
    dx = root * (g - mean(g, axes, keepdims=True) - normal * along)
    return (dx, sum_of(ct * normal, batch), sum_of(ct, batch))[: 1 + len(affine)]


@vjp(c.RMS_NORM)
def rms_norm_vjp(attributes: c.Norm, ct: Tensor, out: Tensor, x: Tensor, *affine: Tensor) -> Cts:
    """dx = r (g − x̂ mean(g x̂)) with g = ct · weight; statistics are computed again."""
    axes = tuple(range(x.ndim - attributes.dims, x.ndim))
    batch = tuple(range(x.ndim - attributes.dims))
    root = rsqrt(mean(x * x, axes, keepdims=True) + attributes.eps)
    normal = x * root
    g = ct * affine[0] if affine else ct
    dx = root * (g - normal * mean(g * normal, axes, keepdims=True))
    return (dx, sum_of(ct * normal, batch))[: 1 + len(affine)]


@vjp(c.BATCH_NORM)
def batch_norm_vjp(
    attributes: c.BatchNorm, ct: Tensor, out: Tensor, x: Tensor, *affine: Tensor
) -> Cts:
    """dx = r w (ct − mean ct − x̂ mean(ct x̂)): the sums are the gradients of bias and weight."""
    axes = tuple(i for i in range(x.ndim) if i != 1)
    wide, g = (cast(t, accumulator(x.dtype)) for t in (x, ct))
    centred = wide - mean(wide, axes, keepdims=True)
    root = rsqrt(mean(centred * centred, axes, keepdims=True) + attributes.eps)
    normal = centred * root
    along, total = sum_of(g * normal, axes, keepdims=True), sum_of(g, axes, keepdims=True)
    count = count_of(x, axes)
    dx = root * (g - total / count - normal * (along / count))
    if not affine:
        return (cast(dx, x.dtype),)
    weight, bias = affine
    dx = dx * reshape(cast(weight, wide.dtype), root.shape)
    sums = (cast(reshape(s, t.shape), t.dtype) for s, t in ((along, weight), (total, bias)))
    return (cast(dx, x.dtype), *sums)


@vjp(c.GROUP_NORM)
def group_norm_vjp(
    attributes: c.GroupNorm, ct: Tensor, out: Tensor, x: Tensor, *affine: Tensor
) -> Cts:
    """dx = r (g − mean g − x̂ mean(g x̂)) with g = ct · weight; channels' sums of ct and ct x̂ are
    the gradients of bias and weight as well."""
    groups, shape = attributes.groups, x.shape
    wide, g = (cast(t, accumulator(x.dtype)) for t in (x, ct))
    centred = wide - group_means(wide, groups)
    root = rsqrt(group_means(centred * centred, groups) + attributes.eps)
    normal = centred * root
    along, total = channel_sums(g * normal), channel_sums(g)
    weight = cast(affine[0], wide.dtype) if affine else None
    of_groups = (t if weight is None else t * weight for t in (along, total))
    count = max(1, math.prod(shape[1:]) // groups)
    along_mean, mean_of = (along_groups(t, groups, shape) / count for t in of_groups)
    scaled = g if weight is None else g * reshape(weight, (shape[1], *(1,) * (len(shape) - 2)))
    dx = cast(root * (scaled - mean_of - normal * along_mean), x.dtype)
    sums = (cast(sum_of(s, 0), t.dtype) for s, t in zip((along, total), affine, strict=False))
    return (dx, *sums)


@vjp(c.ATTENTION)
def attention_vjp(
    attributes: c.Attention, cts: Cts, outs: tuple[Tensor, Tensor], *operands: Tensor
) -> tuple[Cotangent, ...]:
    """One composite from the result and its logsumexp: T×T is never kept.

    The weight of a single key is 1: by the definition gradients of its scores are exactly 0, where
    the composite has the difference of two sums.
    """
    ct, ct_lse = cts
    if ct is None or ct_lse is not None or operands[1].shape[-2] == 1:
        return tuple(definition_vjp(c.ATTENTION, attributes, cts, operands))
    return bind(c.ATTENTION_GRAD, attributes, ct, *outs, *operands)


@vjp(c.CONV)
def conv_vjp(attributes: c.Conv, ct: Tensor, out: Tensor, x: Tensor, w: Tensor) -> Cts:
    """Two composites, which a backend may have as they are."""
    d_x = bind1(c.CONV_GRAD_X, c.ConvGrad(attributes, x.shape), ct, w)
    return d_x, bind1(c.CONV_GRAD_W, c.ConvGrad(attributes, w.shape), ct, x)


@vjp(c.CONV_GRAD_X)
def conv_grad_x_vjp(
    attributes: c.ConvGrad, ct: Tensor, out: Tensor, given: Tensor, w: Tensor
) -> Cts:
    """The transposed convolution is linear in both: its gradients are the convolution's own."""
    d_w = bind1(c.CONV_GRAD_W, c.ConvGrad(attributes.conv, w.shape), given, ct)
    return bind1(c.CONV, attributes.conv, ct, w), d_w


@vjp(c.CONV_GRAD_W)
def conv_grad_w_vjp(
    attributes: c.ConvGrad, ct: Tensor, out: Tensor, given: Tensor, x: Tensor
) -> Cts:
    d_x = bind1(c.CONV_GRAD_X, c.ConvGrad(attributes.conv, x.shape), given, ct)
    return bind1(c.CONV, attributes.conv, x, ct), d_x


@vjp(c.CROSS_ENTROPY)
def cross_entropy_vjp(
    attributes: c.CrossEntropy, ct: Tensor, out: Tensor, logits: Tensor, targets: Tensor
) -> Cts:
    """dx = ct (softmax − target), the target smoothed"""
    smoothing, classes = Fraction(attributes.label_smoothing), logits.shape[-1]
    target = one_hot(targets, classes, logits.dtype)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / classes
    # The softmax, shifted as the forward's logsumexp is: rows are summed once for both.
    weights = exp(logits - finite(stop_gradient(max_of(logits, -1, keepdims=True))))
    shares = weights / sum_of(weights, -1, keepdims=True)
    return unsqueeze(ct, -1) * (shares - target), None


@vjp(c.LINEAR_CROSS_ENTROPY)
def linear_cross_entropy_vjp(
    attributes: c.HeadCrossEntropy, ct: Tensor, out: Tensor, *operands: Tensor
) -> Cts:
    """One composite gives the rows and their gradients: logits are computed once.

    It takes the place of the forward one where the cotangent does not wait for the rows.
    """
    rows, d_x, d_weight, *d_bias = bind(c.LINEAR_CROSS_ENTROPY_GRAD, attributes, ct, *operands)
    scope = out.scope
    assert isinstance(scope, Trace)
    if not waits_for(scope, ct, out):
        scope.replacements[out.handle] = rows.handle
    return d_x, d_weight, None, *d_bias


@vjp(c.EMBEDDING)
def embedding_vjp(ct: Tensor, out: Tensor, table: Tensor, indices: Tensor) -> Cts:
    return bind1(SCATTER_ADD, ScatterAdd(0, table.shape[0]), ct, indices), None
