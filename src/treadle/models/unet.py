"""The U-Net of diffusion models, with the names of `diffusers`' UNet2DModel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.activations import silu
from treadle.frontend.functions.arithmetic import cos, sin
from treadle.frontend.functions.images import interpolate
from treadle.frontend.functions.shaping import (
    chunk,
    concat,
    expand,
    pad,
    reshape,
    transpose,
    unsqueeze,
)
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config
from treadle.models.context import attend, heads_of
from treadle.models.model import ACTIVATIONS, Model, check_activation
from treadle.models.vision import check_images
from treadle.nn.containers import ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Conv2d, Embedding, Linear
from treadle.nn.module import Module
from treadle.nn.normalisation import GroupNorm

DOWN = {"DownBlock2D": False, "AttnDownBlock2D": True}  # whether it attends
UP = {"UpBlock2D": False, "AttnUpBlock2D": True}
ONLY: dict[str, tuple[object, ...]] = {  # settings of `diffusers` of which these are known
    "time_embedding_type": ("positional",),
    "downsample_type": ("conv",),
    "upsample_type": ("conv",),
    "mid_block_type": ("UNetMidBlock2D",),
    "resnet_time_scale_shift": ("default", "scale_shift"),
    "class_embed_type": (None,),
    "downsample_padding": (0, 1),
}


@dataclass(frozen=True)
class UNet2DConfig(Config):
    """The settings of UNet2DModel, and its defaults."""

    model_type: str = "unet2d"
    sample_size: int | tuple[int, ...] | None = None
    in_channels: int = 3
    out_channels: int = 3
    center_input_sample: bool = False
    time_embedding_type: str = "positional"
    time_embedding_dim: int | None = None
    freq_shift: float = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[str, ...] = ("DownBlock2D", *("AttnDownBlock2D",) * 3)
    mid_block_type: str | None = "UNetMidBlock2D"
    up_block_types: tuple[str, ...] = (*("AttnUpBlock2D",) * 3, "UpBlock2D")
    block_out_channels: tuple[int, ...] = (224, 448, 672, 896)
    layers_per_block: int = 2
    mid_block_scale_factor: float = 1
    downsample_padding: int = 1
    downsample_type: str = "conv"
    upsample_type: str = "conv"
    dropout: float = 0.0
    act_fn: str = "silu"
    attention_head_dim: int | None = 8
    norm_num_groups: int = 32
    attn_norm_num_groups: int | None = None
    norm_eps: float = 1e-5
    resnet_time_scale_shift: str = "default"
    add_attention: bool = True
    class_embed_type: str | None = None
    num_class_embeds: int | None = None

    def check(self) -> None:
        for name, known in ONLY.items():
            listed = ", ".join(map(repr, known))
            self.need(getattr(self, name) in known, name, f"Known are: {listed}.")
        for name, kinds in (("down_block_types", DOWN), ("up_block_types", UP)):
            given = getattr(self, name)
            fits = len(given) == len(self.block_out_channels) >= 1 and set(given) <= set(kinds)
            self.need(fits, name, f"One of {', '.join(kinds)} for each of block_out_channels.")
        for name in ("in_channels", "out_channels", "layers_per_block", "norm_num_groups"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        for width in self.block_out_channels:
            fits = width >= 1 and width % self.norm_num_groups == 0
            self.need(fits, "block_out_channels", "Multiples of norm_num_groups.")
        half = self.block_out_channels[0] // 2
        self.need(half > self.freq_shift, "freq_shift", f"It is below {half}.")
        head = self.attention_head_dim
        fits = head is None or (head >= 1 and all(w % head == 0 for w in self.block_out_channels))
        self.need(fits, "attention_head_dim", "It divides block_out_channels.")
        for name in ("attn_norm_num_groups", "num_class_embeds", "time_embedding_dim"):
            self.need(getattr(self, name) != 0, name, "It is at least 1.")
        self.need(self.mid_block_scale_factor != 0, "mid_block_scale_factor", "It is not 0.")
        self.need_layers(self.layers_per_block * len(self.block_out_channels), "layers_per_block")
        check_activation(self, "act_fn")

    @property
    def time_width(self) -> int:
        return self.time_embedding_dim or 4 * self.block_out_channels[0]

    def json(self) -> dict[str, Any]:
        return {name: value for name, value in super().json().items() if name != "model_type"}


def time_embedding(times: Tensor, width: int, flip: bool, shift: float) -> Tensor:
    """Sines and cosines of times (B,), cosines first if flipped: (B, width)."""
    half = width // 2
    rates = np.exp(-math.log(10000) * np.arange(half) / (half - shift)).astype(np.float32)
    angles = unsqueeze(cast(times, float32), 1) * as_tensor(rates)
    parts = [cos(angles), sin(angles)] if flip else [sin(angles), cos(angles)]
    found = concat(parts, -1)
    return pad(found, [(0, 0), (0, 1)]) if width % 2 else found


class _TimeEmbedding(Module):
    def __init__(self, inputs: int, width: int):
        self.linear_1, self.linear_2 = Linear(inputs, width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear_2(silu(self.linear_1(x)))
        return result


class _Resnet(Module):
    """Two convolutions behind norms, the time between them, and what came in."""

    def __init__(self, config: UNet2DConfig, inputs: int, outputs: int, scale: float = 1.0):
        groups, eps = config.norm_num_groups, config.norm_eps
        self.scales = config.resnet_time_scale_shift == "scale_shift"
        self.norm1, self.conv1 = GroupNorm(groups, inputs, eps), Conv2d(inputs, outputs, 3, 1, 1)
        self.time_emb_proj = Linear(config.time_width, outputs * (2 if self.scales else 1))
        self.norm2, self.conv2 = GroupNorm(groups, outputs, eps), Conv2d(outputs, outputs, 3, 1, 1)
        self.conv_shortcut = Conv2d(inputs, outputs, 1) if inputs != outputs else None
        self.act, self.dropout = ACTIVATIONS[config.act_fn], Dropout(config.dropout)
        self.scale = scale

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(self.act(self.norm1(x)))
        shift = self.time_emb_proj(self.act(time))
        shift = reshape(shift, (*shift.shape, 1, 1))
        if self.scales:
            factor, shift = chunk(shift, 2, 1)
            y = self.norm2(y) * (1 + factor) + shift
        else:
            y = self.norm2(y + shift)
        y = self.conv2(self.dropout(self.act(y)))
        kept = x if self.conv_shortcut is None else self.conv_shortcut(x)
        result: Tensor = kept + y
        return result if self.scale == 1 else result / self.scale


class _Attention(Module):
    """Pixels that look at each other: (B, C, H, W) → the same."""

    def __init__(self, config: UNet2DConfig, width: int, groups: int | None, scale: float = 1.0):
        self.heads, self.scale = width // (config.attention_head_dim or width), scale
        self.group_norm = None if groups is None else GroupNorm(groups, width, config.norm_eps)
        self.to_q, self.to_k, self.to_v = (Linear(width, width) for _ in range(3))
        self.to_out = ModuleList([Linear(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = x if self.group_norm is None else self.group_norm(x)
        y = transpose(reshape(y, (b, c, h * w)), 1, 2)
        q, k, v = (heads_of(part(y), self.heads) for part in (self.to_q, self.to_k, self.to_v))
        last: Any = self.to_out[0]
        y = last(attend(q, k, v, None, False))
        result = x + reshape(transpose(y, 1, 2), (b, c, h, w))
        return result if self.scale == 1 else result / self.scale


class _Downsample(Module):
    def __init__(self, width: int, padding: int):
        self.conv, self.is_padded = Conv2d(width, width, 3, 2, padding), padding > 0

    def forward(self, x: Tensor) -> Tensor:
        # Without padding the reference fills behind, not around.
        filled = x if self.is_padded else pad(x, [(0, 0), (0, 0), (0, 1), (0, 1)])
        result: Tensor = self.conv(filled)
        return result


class _Upsample(Module):
    def __init__(self, width: int):
        self.conv = Conv2d(width, width, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(interpolate(x, scale_factor=2.0))
        return result


class _Stage(Module):
    """Blocks of one resolution: residual ones, attention behind each where there is any."""

    def __init__(self, config: UNet2DConfig, inputs: list[int], outputs: int, attends: bool):
        self.resnets = ModuleList(_Resnet(config, n, outputs) for n in inputs)
        if attends:
            groups = config.norm_num_groups
            self.attentions = ModuleList(_Attention(config, outputs, groups) for _ in inputs)
        self.attends = attends

    def blocks(self) -> list[tuple[Any, Any]]:
        resnets: list[Any] = list(self.resnets)
        attentions = list(self.attentions) if self.attends else [None] * len(resnets)
        return list(zip(resnets, attentions, strict=True))


class _Down(_Stage):
    def __init__(
        self, config: UNet2DConfig, inputs: list[int], outputs: int, attends: bool, is_last: bool
    ):
        super().__init__(config, inputs, outputs, attends)
        if not is_last:
            self.downsamplers = ModuleList([_Downsample(outputs, config.downsample_padding)])
        self.is_last = is_last

    def forward(self, x: Tensor, time: Tensor) -> list[Tensor]:
        """The results of all of its blocks."""
        found = []
        for resnet, attention in self.blocks():
            x = resnet(x, time)
            x = x if attention is None else attention(x)
            found.append(x)
        if not self.is_last:
            down: Any = self.downsamplers[0]
            found.append(down(x))
        return found


class _Up(_Stage):
    def __init__(
        self, config: UNet2DConfig, inputs: list[int], outputs: int, attends: bool, is_last: bool
    ):
        super().__init__(config, inputs, outputs, attends)
        if not is_last:
            self.upsamplers = ModuleList([_Upsample(outputs)])
        self.is_last = is_last

    def forward(self, x: Tensor, skipped: list[Tensor], time: Tensor) -> Tensor:
        """Takes as many of the skipped results, from the last, as it has blocks."""
        for resnet, attention in self.blocks():
            x = resnet(concat([x, skipped.pop()], 1), time)
            x = x if attention is None else attention(x)
        if self.is_last:
            return x
        up: Any = self.upsamplers[0]
        result: Tensor = up(x)
        return result


class _Mid(Module):
    def __init__(self, config: UNet2DConfig):
        width, scale = config.block_out_channels[-1], config.mid_block_scale_factor
        groups = config.attn_norm_num_groups
        if groups is None and config.resnet_time_scale_shift == "default":
            groups = config.norm_num_groups
        if config.add_attention:
            self.attentions = ModuleList([_Attention(config, width, groups, scale)])
        self.resnets = ModuleList(_Resnet(config, width, width, scale) for _ in range(2))
        self.attends = config.add_attention

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first, second = self.resnets
        x = first(x, time)
        if self.attends:
            attention: Any = self.attentions[0]
            x = attention(x)
        result: Tensor = second(x, time)
        return result


def _down_stages(config: UNet2DConfig) -> list[_Down]:
    widths, count = config.block_out_channels, config.layers_per_block
    found = []
    for i, (kind, width) in enumerate(zip(config.down_block_types, widths, strict=True)):
        inputs = [widths[max(0, i - 1)], *[width] * (count - 1)]
        found.append(_Down(config, inputs, width, DOWN[kind], i == len(widths) - 1))
    return found


def _up_stages(config: UNet2DConfig) -> list[_Up]:
    widths, count = config.block_out_channels[::-1], config.layers_per_block + 1
    found = []
    for i, (kind, width) in enumerate(zip(config.up_block_types, widths, strict=True)):
        came = [widths[max(0, i - 1)], *[width] * (count - 1)]
        skipped = [*[width] * (count - 1), widths[min(i + 1, len(widths) - 1)]]
        inputs = [a + b for a, b in zip(came, skipped, strict=True)]
        found.append(_Up(config, inputs, width, UP[kind], i == len(widths) - 1))
    return found


class UNet2D(Model):
    """A U-Net: images (B, in_channels, H, W) and times (B,) → (B, out_channels, H, W)."""

    architecture = "UNet2DModel"
    library = "diffusers"
    renamed = tuple(  # attention's names in older files
        (rf"(.*attentions\.\d+)\.{old}\.(weight|bias)", rf"\1.{new}.\2")
        for old, new in (
            ("query", "to_q"),
            ("key", "to_k"),
            ("value", "to_v"),
            ("proj_attn", "to_out.0"),
        )
    )

    def __init__(self, config: UNet2DConfig):
        self.config: UNet2DConfig = config
        first = config.block_out_channels[0]
        self.conv_in = Conv2d(config.in_channels, first, 3, 1, 1)
        self.time_embedding = _TimeEmbedding(first, config.time_width)
        if config.num_class_embeds is not None:
            self.class_embedding = Embedding(config.num_class_embeds, config.time_width)
        self.down_blocks = ModuleList(_down_stages(config))
        self.mid_block = _Mid(config)
        self.up_blocks = ModuleList(_up_stages(config))
        self.conv_norm_out = GroupNorm(config.norm_num_groups, first, config.norm_eps)
        self.conv_out = Conv2d(first, config.out_channels, 3, 1, 1)

    def forward(
        self, sample: Operand, timestep: Operand, class_labels: Operand | None = None
    ) -> Tensor:
        x = self._checked(sample)
        emb = self._time(as_tensor(timestep), class_labels, x.shape[0])
        x = self.conv_in(x * 2.0 - 1.0 if self.config.center_input_sample else x)
        skipped = [x]
        downs: Any = self.down_blocks
        for down in downs:
            skipped += down(skipped[-1], emb)
        x = self.mid_block(skipped[-1], emb)
        ups: Any = self.up_blocks
        for up in ups:
            x = up(x, skipped, emb)
        result: Tensor = self.conv_out(silu(self.conv_norm_out(x)))
        return result

    def _checked(self, sample: Operand) -> Tensor:
        x = check_images("UNet2D", sample, self.config.in_channels)
        halved = 2 ** (len(self.config.block_out_channels) - 1)
        if x.shape[2] % halved or x.shape[3] % halved:
            remedy = f"Height and width are multiples of {halved}."
            raise ShapeError("UNet2D", f"images are {x.type}", remedy)
        return x

    def _time(self, times: Tensor, labels: Operand | None, batch: int) -> Tensor:
        """(B, time_width), of times (B,) or one for all."""
        if times.ndim > 1 or (times.ndim == 1 and times.shape[0] not in (1, batch)):
            raise ShapeError("UNet2D", f"times are {times.type}", f"They are ({batch},) or one.")
        config = self.config
        times = expand(reshape(times, (-1,)), batch)
        width = config.block_out_channels[0]
        waves = time_embedding(times, width, config.flip_sin_to_cos, config.freq_shift)
        emb: Tensor = self.time_embedding(waves)
        if (labels is None) == (config.num_class_embeds is not None):
            cause = f"class_labels, and num_class_embeds = {config.num_class_embeds}"
            raise ArgumentError("UNet2D", cause, "Give labels to a model of classes only.")
        return emb if labels is None else emb + self.class_embedding(labels)
