"""Dropout of elements, channels, paths and blocks, in training only."""

from __future__ import annotations

from treadle.base.errors import ShapeError
from treadle.base.numbers import PROBABILITY, check_number, check_whole
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.activations import SELU_ALPHA, SELU_SCALE
from treadle.frontend.functions.arithmetic import where
from treadle.frontend.functions.pooling import max_pool
from treadle.frontend.functions.reductions import mean
from treadle.frontend.functions.shaping import pad
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.module import Module


class _Dropout(Module):
    """What is zeroed together has one random draw; the rest is scaled by 1 / (1 − p)."""

    def __init__(self, p: float = 0.5, inplace: bool = False):
        self.p = check_number(type(self).__name__, "p", p, PROBABILITY)

    def drawn(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the draws, which broadcasts to x."""
        return x.shape

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if not self.training or self.p == 0:
            return value
        if self.p == 1:
            return value * 0
        kept = random.bernoulli(1 - self.p, self.drawn(value))
        return where(kept, value * (1 / (1 - self.p)), 0)


class Dropout(_Dropout):
    """Zero each element with probability p and scale the rest by 1 / (1 − p), in training only."""


class _ChannelDropout(_Dropout):
    """Zero whole channels of (N, C, spatial …)."""

    dims = 0

    def drawn(self, x: Tensor) -> tuple[int, ...]:
        return channels_of(self, x, self.dims)


def channels_of(module: Module, x: Tensor, dims: int) -> tuple[int, ...]:
    """One draw for each channel; the batch axis may be missing."""
    if x.ndim not in (dims + 1, dims + 2):
        raise ShapeError(
            type(module).__name__, f"x is {x.type}", f"It is (N, C, {dims} spatial axes)."
        )
    return (*x.shape[: x.ndim - dims], *(1,) * dims)


class Dropout1d(_ChannelDropout):
    """Zero whole channels with probability p, in training only: (N, C, L) → the same."""

    dims = 1


class Dropout2d(_ChannelDropout):
    """Zero whole channels with probability p, in training only: (N, C, H, W) → the same."""

    dims = 2


class Dropout3d(_ChannelDropout):
    """Zero whole channels with probability p, in training only: (N, C, D, H, W) → the same."""

    dims = 3


class AlphaDropout(Module):
    """Dropout for SELU: elements become its lowest value, and mean and variance stay."""

    def __init__(self, p: float = 0.5, inplace: bool = False):
        self.p = check_number(type(self).__name__, "p", p, PROBABILITY)

    def drawn(self, x: Tensor) -> tuple[int, ...]:
        return x.shape

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if not self.training or self.p == 0:
            return value
        if self.p == 1:
            return value * 0
        lowest, kept = -SELU_ALPHA * SELU_SCALE, 1 - self.p
        scale = (kept + lowest * lowest * kept * self.p) ** -0.5
        chosen = random.bernoulli(kept, self.drawn(value))
        return where(chosen, value, lowest) * scale - scale * self.p * lowest


class FeatureAlphaDropout(AlphaDropout):
    """AlphaDropout of whole channels: (N, C, …) → the same."""

    def drawn(self, x: Tensor) -> tuple[int, ...]:
        if x.ndim < 2:
            raise ShapeError("FeatureAlphaDropout", f"x is {x.type}", "It is (N, C, …).")
        return (*x.shape[:2], *(1,) * (x.ndim - 2))


class DropPath(_Dropout):
    """Zero whole samples of a batch: stochastic depth, for the branch of a residual block.

    Shapes: (N, …) → the same.
    """

    def __init__(self, p: float = 0.0):
        super().__init__(p)

    def drawn(self, x: Tensor) -> tuple[int, ...]:
        if x.ndim == 0:
            raise ShapeError("DropPath", "x is a scalar", "It has a batch axis.")
        return (x.shape[0], *(1,) * (x.ndim - 1))


class DropBlock2d(Module):
    """Zero square blocks, one pattern for all channels; the rest is scaled up.

    Shapes: (N, C, H, W) → the same.
    """

    def __init__(self, p: float = 0.1, block_size: int = 7):
        self.p = check_number("DropBlock2d", "p", p, PROBABILITY)
        self.block_size = check_whole("DropBlock2d", "block_size", block_size)

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if value.ndim != 4:
            raise ShapeError("DropBlock2d", f"x is {value.type}", "It is (N, C, H, W).")
        if not self.training or self.p == 0:
            return value
        n, _, h, w = value.shape
        size = min(self.block_size, h, w)
        # Blocks start where they fit, as often as drops a share p of all pixels.
        starts = (h - size + 1) * (w - size + 1)
        rate = min(1.0, self.p * h * w / (size * size) / starts)
        shape = (n, 1, h - size + 1, w - size + 1)
        seeds = cast(random.bernoulli(rate, shape), value.dtype)
        # A pixel is dropped where some block that covers it starts.
        covered = max_pool(pad_around(seeds, size - 1), size, 1)
        kept = 1 - covered
        return value * kept / where(mean(kept) == 0, 1, mean(kept))


def pad_around(x: Tensor, amount: int) -> Tensor:
    """Zeros around the last two axes."""
    return pad(x, ((0, 0), (0, 0), (amount, amount), (amount, amount)))
