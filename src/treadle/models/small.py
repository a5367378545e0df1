"""Small models: fully connected layers, and LeNet-5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.base.numbers import check_sizes
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.activations import relu
from treadle.frontend.functions.pooling import max_pool
from treadle.frontend.functions.shaping import flatten
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config
from treadle.models.model import ACTIVATIONS, Model, check_activation
from treadle.models.vision import check_images
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Conv2d, Linear


@dataclass(frozen=True)
class MLPConfig(Config):
    """The sizes of the input, the hidden layers and the result."""

    model_type: str = "mlp"
    sizes: tuple[int, ...] = (784, 128, 10)
    hidden_act: str = "relu"
    dropout: float = 0.0

    def check(self) -> None:
        self.need(len(self.sizes) >= 2, "sizes", "Give at least two.")
        self.need(min(self.sizes) >= 1, "sizes", "Each is at least 1.")
        self.need_layers(len(self.sizes), "sizes")
        check_activation(self, "hidden_act")


class MLP(Model):
    """Linear layers with an activation between them: (…, first) → (…, last).

    Names are those of torch.nn.Sequential with an activation between two layers: "0.weight",
    "2.weight", and so on.
    """

    def __init__(self, config: MLPConfig | Sequence[int]):
        if not isinstance(config, MLPConfig):
            config = MLPConfig(sizes=check_sizes("MLP", "sizes", config))
        self.config: MLPConfig = config
        self.layers = [Linear(a, b) for a, b in zip(config.sizes, config.sizes[1:], strict=False)]
        self.act, self.dropout = ACTIVATIONS[config.hidden_act], Dropout(config.dropout)

    def _parts(self) -> list[tuple[str, object]]:
        return [(str(2 * i), layer) for i, layer in enumerate(self.layers)]

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        for layer in self.layers[:-1]:
            value = self.dropout(self.act(layer(value)))
        result: Tensor = self.layers[-1](value)
        return result


@dataclass(frozen=True)
class LeNetConfig(Config):
    """The image's side and channels, and the number of classes."""

    model_type: str = "lenet"
    image_size: int = 28
    num_channels: int = 1
    num_labels: int = 10

    def check(self) -> None:
        self.need(self.image_size >= 16, "image_size", "It is at least 16.")
        for name in ("num_channels", "num_labels"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")


class LeNet(Model):
    """LeNet-5 with ReLU and maximum pooling: images (B, C, H, H) → logits (B, num_labels)."""

    def __init__(self, config: LeNetConfig | None = None):
        self.config: LeNetConfig = config or LeNetConfig()
        side = ((self.config.image_size - 4) // 2 - 4) // 2
        self.conv1, self.conv2 = Conv2d(self.config.num_channels, 6, 5), Conv2d(6, 16, 5)
        self.fc1, self.fc2 = Linear(16 * side * side, 120), Linear(120, 84)
        self.fc3 = Linear(84, self.config.num_labels)

    def forward(self, images: Operand) -> Tensor:
        x = check_images("LeNet", images, self.config.num_channels, self.config.image_size)
        for conv in (self.conv1, self.conv2):
            x = max_pool(relu(conv(x)), 2)
        x = flatten(x, 1)
        result: Tensor = self.fc3(relu(self.fc2(relu(self.fc1(x)))))
        return result
