"""Fourier neural operators, with the names of `neuraloperator`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treadle.base.errors import ShapeError
from treadle.fft.pairs import einsum
from treadle.fft.transforms import irfftn, rfftn
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.shaping import concat, expand, reshape
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config
from treadle.models.model import ACTIVATIONS, Model, check_activation
from treadle.nn import init
from treadle.nn.containers import Identity, ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Conv1d
from treadle.nn.module import Module, Parameter
from treadle.nn.normalisation import GroupNorm

SKIPS = ("linear", "identity", "soft-gating", None)
LETTERS = "xyzuvw"  # the labels of axes; there are at most as many


@dataclass(frozen=True)
class FNOConfig(Config):
    """Frequencies along each axis, channels, and what is in a block."""

    model_type: str = "fno"
    n_modes: tuple[int, ...] = (16, 16)
    in_channels: int = 1
    out_channels: int = 1
    hidden_channels: int = 64
    n_layers: int = 4
    lifting_channel_ratio: float = 2
    projection_channel_ratio: float = 2
    positional_embedding: str | None = "grid"
    non_linearity: str = "gelu"
    norm: str | None = None
    use_channel_mlp: bool = True
    channel_mlp_dropout: float = 0
    channel_mlp_expansion: float = 0.5
    channel_mlp_skip: str | None = "soft-gating"
    fno_skip: str | None = "linear"

    def check(self) -> None:
        fits = 1 <= len(self.n_modes) <= len(LETTERS) and min(self.n_modes) >= 1
        self.need(fits, "n_modes", f"A number from 1 for each of at most {len(LETTERS)} axes.")
        for name in ("in_channels", "out_channels", "hidden_channels", "n_layers"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need_layers(self.n_layers, "n_layers")
        self.need(self.positional_embedding in ("grid", None), "positional_embedding", '"grid".')
        self.need(self.norm in ("group_norm", None), "norm", '"group_norm" or none is known.')
        for name in ("fno_skip", "channel_mlp_skip"):
            self.need(getattr(self, name) in SKIPS, name, f"Known are: {SKIPS}.")
        self.need(self.lifting_channel_ratio >= 0, "lifting_channel_ratio", "It is not negative.")
        for name in ("projection_channel_ratio", "channel_mlp_expansion"):
            wide = int(getattr(self, name) * self.hidden_channels)
            self.need(wide >= 1, name, "It leaves at least one channel.")
        check_activation(self, "non_linearity")


class ChannelMLP(Module):
    """Channels mixed at each point: (B, C, …) → (B, out, …)."""

    def __init__(self, sizes: list[int], act: str, dropout: float = 0.0):
        pairs = pairwise(sizes)
        self.fcs = ModuleList(Conv1d(a, b, 1) for a, b in pairs)
        self.act, self.dropout = ACTIVATIONS[act], Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *places = x.shape
        y = reshape(x, (b, c, math.prod(places)))
        for i, fc in enumerate(self.fcs):
            y = fc(y)
            y = self.dropout(self.act(y) if i < len(self.fcs) - 1 else y)
        return reshape(y, (b, y.shape[1], *places))


class _Linear(Module):
    def __init__(self, width: int):
        self.conv = Conv1d(width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *places = x.shape
        return reshape(self.conv(reshape(x, (b, c, math.prod(places)))), x.shape)


class _Gate(Module):
    def __init__(self, width: int, ndim: int):
        self.weight = Parameter((1, width, *[1] * ndim), init.ones)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _skip(kind: str, width: int, ndim: int) -> Module:
    if kind == "linear":
        return _Linear(width)
    return _Gate(width, ndim) if kind == "soft-gating" else Identity()


class _Complex(Module):
    """A complex weight as its real and imaginary parts, in a last axis of two."""

    def __init__(self, shape: tuple[int, ...], std: float):
        self.tensor = Parameter((*shape, 2), init.normal(std=std / math.sqrt(2)))


class SpectralConv(Module):
    """The lowest frequencies of each channel, mixed: (B, C, …) → (B, out, …).

    The weight (in, out, modes …) is by frequency from the most negative, but of the last axis from
    0; `weight.tensor` has one axis more, of real and imaginary parts.
    """

    def __init__(self, inputs: int, outputs: int, modes: tuple[int, ...]):
        self.modes = (*modes[:-1], modes[-1] // 2 + 1)
        std = (2 / (inputs + outputs)) ** 0.5
        self.weight = _Complex((inputs, outputs, *self.modes), std)
        self.bias = Parameter((outputs, *[1] * len(modes)), init.normal(std=std))

    def forward(self, x: Tensor) -> Tensor:
        places = x.shape[2:]
        most = (*places[:-1], places[-1] // 2 + 1)
        used = tuple(min(m, n) for m, n in zip(self.modes, most, strict=True))
        axes = tuple(range(2, x.ndim))
        labels = LETTERS[: len(axes)]
        z = rfftn(x, dim=axes, norm="forward", modes=used)
        z = einsum(f"bi{labels},io{labels}->bo{labels}", z, self._weight(used))
        y = irfftn(z, s=places, dim=axes, norm="forward", modes=used)
        return y + self.bias

    def _weight(self, used: tuple[int, ...]) -> Tensor:
        """Of the frequencies that there are, from 0 up and then the negative ones."""
        weight = as_tensor(self.weight.tensor)
        for axis, (count, every) in enumerate(zip(used, self.modes, strict=True), 2):
            skipped = (every - count) // 2 if axis < len(used) + 1 else 0
            at: list[Any] = [slice(None)] * axis
            if axis == len(used) + 1:
                weight = weight[(*at, slice(0, count))]
                continue
            middle = skipped + count // 2  # frequency 0
            parts = [slice(middle, skipped + count), slice(skipped, middle)]
            found = [weight[(*at, part)] for part in parts if part.start < part.stop]
            weight = found[0] if len(found) == 1 else concat(found, axis)
        return weight


class _Blocks(Module):
    """The blocks' parts, each a list: that is how they are named."""

    def __init__(self, config: FNOConfig):
        width, ndim, count = config.hidden_channels, len(config.n_modes), config.n_layers
        self.config, self.act = config, ACTIVATIONS[config.non_linearity]
        self.convs = ModuleList(SpectralConv(width, width, config.n_modes) for _ in range(count))
        if config.fno_skip is not None:
            kind = config.fno_skip
            self.fno_skips = ModuleList(_skip(kind, width, ndim) for _ in range(count))
        if config.use_channel_mlp:
            sizes = [width, round(width * config.channel_mlp_expansion), width]
            p = config.channel_mlp_dropout
            self.channel_mlp = ModuleList(ChannelMLP(sizes, "gelu", p) for _ in range(count))
            if config.channel_mlp_skip is not None:
                kind = config.channel_mlp_skip
                self.channel_mlp_skips = ModuleList(_skip(kind, width, ndim) for _ in range(count))
        if config.norm is not None:
            self.norm = ModuleList(GroupNorm(1, width) for _ in range(2 * count))

    def block(self, x: Tensor, i: int) -> Tensor:
        config, parts = self.config, self._at(i)
        is_last = i == config.n_layers - 1
        y = parts["convs"](x)
        y = self.norm[2 * i](y) if config.norm is not None else y
        y = y if config.fno_skip is None else y + parts["fno_skips"](x)
        y = y if is_last else self.act(y)
        if config.use_channel_mlp:
            y = parts["channel_mlp"](y)
            y = y if config.channel_mlp_skip is None else y + parts["channel_mlp_skips"](x)
        y = self.norm[2 * i + 1](y) if config.norm is not None else y
        result: Tensor = y if is_last else self.act(y)
        return result

    def _at(self, i: int) -> dict[str, Any]:
        lists = [(n, p) for n, p in self._parts() if isinstance(p, ModuleList) and n != "norm"]
        return {name: part[i] for name, part in lists}


class FNO(Model):
    """A Fourier neural operator: a function on a grid (B, in, …) → another one (B, out, …).

    It may be used on other grids than it was trained on.
    """

    def __init__(self, config: FNOConfig):
        self.config: FNOConfig = config
        width, ndim = config.hidden_channels, len(config.n_modes)
        self.fno_blocks = _Blocks(config)
        inputs = config.in_channels + (0 if config.positional_embedding is None else ndim)
        lifted = int(config.lifting_channel_ratio * width)
        self.lifting = ChannelMLP(
            [inputs, lifted, width] if lifted else [inputs, width], config.non_linearity
        )
        projected = int(config.projection_channel_ratio * width)
        sizes = [width, projected, config.out_channels]
        self.projection = ChannelMLP(sizes, config.non_linearity)

    def forward(self, x: Operand) -> Tensor:
        given, ndim = as_tensor(x), len(self.config.n_modes)
        if given.ndim != ndim + 2 or given.shape[1] != self.config.in_channels:
            wanted = f"(B, {self.config.in_channels}, and {ndim} axes)"
            raise ShapeError("FNO", f"x is {given.type}", f"It is {wanted}.")
        if self.config.positional_embedding is not None:
            given = concat([given, *_grid(given.shape)], 1)
        value: Tensor = self.lifting(given)
        for i in range(self.config.n_layers):
            value = self.fno_blocks.block(value, i)
        result: Tensor = self.projection(value)
        return result


def _grid(shape: tuple[int, ...]) -> list[Tensor]:
    """Coordinates from 0 to 1, without 1, along each axis: (B, 1, …) each."""
    places = shape[2:]
    found = []
    for axis, count in enumerate(places):
        line = (np.arange(count) / count).astype(np.float32)
        sizes = [1] * axis + [count] + [1] * (len(places) - axis - 1)
        found.append(expand(reshape(as_tensor(line), (1, 1, *sizes)), shape[0], 1, *places))
    return found
