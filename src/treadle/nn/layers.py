"""Layers with parameters: PyTorch's names, shapes, defaults and initial distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import (
    FRACTION,
    NOT_NEGATIVE,
    check_choice,
    check_number,
    check_sizes,
    check_whole,
)
from treadle.base.shapes import Shape, size_of
from treadle.frontend.binding import summed_shards
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import activations, indexing, linear
from treadle.frontend.functions.arithmetic import maximum, ne, rsqrt, stop_gradient, where
from treadle.frontend.functions.padding import MODES, pad
from treadle.frontend.functions.reductions import max as max_over
from treadle.frontend.functions.reductions import mean, shard_sum, var
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import reshape, unsqueeze, zeros_like
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir import composites as c
from treadle.nn import init
from treadle.nn.module import Module, Parameter, State, latest, update_on


def fan_in_uniform(fan_in: int) -> init.Init:
    """Uniform within ±1/√fan_in: PyTorch's default for weights and biases."""
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    return init.uniform(-bound, bound)


class Linear(Module):
    """x Wᵀ + b: (…, in_features) → (…, out_features); weight (out_features, in_features)."""

    fan_in_fan_out = False  # whether the weight is (in_features, out_features)

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        self.in_features = check_whole("Linear", "in_features", in_features)
        self.out_features = check_whole("Linear", "out_features", out_features)
        self.weight = Parameter((out_features, in_features), fan_in_uniform(in_features))
        self.bias = Parameter((out_features,), fan_in_uniform(in_features)) if bias else None

    def forward(self, x: Operand) -> Tensor:
        return linear.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of a table: integers (…) → (…, embedding_dim).

    The row `padding_idx` starts at zero and gets no gradient.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None):
        check_whole("Embedding", "num_embeddings", num_embeddings)
        check_whole("Embedding", "embedding_dim", embedding_dim)
        if padding_idx is not None:
            check_whole("Embedding", "padding_idx", padding_idx, -num_embeddings)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(
                "Embedding",
                f"padding_idx {padding_idx} of {num_embeddings} rows",
                f"It lies between {-num_embeddings} and {num_embeddings - 1}.",
            )
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = Parameter((num_embeddings, embedding_dim), self._first_table)

    def _first_table(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        table = init.normal()(shape, rng)
        if self.padding_idx is not None:
            table[self.padding_idx] = 0
        return table

    def forward(self, indices: Operand) -> Tensor:
        return indexing.embedding(indices, self.weight, self.padding_idx)


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axes, then scaled and shifted; the shape stays.

    Shapes: (…, normalized_shape) → the same.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ):
        self.normalized_shape = check_sizes("LayerNorm", "normalized_shape", normalized_shape)
        self.eps = check_number("LayerNorm", "eps", eps, NOT_NEGATIVE)
        self.weight = Parameter(self.normalized_shape, init.ones) if elementwise_affine else None
        has_bias = elementwise_affine and bias
        self.bias = Parameter(self.normalized_shape, init.zeros) if has_bias else None

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        _check_last("LayerNorm", value, self.normalized_shape)
        dims = len(self.normalized_shape)
        return activations.layer_norm(value, self.weight, self.bias, dims, self.eps)


class RMSNorm(Module):
    """Divided by the root mean square over the last axes, then scaled.

    Shapes: (…, normalized_shape) → the same.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
    ):
        self.normalized_shape = check_sizes("RMSNorm", "normalized_shape", normalized_shape)
        self.eps = None if eps is None else check_number("RMSNorm", "eps", eps, NOT_NEGATIVE)
        self.weight = Parameter(self.normalized_shape, init.ones) if elementwise_affine else None

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        _check_last("RMSNorm", value, self.normalized_shape)
        # PyTorch's default is the distance from 1 to the next number of x's dtype.
        eps = 2 * value.dtype.unit_roundoff if self.eps is None else self.eps
        return activations.rms_norm(value, self.weight, len(self.normalized_shape), eps)


def _check_last(name: str, x: Tensor, shape: Shape) -> None:
    if x.shape[x.ndim - len(shape) :] != shape:
        raise ShapeError(
            name, f"x is {x.type}, the normalised shape {shape}", "They must end alike."
        )


class _Conv(Module):
    """Convolution over `dims` spatial axes; weight (out, in / groups, kernel …)."""

    dims = 0

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
    ):
        name = type(self).__name__
        check_whole(name, "in_channels", in_channels)
        check_whole(name, "out_channels", out_channels)
        check_whole(name, "groups", groups)
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(
                name,
                f"{groups} groups of {in_channels} and {out_channels} channels",
                "groups divides both.",
            )
        kernel = check_sizes(name, "kernel_size", kernel_size, self.dims)
        self.stride = check_sizes(name, "stride", stride, self.dims)
        self.dilation = check_sizes(name, "dilation", dilation, self.dims)
        self.padding = _checked_padding(name, padding, self.dims)
        check_choice(name, "padding_mode", padding_mode, ("zeros", *MODES[1:]))
        self.padding_mode, self.groups = padding_mode, groups
        fan_in = in_channels // groups * size_of(kernel)
        shape = (out_channels, in_channels // groups, *kernel)
        self.weight = Parameter(shape, fan_in_uniform(fan_in))
        self.bias = Parameter((out_channels,), fan_in_uniform(fan_in)) if bias else None

    def forward(self, x: Operand) -> Tensor:
        image, padding = as_tensor(x), self.padding
        if self.padding_mode != "zeros" and image.ndim > self.dims:
            around = [(0, 0)] * (image.ndim - self.dims)
            image = pad(image, [*around, *self._amounts()], mode=self.padding_mode)
            padding = (0,) * self.dims
        return linear.conv(
            image, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )

    def _amounts(self) -> list[tuple[int, int]]:
        """Before and after each spatial axis; "same" has the odd one after."""
        if self.padding == "valid":
            return [(0, 0)] * self.dims
        if isinstance(self.padding, str):
            kernel = self.weight.shape[2:]
            wide = [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]
            return [(n // 2, n - n // 2) for n in wide]
        return [(n, n) for n in self.padding]


def _checked_padding(name: str, padding: object, dims: int) -> Shape | str:
    if isinstance(padding, str):
        check_choice(name, "padding", padding, ("same", "valid"))
        return padding
    return check_sizes(name, "padding", padding, dims, least=0)


class Conv1d(_Conv):
    """Convolution: (N, in_channels, L) → (N, out_channels, L′)."""

    dims = 1


class Conv2d(_Conv):
    """Convolution: (N, in_channels, H, W) → (N, out_channels, H′, W′)."""

    dims = 2


class Conv3d(_Conv):
    """Convolution: (N, in_channels, D, H, W) → (N, out_channels, D′, H′, W′)."""

    dims = 3


def scale_and_shift(weight: Parameter | None, bias: Parameter | None) -> list[Tensor]:
    """Both as tensors, zeros for a bias that is missing; none where there is no scale."""
    if weight is None:
        return []
    scale = as_tensor(weight)
    return [scale, zeros_like(scale) if bias is None else as_tensor(bias)]


class _BatchNorm(Module):
    """Normalised per channel: by the batch in training, by running statistics otherwise."""

    ranks: tuple[int, ...] = ()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        bias: bool = True,
    ):
        name = type(self).__name__
        self.num_features = check_whole(name, "num_features", num_features)
        self.eps = check_number(name, "eps", eps, NOT_NEGATIVE)
        self.momentum = (
            None if momentum is None else check_number(name, "momentum", momentum, FRACTION)
        )
        self.weight = Parameter((num_features,), init.ones) if affine else None
        self.bias = Parameter((num_features,), init.zeros) if affine and bias else None
        self.running_mean = State((num_features,), init.zeros) if track_running_stats else None
        self.running_var = State((num_features,), init.ones) if track_running_stats else None
        self.num_batches_tracked = (
            State((), init.zeros, dtypes.int64) if track_running_stats else None
        )

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if value.ndim not in self.ranks or value.shape[1] != self.num_features:
            raise ShapeError(
                type(self).__name__,
                f"x is {value.type}, with {self.num_features} features",
                f"It has {' or '.join(map(str, self.ranks))} axes, the second of them features.",
            )
        if self.training and summed_shards() > 1:
            return self._over_shards(value)
        if self.training or self.running_mean is None or self.running_var is None:
            self._track(value)
            affine = scale_and_shift(self.weight, self.bias)
            return bind1(c.BATCH_NORM, c.BatchNorm(float(self.eps)), value, *affine)
        centre, spread = as_tensor(self.running_mean), as_tensor(self.running_var)
        shape = (1, self.num_features, *(1,) * (value.ndim - 2))
        normal = (value - reshape(centre, shape)) * rsqrt(reshape(spread, shape) + self.eps)
        affine = scale_and_shift(self.weight, self.bias)
        return normal * reshape(affine[0], shape) + reshape(affine[1], shape) if affine else normal

    def _over_shards(self, x: Tensor) -> Tensor:
        """By the statistics of all shards of a data-parallel step."""
        axes, shape = _others(x), (1, self.num_features, *(1,) * (x.ndim - 2))
        count = x.size // self.num_features * summed_shards()
        centre = shard_sum(sum_over(x, axes)) / count
        centred = x - reshape(centre, shape)
        spread = shard_sum(sum_over(centred * centred, axes)) / count
        self._move(centre, spread * count / (count - 1))
        normal = centred * rsqrt(reshape(spread, shape) + self.eps)
        affine = scale_and_shift(self.weight, self.bias)
        return normal * reshape(affine[0], shape) + reshape(affine[1], shape) if affine else normal

    def _track(self, x: Tensor) -> None:
        """The running statistics, in training."""
        if self.training and x.size <= self.num_features:
            raise ShapeError(
                type(self).__name__,
                f"x is {x.type}: one value per channel has no variance to train with",
                "Give more than one row, or trace with training=False.",
            )
        if self.training and self.running_mean is not None:
            self._move(mean(x, _others(x)), var(x, _others(x)))

    def _move(self, centre: Tensor, spread: Tensor) -> None:
        """The running statistics towards those of a batch."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        tracked = latest(self.num_batches_tracked) + 1
        rate = 1 / tracked if self.momentum is None else self.momentum
        update_on(self.num_batches_tracked, lambda _: tracked)
        update_on(self.running_mean, partial(towards, new=centre, rate=rate))
        update_on(self.running_var, partial(towards, new=spread, rate=rate))


def _others(x: Tensor) -> list[int]:
    """All axes but that of channels."""
    return [i for i in range(x.ndim) if i != 1]


def towards(old: Tensor, new: Tensor, rate: Tensor | float) -> Tensor:
    """A running statistic after one of a batch."""
    return old * (1 - rate) + stop_gradient(new) * rate


class BatchNorm1d(_BatchNorm):
    """Channels with mean 0 and variance 1 over a batch: (N, C) or (N, C, L) → the same."""

    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Channels with mean 0 and variance 1 over a batch: (N, C, H, W) → the same."""

    ranks = (4,)


class BatchNorm3d(_BatchNorm):
    """Channels with mean 0 and variance 1 over a batch: (N, C, D, H, W) → the same."""

    ranks = (5,)


class Bilinear(Module):
    """x₁ᵀ A x₂ + b for each output: (…, in1_features), (…, in2_features) → (…, out_features)."""

    def __init__(self, in1_features: int, in2_features: int, out_features: int, bias: bool = True):
        for label, n in (("in1_features", in1_features), ("in2_features", in2_features)):
            check_whole("Bilinear", label, n)
        check_whole("Bilinear", "out_features", out_features)
        first = fan_in_uniform(in1_features)
        self.weight = Parameter((out_features, in1_features, in2_features), first)
        self.bias = Parameter((out_features,), first) if bias else None

    def forward(self, x1: Operand, x2: Operand) -> Tensor:
        a, b, w = as_tensor(x1), as_tensor(x2), as_tensor(self.weight)
        sizes = (*a.shape[-1:], *b.shape[-1:])
        if a.shape[:-1] != b.shape[:-1] or sizes != w.shape[1:]:
            raise ShapeError(
                "Bilinear", f"x1 {a.type}, x2 {b.type}, weight {w.type}", "They do not fit."
            )
        result = linear.einsum("...i,oij,...j->...o", a, w, b)
        return result if self.bias is None else result + self.bias


class EmbeddingBag(Module):
    """Rows of a table, summed, averaged or maximised over bags of indices.

    Shapes: integers (N, L) → (N, embedding_dim).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        padding_idx: int | None = None,
    ):
        check_choice("EmbeddingBag", "mode", mode, ("sum", "mean", "max"))
        table = Embedding(num_embeddings, embedding_dim, padding_idx)
        self.mode, self.padding_idx, self.weight = mode, table.padding_idx, table.weight

    def forward(self, indices: Operand, per_sample_weights: Operand | None = None) -> Tensor:
        index = as_tensor(indices)
        if index.ndim != 2:
            raise ShapeError("EmbeddingBag", f"indices {index.type}", "They are (bags, length).")
        rows = indexing.embedding(index, self.weight)
        kept = None if self.padding_idx is None else unsqueeze(ne(index, self.padding_idx), -1)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ArgumentError(
                    "EmbeddingBag", f"weights with mode {self.mode!r}", 'They are for "sum".'
                )
            rows = rows * unsqueeze(as_tensor(per_sample_weights), -1)
        if self.mode == "max":
            return max_over(rows if kept is None else where(kept, rows, -math.inf), 1)
        total = sum_over(rows if kept is None else where(kept, rows, 0), 1)
        if self.mode == "sum":
            return total
        if kept is None:
            return total / index.shape[1]
        return total / maximum(sum_over(where(kept, as_tensor(1.0), 0), 1), 1)
