"""Rows of normalisations; what they return beside the result is computed only where it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.frontend.functions import activations
from treadle.frontend.functions.arithmetic import rsqrt, stop_gradient
from treadle.frontend.functions.reductions import mean, var
from treadle.frontend.functions.shaping import reshape
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.table import aten
from treadle.ir import composites as c

Given = Tensor | None


def _affine(x: Tensor, weight: Given, bias: Given) -> Tensor:
    """Each channel (axis 1) scaled and shifted."""
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    if weight is not None:
        x = x * reshape(weight, shape)
    return x if bias is None else x + reshape(bias, shape)


@aten("layer_norm")
def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Given = None,
    bias: Given = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    dims = len(normalized_shape)
    if weight is None and bias is not None:
        return activations.layer_norm(x, None, None, dims, eps) + bias
    return activations.layer_norm(x, weight, bias, dims, eps)


@aten("native_layer_norm")
def _native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Given, bias: Given, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    result = _layer_norm(x, normalized_shape, weight, bias, eps)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    return result, mean(x, axes, True), rsqrt(var(x, axes, 0, True) + eps)


@aten("rms_norm")
def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Given = None, eps: float | None = None
) -> Tensor:
    small = 2.0**-x.dtype.fraction_bits if eps is None else eps
    return activations.rms_norm(x, weight, len(normalized_shape), small)


@aten("_fused_rms_norm")
def _fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Given = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    small = 2.0**-x.dtype.fraction_bits if eps is None else eps
    return _rms_norm(x, normalized_shape, weight, eps), rsqrt(mean(x * x, axes, True) + small)


@aten("group_norm")
def _group_norm(
    x: Tensor,
    groups: int,
    weight: Given = None,
    bias: Given = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    if not x.size:
        return x
    attributes = c.GroupNorm(groups, float(eps))
    if weight is None or bias is None:
        return _affine(bind1(c.GROUP_NORM, attributes, x), weight, bias)
    return bind1(c.GROUP_NORM, attributes, x, weight, bias)


@aten("native_group_norm")
def _native_group_norm(
    x: Tensor, weight: Given, bias: Given, n: int, channels: int, area: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = reshape(x, (n, group, channels // group * area))
    spread = rsqrt(var(grouped, -1, 0) + eps)
    return _group_norm(x, group, weight, bias, eps), mean(grouped, -1), spread


# Batch norm: (result, the batch's mean, 1 / its deviation, and the running statistics after it)


def _by_batch(x: Tensor, weight: Given, bias: Given, eps: float) -> Tensor:
    if weight is None or bias is None:
        return _affine(bind1(c.BATCH_NORM, c.BatchNorm(float(eps)), x), weight, bias)
    return bind1(c.BATCH_NORM, c.BatchNorm(float(eps)), x, weight, bias)


def _by_running(
    x: Tensor, weight: Given, bias: Given, centre: Tensor, spread: Tensor, eps: float
) -> Tensor:
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    normal = (x - reshape(centre, shape)) * rsqrt(reshape(spread, shape) + eps)
    return _affine(normal, weight, bias)


def _other_axes(x: Tensor) -> tuple[int, ...]:
    return tuple(a for a in range(x.ndim) if a != 1)


@aten("_batch_norm_with_update_functional")
def _batch_norm_with_update(
    x: Tensor,
    weight: Given,
    bias: Given,
    centre: Tensor,
    spread: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Given, ...]:
    found = _batch_norm_functional(x, weight, bias, centre, spread, True, momentum, eps)
    return (*found[:3], None, *found[3:])


@aten("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: Tensor,
    weight: Given,
    bias: Given,
    centre: Tensor,
    spread: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Given, ...]:
    if not training:
        result = _by_running(x, weight, bias, centre, spread, eps)
        return result, None, None, centre, spread
    axes = _other_axes(x)
    now, count = mean(x, axes), math.prod(x.shape[a] for a in axes)
    biased = var(x, axes, 0)
    unbiased = biased * (count / max(1, count - 1))
    after = (
        old * (1 - momentum) + stop_gradient(new) * momentum
        for old, new in ((centre, now), (spread, unbiased))
    )
    return (_by_batch(x, weight, bias, eps), now, rsqrt(biased + eps), *after)


@aten("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: Tensor, weight: Given, bias: Given, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    axes = _other_axes(x)
    spread = rsqrt(var(x, axes, 0) + eps)
    return _by_batch(x, weight, bias, eps), mean(x, axes), spread


@aten("_native_batch_norm_legit_no_training")
def _batch_norm_no_training(
    x: Tensor,
    weight: Given,
    bias: Given,
    centre: Tensor,
    spread: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Given, ...]:
    return _by_running(x, weight, bias, centre, spread, eps), None, None


@aten("batch_norm")
def _batch_norm(
    x: Tensor,
    weight: Given,
    bias: Given,
    centre: Given,
    spread: Given,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    if training or centre is None or spread is None:
        return _by_batch(x, weight, bias, eps)
    return _by_running(x, weight, bias, centre, spread, eps)


@aten("instance_norm")
def _instance_norm(
    x: Tensor,
    weight: Given,
    bias: Given,
    centre: Given,
    spread: Given,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    if use_input_stats or centre is None or spread is None:
        return _group_norm(x, x.shape[1], weight, bias, eps)
    return _by_running(x, weight, bias, centre, spread, eps)
