"""Normalisation over groups of channels, single images and neighbouring channels."""

from __future__ import annotations

from functools import partial

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import FRACTION, NOT_NEGATIVE, check_number, check_whole
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import pooling, shaping
from treadle.frontend.functions.arithmetic import pow, rsqrt
from treadle.frontend.functions.reductions import mean, var
from treadle.frontend.functions.shaping import reshape, squeeze, unsqueeze
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir import composites as c
from treadle.nn import init
from treadle.nn.layers import scale_and_shift, towards
from treadle.nn.module import Module, Parameter, State, update_on


class GroupNorm(Module):
    """Mean 0 and variance 1 over groups of channels and all spatial axes: (N, C, …) → the same."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        bias: bool = True,
    ):
        self.num_groups = check_whole("GroupNorm", "num_groups", num_groups)
        self.num_channels = check_whole("GroupNorm", "num_channels", num_channels)
        if num_channels % num_groups:
            raise ArgumentError(
                "GroupNorm",
                f"{num_groups} groups of {num_channels} channels",
                "The number of groups divides the channels.",
            )
        self.eps = check_number("GroupNorm", "eps", eps, NOT_NEGATIVE)
        self.weight = Parameter((num_channels,), init.ones) if affine else None
        self.bias = Parameter((num_channels,), init.zeros) if affine and bias else None

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if value.ndim < 2 or value.shape[1] != self.num_channels:
            raise ShapeError(
                "GroupNorm", f"x is {value.type}", f"It is (N, {self.num_channels}, …)."
            )
        return grouped_norm(value, self.num_groups, self.eps, self.weight, self.bias)


def grouped_norm(
    x: Tensor, groups: int, eps: float, weight: Parameter | None, bias: Parameter | None
) -> Tensor:
    """Each group of channels of each image normalised by itself, then scaled and shifted."""
    affine = scale_and_shift(weight, bias)
    return bind1(c.GROUP_NORM, c.GroupNorm(groups, float(eps)), x, *affine) if x.size else x


def scaled(x: Tensor, weight: Parameter | None, bias: Parameter | None) -> Tensor:
    """Each channel (axis 1) scaled and shifted."""
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    if weight is not None:
        x = x * reshape(weight, shape)
    return x if bias is None else x + reshape(bias, shape)


class _InstanceNorm(Module):
    """Each channel of each image normalised by itself; running statistics if they are tracked."""

    dims = 0

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        *,
        bias: bool = True,
    ):
        name = type(self).__name__
        self.num_features = check_whole(name, "num_features", num_features)
        self.eps = check_number(name, "eps", eps, NOT_NEGATIVE)
        self.momentum = check_number(name, "momentum", momentum, FRACTION)
        self.weight = Parameter((num_features,), init.ones) if affine else None
        self.bias = Parameter((num_features,), init.zeros) if affine and bias else None
        self.running_mean = State((num_features,), init.zeros) if track_running_stats else None
        self.running_var = State((num_features,), init.ones) if track_running_stats else None
        self.num_batches_tracked = (
            State((), init.zeros, dtypes.int64) if track_running_stats else None
        )

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if value.ndim == self.dims + 1:  # one image, without an axis of images
            return squeeze(self.forward(unsqueeze(value, 0)), 0)
        if value.ndim != self.dims + 2 or value.shape[1] != self.num_features:
            raise ShapeError(
                type(self).__name__,
                f"x is {value.type}",
                f"It has {self.dims + 2} axes: (N, {self.num_features}, spatial …).",
            )
        if self.running_mean is not None and self.running_var is not None and not self.training:
            shape = (self.num_features, *(1,) * self.dims)
            centre, spread = reshape(self.running_mean, shape), reshape(self.running_var, shape)
            return scaled((value - centre) * rsqrt(spread + self.eps), self.weight, self.bias)
        self._track(value)
        return grouped_norm(value, self.num_features, self.eps, self.weight, self.bias)

    def _track(self, x: Tensor) -> None:
        """Running statistics: the images' own, averaged over the batch."""
        if self.running_mean is None or self.running_var is None:
            return
        axes, rate = tuple(range(2, x.ndim)), self.momentum
        for state, each in ((self.running_mean, mean(x, axes)), (self.running_var, var(x, axes))):
            update_on(state, partial(towards, new=mean(each, 0), rate=rate))


class InstanceNorm1d(_InstanceNorm):
    """Channels of each sample with mean 0 and variance 1: (N, C, L) → the same."""

    dims = 1


class InstanceNorm2d(_InstanceNorm):
    """Channels of each sample with mean 0 and variance 1: (N, C, H, W) → the same."""

    dims = 2


class InstanceNorm3d(_InstanceNorm):
    """Channels of each sample with mean 0 and variance 1: (N, C, D, H, W) → the same."""

    dims = 3


class LocalResponseNorm(Module):
    """Divided by a power of the mean square of neighbouring channels: (N, C, …) → the same."""

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0):
        self.size = check_whole("LocalResponseNorm", "size", size)
        self.alpha, self.beta, self.k = alpha, beta, k

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if value.ndim < 3:
            raise ShapeError("LocalResponseNorm", f"x is {value.type}", "It is (N, C, spatial …).")
        n, channels = value.shape[:2]
        squares = reshape(value * value, (n, 1, channels, -1))
        before, after = self.size // 2, (self.size - 1) // 2
        padded = shaping.pad(squares, ((0, 0), (0, 0), (before, after), (0, 0)))
        around = reshape(pooling.avg_pool(padded, (self.size, 1), 1), value.shape)
        return value * pow(around * self.alpha + self.k, -self.beta)
