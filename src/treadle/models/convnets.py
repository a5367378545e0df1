"""EfficientNet-B0 and ConvNeXt-T, with the names of torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.frontend.functions.activations import sigmoid, silu
from treadle.frontend.functions.reductions import mean
from treadle.frontend.functions.shaping import permute
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config
from treadle.models.model import Model
from treadle.models.vision import check_images
from treadle.nn import init
from treadle.nn.activations import GELU, SiLU
from treadle.nn.containers import Flatten, Identity, Sequential
from treadle.nn.dropout import Dropout, DropPath
from treadle.nn.layers import BatchNorm2d, Conv2d, LayerNorm, Linear
from treadle.nn.module import Module, Parameter


@dataclass(frozen=True)
class EfficientNetConfig(Config):
    """Stages as rows: growth inside, kernel, stride, channels in and out, blocks."""

    model_type: str = "efficientnet"
    stages: tuple[tuple[int, ...], ...] = (
        (1, 3, 1, 32, 16, 1),
        (6, 3, 2, 16, 24, 2),
        (6, 5, 2, 24, 40, 2),
        (6, 3, 2, 40, 80, 3),
        (6, 5, 1, 80, 112, 3),
        (6, 5, 2, 112, 192, 4),
        (6, 3, 1, 192, 320, 1),
    )
    dropout: float = 0.2
    stochastic_depth: float = 0.2
    num_channels: int = 3
    num_labels: int = 1000

    def check(self) -> None:
        fits = bool(self.stages) and all(len(s) == 6 and min(s) >= 1 for s in self.stages)
        self.need(fits, "stages", "Each is six whole numbers from 1.")
        self.need_layers(sum(s[5] for s in self.stages), "stages")
        for name in ("num_channels", "num_labels"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, has_act: bool = True
) -> Sequential:
    """A convolution, its norm and an activation: "0.weight", "1.weight"."""
    conv = Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    conv.weight.init = init.kaiming_normal(mode="fan_out")
    return Sequential(conv, BatchNorm2d(outputs), *([SiLU()] if has_act else []))


class SqueezeExcitation(Module):
    """Channels scaled by what their means say: (B, C, H, W) → the same."""

    def __init__(self, channels: int, squeezed: int):
        self.fc1, self.fc2 = Conv2d(channels, squeezed, 1), Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(silu(self.fc1(mean(x, (2, 3), keepdims=True))))
        return x * sigmoid(scale)


class _MBConv(Module):
    def __init__(self, growth: int, kernel: int, stride: int, inputs: int, outputs: int, p: float):
        wide = inputs * growth
        first = [_conv(inputs, wide, 1)] if growth > 1 else []
        self.block = Sequential(
            *first,
            _conv(wide, wide, kernel, stride, wide),
            SqueezeExcitation(wide, max(1, inputs // 4)),
            _conv(wide, outputs, 1, has_act=False),
        )
        self.is_residual = stride == 1 and inputs == outputs
        self.stochastic_depth = DropPath(p)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return self.stochastic_depth(y) + x if self.is_residual else y


class EfficientNet(Model):
    """Inverted residual blocks as a classifier: images (B, C, H, W) → logits (B, num_labels)."""

    def __init__(self, config: EfficientNetConfig):
        self.config: EfficientNetConfig = config
        first, last = config.stages[0][3], config.stages[-1][4]
        parts: list[Module] = [_conv(config.num_channels, first, 3, 2)]
        total, before = sum(s[5] for s in config.stages), 0
        for growth, kernel, stride, inputs, outputs, count in config.stages:
            stage = Sequential()
            for i in range(count):
                sizes = (stride, inputs) if i == 0 else (1, outputs)
                p = config.stochastic_depth * before / total
                stage.append(_MBConv(growth, kernel, *sizes, outputs, p))
                before += 1
            parts.append(stage)
        self.features = Sequential(*parts, _conv(last, 4 * last, 1))
        self.classifier = Sequential(Dropout(config.dropout), Linear(4 * last, config.num_labels))

    def forward(self, images: Operand) -> Tensor:
        x = self.features(check_images("EfficientNet", images, self.config.num_channels))
        result: Tensor = self.classifier(mean(x, (2, 3)))
        return result


def efficientnet_b0(num_classes: int = 1000, **changes: Any) -> EfficientNet:
    """EfficientNet-B0 with first values; `changes` are fields of `EfficientNetConfig`."""
    return EfficientNet(EfficientNetConfig(num_labels=num_classes, **changes))


@dataclass(frozen=True)
class ConvNeXtConfig(Config):
    """Channels and blocks of each stage; the defaults are those of ConvNeXt-T."""

    model_type: str = "convnext"
    widths: tuple[int, ...] = (96, 192, 384, 768)
    layers: tuple[int, ...] = (3, 3, 9, 3)
    stochastic_depth: float = 0.1
    layer_scale: float = 1e-6
    num_channels: int = 3
    num_labels: int = 1000

    def check(self) -> None:
        is_pair = len(self.widths) == len(self.layers) >= 1
        self.need(is_pair, "widths", "There are as many as layers.")
        self.need(min(self.widths) >= 1, "widths", "Each is at least 1.")
        self.need(min(self.layers) >= 1, "layers", "Each is at least 1.")
        self.need_layers(sum(self.layers), "layers")
        for name in ("num_channels", "num_labels"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")


class LayerNorm2d(LayerNorm):
    """A layer norm of each pixel's channels: (B, C, H, W) → the same."""

    def forward(self, x: Operand) -> Tensor:
        return permute(super().forward(permute(x, 0, 2, 3, 1)), 0, 3, 1, 2)


class _CNBlock(Module):
    def __init__(self, width: int, scale: float, p: float):
        # The names count the permutations that torchvision has between these.
        self.block = Sequential(
            Conv2d(width, width, 7, padding=3, groups=width),
            Identity(),
            LayerNorm(width, 1e-6),
            Linear(width, 4 * width),
            GELU(),
            Linear(4 * width, width),
        )
        self.layer_scale = Parameter((width, 1, 1), init.constant(scale))
        self.stochastic_depth = DropPath(p)

    def forward(self, x: Tensor) -> Tensor:
        conv, *rest = self.block
        y = permute(conv(x), 0, 2, 3, 1)
        for module in rest:
            y = module(y)
        return x + self.stochastic_depth(permute(y, 0, 3, 1, 2) * self.layer_scale)


class ConvNeXt(Model):
    """ConvNeXt as a classifier: images (B, C, H, W) → logits (B, num_labels)."""

    def __init__(self, config: ConvNeXtConfig):
        self.config: ConvNeXtConfig = config
        widths = config.widths
        stem = Conv2d(config.num_channels, widths[0], 4, 4)
        parts: list[Module] = [Sequential(stem, LayerNorm2d(widths[0], 1e-6))]
        total, before = max(1, sum(config.layers) - 1), 0
        for i, (width, count) in enumerate(zip(widths, config.layers, strict=True)):
            if i:
                down = Conv2d(widths[i - 1], width, 2, 2)
                parts.append(Sequential(LayerNorm2d(widths[i - 1], 1e-6), down))
            stage = Sequential()
            for _ in range(count):
                p = config.stochastic_depth * before / total
                stage.append(_CNBlock(width, config.layer_scale, p))
                before += 1
            parts.append(stage)
        self.features = Sequential(*parts)
        head = Linear(widths[-1], config.num_labels)
        self.classifier = Sequential(LayerNorm2d(widths[-1], 1e-6), Flatten(), head)
        for _, parameter in self.named_parameters():
            if parameter.ndim in (2, 4):
                parameter.init = init.truncated_normal(std=0.02)

    def forward(self, images: Operand) -> Tensor:
        x = self.features(check_images("ConvNeXt", images, self.config.num_channels))
        result: Tensor = self.classifier(mean(x, (2, 3), keepdims=True))
        return result


def convnext_tiny(num_classes: int = 1000, **changes: Any) -> ConvNeXt:
    """ConvNeXt-T with first values; `changes` are fields of `ConvNeXtConfig`."""
    return ConvNeXt(ConvNeXtConfig(num_labels=num_classes, **changes))
