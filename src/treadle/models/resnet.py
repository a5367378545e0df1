"""ResNet-18, 34 and 50, with the names of torchvision."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.frontend.functions.activations import relu
from treadle.frontend.functions.pooling import max_pool
from treadle.frontend.functions.reductions import mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config
from treadle.models.model import Model
from treadle.models.vision import check_images
from treadle.nn import init
from treadle.nn.containers import Sequential
from treadle.nn.layers import BatchNorm2d, Conv2d, Linear
from treadle.nn.module import Module


@dataclass(frozen=True)
class ResNetConfig(Config):
    """Blocks of each of the stages, which double their channels, and what kind they are."""

    model_type: str = "resnet"
    layers: tuple[int, ...] = (2, 2, 2, 2)
    is_bottleneck: bool = False
    width: int = 64
    num_channels: int = 3
    num_labels: int = 1000

    def check(self) -> None:
        self.need(len(self.layers) == 4, "layers", "There are four stages.")
        self.need(min(self.layers) >= 1, "layers", "Each has at least one block.")
        self.need_layers(sum(self.layers), "layers")
        for name in ("width", "num_channels", "num_labels"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Conv2d:
    found = Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    found.weight.init = init.kaiming_normal(mode="fan_out", nonlinearity="relu")
    return found


class BasicBlock(Module):
    """Two convolutions and what came in."""

    growth = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: Module | None):
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(Module):
    """A convolution between two of one pixel, and what came in."""

    growth = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: Module | None):
        outputs = width * self.growth
        self.conv1, self.bn1 = _conv(inputs, width, 1), BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), BatchNorm2d(outputs)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(relu(self.bn2(self.conv2(y)))))
        return relu(y + (x if self.downsample is None else self.downsample(x)))


Block = BasicBlock | Bottleneck


def _stage(kind: type[Block], inputs: int, width: int, count: int, stride: int) -> Sequential:
    outputs = width * kind.growth
    downsample = None
    if stride != 1 or inputs != outputs:
        downsample = Sequential(_conv(inputs, outputs, 1, stride), BatchNorm2d(outputs))
    first = kind(inputs, width, stride, downsample)
    return Sequential(first, *(kind(outputs, width, 1, None) for _ in range(count - 1)))


class ResNet(Model):
    """A residual network as a classifier: images (B, C, H, W) → logits (B, num_labels)."""

    def __init__(self, config: ResNetConfig):
        self.config: ResNetConfig = config
        kind = Bottleneck if config.is_bottleneck else BasicBlock
        width = config.width
        self.conv1, self.bn1 = _conv(config.num_channels, width, 7, 2), BatchNorm2d(width)
        inputs = width
        for i, count in enumerate(config.layers):
            stride = 1 if i == 0 else 2
            stage = _stage(kind, inputs, width << i, count, stride)
            setattr(self, f"layer{i + 1}", stage)
            inputs = (width << i) * kind.growth
        self.fc = Linear(inputs, config.num_labels)

    def forward(self, images: Operand) -> Tensor:
        x = check_images("ResNet", images, self.config.num_channels)
        x = max_pool(relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for i in range(4):
            x = getattr(self, f"layer{i + 1}")(x)
        result: Tensor = self.fc(mean(x, (2, 3)))
        return result


def resnet18(num_classes: int = 1000) -> ResNet:
    """ResNet-18 with first values."""
    return ResNet(ResNetConfig(num_labels=num_classes))


def resnet34(num_classes: int = 1000) -> ResNet:
    """ResNet-34 with first values."""
    return ResNet(ResNetConfig(layers=(3, 4, 6, 3), num_labels=num_classes))


def resnet50(num_classes: int = 1000) -> ResNet:
    """ResNet-50 with first values."""
    return ResNet(ResNetConfig(layers=(3, 4, 6, 3), is_bottleneck=True, num_labels=num_classes))
