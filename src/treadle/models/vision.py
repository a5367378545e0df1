"""The vision transformer, with the names of `transformers` and with those of torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from treadle.base.errors import ShapeError
from treadle.frontend.coerce import as_tensor, broadcast_to
from treadle.frontend.functions.shaping import concat, flatten, transpose
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config, Json
from treadle.models.context import attend, heads_of
from treadle.models.model import ACTIVATIONS, Model, check_activation
from treadle.nn import init
from treadle.nn.activations import GELU
from treadle.nn.attention import MultiheadAttention
from treadle.nn.containers import ModuleDict, ModuleList, Sequential
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Conv2d, LayerNorm, Linear
from treadle.nn.module import Module, Parameter


@dataclass(frozen=True)
class ViTConfig(Config):
    """Sizes of a vision transformer; the defaults are those of ViT-B/16."""

    model_type: str = "vit"
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    qkv_bias: bool = True
    num_labels: int = 2

    @classmethod
    def read(cls, given: Json) -> Self:
        """The number of labels is how many names there are, where they are named."""
        names = given.get("id2label")
        found = {"num_labels": len(names), **given} if isinstance(names, dict) else given
        return super().read(found)

    def check(self) -> None:
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        for name in (*sizes, "image_size", "patch_size", "num_channels", "num_labels"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need_divisor("hidden_size", "num_attention_heads")
        self.need_layers(self.num_hidden_layers, "num_hidden_layers")
        self.need(self.patch_size <= self.image_size, "patch_size", "It fits into the image.")
        check_activation(self, "hidden_act")

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


def check_images(name: str, images: Operand, channels: int, size: int | None = None) -> Tensor:
    given = as_tensor(images)
    fits = given.ndim == 4 and given.shape[1] == channels and given.dtype.is_float
    if not fits or (size is not None and given.shape[2:] != (size, size)):
        wanted = "H, W" if size is None else f"{size}, {size}"
        raise ShapeError(name, f"images are {given.type}", f"They are (B, {channels}, {wanted}).")
    return given


class _Patches(Module):
    def __init__(self, config: ViTConfig):
        size = config.patch_size
        self.projection = Conv2d(config.num_channels, config.hidden_size, size, size)


class _Embeddings(Module):
    def __init__(self, config: ViTConfig):
        first = init.truncated_normal(std=config.initializer_range)
        self.cls_token = Parameter((1, 1, config.hidden_size), first)
        self.position_embeddings = Parameter((1, config.patches + 1, config.hidden_size), first)
        self.patch_embeddings = _Patches(config)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embeddings.projection(images)
        return self.dropout(with_class(patches, self.cls_token, self.position_embeddings))


def with_class(patches: Tensor, token: Operand, positions: Operand) -> Tensor:
    """(B, W, H′, W′) → (B, 1 + H′ · W′, W): the class's token first, positions added."""
    rows = transpose(flatten(patches, 2), 1, 2)
    first = broadcast_to(as_tensor(token), (rows.shape[0], 1, rows.shape[2]))
    return concat([first, rows], 1) + positions


class _SelfAttention(Module):
    def __init__(self, config: ViTConfig):
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.query, self.key, self.value = (Linear(width, width, config.qkv_bias) for _ in range(3))
        self.dropout = Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(f(x), self.heads) for f in (self.query, self.key, self.value))
        return attend(q, k, v, None, False, self.dropout)


class _Dense(Module):
    def __init__(self, inputs: int, outputs: int):
        self.dense = Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dense(x)
        return result


class _Attention(Module):
    def __init__(self, config: ViTConfig):
        self.attention = _SelfAttention(config)
        self.output = _Dense(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(self.attention(x))
        return result


class _Layer(Module):
    def __init__(self, config: ViTConfig):
        width, hidden = config.hidden_size, config.intermediate_size
        self.attention = _Attention(config)
        self.intermediate, self.output = _Dense(width, hidden), _Dense(hidden, width)
        self.layernorm_before = LayerNorm(width, config.layer_norm_eps)
        self.layernorm_after = LayerNorm(width, config.layer_norm_eps)
        self.act, self.dropout = ACTIVATIONS[config.hidden_act], Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.layernorm_before(x)))
        hidden = self.act(self.intermediate(self.layernorm_after(x)))
        return x + self.dropout(self.output(hidden))


class _Body(Module):
    def __init__(self, config: ViTConfig):
        self.embeddings = _Embeddings(config)
        layers = ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = ModuleDict({"layer": layers})
        self.layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)


class ViT(Model):
    """A vision transformer as a classifier: images (B, C, H, W) → logits (B, num_labels)."""

    architecture = "ViTForImageClassification"
    prefix = "vit"
    ignored = (r"(vit\.)?pooler\..*",)

    def __init__(self, config: ViTConfig):
        self.config: ViTConfig = config
        self.vit = _Body(config)
        self.classifier = Linear(config.hidden_size, config.num_labels)

    def forward(self, images: Operand) -> Tensor:
        config = self.config
        x = self.vit.embeddings(check_images("ViT", images, config.num_channels, config.image_size))
        layers: Any = self.vit.encoder["layer"]
        for layer in layers:
            x = layer(x)
        result: Tensor = self.classifier(self.vit.layernorm(x[:, 0]))
        return result


class _EncoderBlock(Module):
    """torchvision's."""

    def __init__(self, config: ViTConfig):
        width, hidden, p = config.hidden_size, config.intermediate_size, config.hidden_dropout_prob
        self.ln_1 = LayerNorm(width, config.layer_norm_eps)
        self.self_attention = MultiheadAttention(
            width, config.num_attention_heads, config.attention_probs_dropout_prob, batch_first=True
        )
        self.ln_2 = LayerNorm(width, config.layer_norm_eps)
        self.mlp = Sequential(
            Linear(width, hidden), GELU(), Dropout(p), Linear(hidden, width), Dropout(p)
        )
        self.dropout = Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.dropout(self.self_attention(y, y, y, need_weights=False)[0])
        return x + self.mlp(self.ln_2(x))


class _TorchvisionEncoder(Module):
    def __init__(self, config: ViTConfig):
        shape = (1, config.patches + 1, config.hidden_size)
        self.pos_embedding = Parameter(shape, init.normal(std=config.initializer_range))
        layers = range(config.num_hidden_layers)
        self.layers = Sequential({f"encoder_layer_{i}": _EncoderBlock(config) for i in layers})
        self.ln = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)


class TorchvisionViT(Model):
    """The same model with torchvision's names: images (B, C, H, W) → logits (B, num_labels)."""

    def __init__(self, config: ViTConfig):
        self.config: ViTConfig = config
        width, size = config.hidden_size, config.patch_size
        self.class_token = Parameter((1, 1, width), init.zeros)
        self.conv_proj = Conv2d(config.num_channels, width, size, size)
        self.encoder = _TorchvisionEncoder(config)
        self.heads = Sequential({"head": Linear(width, config.num_labels)})

    def forward(self, images: Operand) -> Tensor:
        config, encoder = self.config, self.encoder
        given = check_images("ViT", images, config.num_channels, config.image_size)
        x = with_class(self.conv_proj(given), self.class_token, encoder.pos_embedding)
        x = encoder.ln(encoder.layers(encoder.dropout(x)))
        result: Tensor = self.heads(x[:, 0])
        return result


def vit_b_16(num_classes: int = 1000, **changes: Any) -> TorchvisionViT:
    """torchvision's ViT-B/16 with first values; `changes` are fields of `ViTConfig`."""
    given = {"layer_norm_eps": 1e-6, "num_labels": num_classes, **changes}
    return TorchvisionViT(ViTConfig(**given))
