"""CLIP, with the names of `transformers`: images and texts in one space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import eq, exp, sqrt
from treadle.frontend.functions.indexing import one_hot
from treadle.frontend.functions.reductions import argmax
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import iota, reshape, unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.causal import check_tokens
from treadle.models.config import Config, Json
from treadle.models.context import Whole, attend, heads_of
from treadle.models.model import ACTIVATIONS, Model, check_activation
from treadle.models.vision import check_images, with_class
from treadle.nn import init
from treadle.nn.containers import ModuleDict, ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Conv2d, Embedding, LayerNorm, Linear
from treadle.nn.module import Module, Parameter


@dataclass(frozen=True)
class CLIPTowerConfig(Config):
    """Sizes of one of the two towers; the defaults are those of the text's."""

    model_type: str = "clip_text_model"
    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    image_size: int = 224
    patch_size: int = 32
    num_channels: int = 3
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    attention_dropout: float = 0.0
    eos_token_id: int | None = 49407

    def check(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        more = ("num_attention_heads", "max_position_embeddings", "image_size", "patch_size")
        for name in (*sizes, *more, "num_channels"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need_divisor("hidden_size", "num_attention_heads")
        self.need_layers(self.num_hidden_layers, "num_hidden_layers")
        self.need(self.patch_size <= self.image_size, "patch_size", "It fits into the image.")
        check_activation(self, "hidden_act")


VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
TEXTS = CLIPTowerConfig()
IMAGES = CLIPTowerConfig.read({**VISION, "model_type": "clip_vision_model"})
TEXT_NAMES = ("vocab_size", "max_position_embeddings", "eos_token_id")
VISION_NAMES = ("image_size", "patch_size", "num_channels")


@dataclass(frozen=True)
class CLIPConfig(Config):
    """Both towers and the size of what they share; the defaults are those of ViT-B/32."""

    model_type: str = "clip"
    projection_dim: int = 512
    logit_scale_init_value: float = 2.6592
    text: CLIPTowerConfig = TEXTS
    vision: CLIPTowerConfig = IMAGES

    @classmethod
    def read(cls, given: Json) -> Self:
        """The towers are objects of their own."""
        texts, images = (_object(given.get(n)) for n in ("text_config", "vision_config"))
        found: dict[str, Any] = {k: v for k, v in given.items() if k not in ("text", "vision")}
        found["text"] = CLIPTowerConfig.read({**texts, "model_type": "clip_text_model"})
        kind = {"model_type": "clip_vision_model"}
        found["vision"] = CLIPTowerConfig.read({**VISION, **images, **kind})
        return super().read(found)

    def check(self) -> None:
        self.need(self.projection_dim >= 1, "projection_dim", "It is at least 1.")

    def json(self) -> dict[str, Any]:
        towers = {}
        for name, tower, others in (
            ("text_config", self.text, VISION_NAMES),
            ("vision_config", self.vision, TEXT_NAMES),
        ):
            towers[name] = {k: v for k, v in tower.json().items() if k not in others}
        names = ("model_type", "projection_dim", "logit_scale_init_value")
        return {**{name: getattr(self, name) for name in names}, **towers}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class _Attention(Module):
    def __init__(self, config: CLIPTowerConfig):
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            Linear(width, width) for _ in range(4)
        )
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, x: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
        q, k, v = (heads_of(f(x), self.heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        result: Tensor = self.out_proj(attend(q, k, v, bias, is_causal, self.dropout))
        return result


class _MLP(Module):
    def __init__(self, config: CLIPTowerConfig):
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.act(self.fc1(x)))
        return result


class _Layer(Module):
    def __init__(self, config: CLIPTowerConfig):
        width, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn, self.mlp = _Attention(config), _MLP(config)
        self.layer_norm1, self.layer_norm2 = LayerNorm(width, eps), LayerNorm(width, eps)

    def forward(self, x: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), bias, is_causal)
        return x + self.mlp(self.layer_norm2(x))


def _layers(config: CLIPTowerConfig) -> ModuleDict:
    return ModuleDict(
        {"layers": ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))}
    )


class _TextEmbeddings(Module):
    def __init__(self, config: CLIPTowerConfig):
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        places: Tensor = self.position_embedding(iota((1, tokens.shape[1]), 1))
        return places + self.token_embedding(tokens)


class _TextTower(Module):
    """Tokens (B, T) → (B, hidden_size), of the token that ends the text."""

    def __init__(self, config: CLIPTowerConfig):
        self.embeddings, self.encoder = _TextEmbeddings(config), _layers(config)
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.end, self.longest = config.eos_token_id, config.max_position_embeddings

    def forward(self, tokens: Operand, mask: Operand | None) -> Tensor:
        given = check_tokens("CLIP", tokens, self.longest)
        length = given.shape[1]
        bias = Whole(length, None if mask is None else as_tensor(mask)).bias(None)
        x = self.embeddings(given)
        layers: Any = self.encoder["layers"]
        for layer in layers:
            x = layer(x, bias, bias is None)
        # The first files called 2 the end, and took the greatest token.
        end = 2 if self.end is None else self.end
        score = given if end == 2 else cast(eq(given, end), dtypes.int32)
        at = one_hot(argmax(score, -1), length, x.dtype)  # (B, T)
        return sum_over(self.final_layer_norm(x) * unsqueeze(at, -1), 1)


class _VisionEmbeddings(Module):
    def __init__(self, config: CLIPTowerConfig):
        width, size = config.hidden_size, config.patch_size
        self.class_embedding = Parameter((width,), init.normal(std=width**-0.5))
        self.patch_embedding = Conv2d(config.num_channels, width, size, size, bias=False)
        count = (config.image_size // size) ** 2 + 1
        self.position_embedding = Embedding(count, width)

    def forward(self, images: Tensor) -> Tensor:
        token = reshape(as_tensor(self.class_embedding), (1, 1, -1))
        return with_class(self.patch_embedding(images), token, self.position_embedding.weight)


class _VisionTower(Module):
    """Images (B, C, H, W) → (B, hidden_size), of the class's token."""

    def __init__(self, config: CLIPTowerConfig):
        width, eps = config.hidden_size, config.layer_norm_eps
        self.embeddings = _VisionEmbeddings(config)
        self.pre_layrnorm = LayerNorm(width, eps)
        self.encoder = _layers(config)
        self.post_layernorm = LayerNorm(width, eps)
        self.channels, self.size = config.num_channels, config.image_size

    def forward(self, images: Operand) -> Tensor:
        given = check_images("CLIP", images, self.channels, self.size)
        x = self.pre_layrnorm(self.embeddings(given))
        layers: Any = self.encoder["layers"]
        for layer in layers:
            x = layer(x, None, False)
        result: Tensor = self.post_layernorm(x[:, 0])
        return result


class CLIP(Model):
    """Tokens (B, T) and images (C, …) → how alike each image and text are: (images, texts)."""

    architecture = "CLIPModel"
    ignored = (r".*embeddings\.position_ids",)

    def __init__(self, config: CLIPConfig):
        self.config: CLIPConfig = config
        self.text_model, self.vision_model = _TextTower(config.text), _VisionTower(config.vision)
        shared = config.projection_dim
        self.visual_projection = Linear(config.vision.hidden_size, shared, bias=False)
        self.text_projection = Linear(config.text.hidden_size, shared, bias=False)
        first = np.array(config.logit_scale_init_value, np.float32)
        self.logit_scale = Parameter((), init.literal(first))

    def text_features(self, tokens: Operand, attention_mask: Operand | None = None) -> Tensor:
        """(B, T) → (B, projection_dim), of length 1."""
        return _unit(self.text_projection(self.text_model(tokens, attention_mask)))

    def image_features(self, images: Operand) -> Tensor:
        """(B, C, H, W) → (B, projection_dim), of length 1."""
        return _unit(self.visual_projection(self.vision_model(images)))

    def forward(
        self, tokens: Operand, images: Operand, attention_mask: Operand | None = None
    ) -> Tensor:
        texts = self.text_features(tokens, attention_mask)
        found = self.image_features(images)
        return (found @ texts.transpose(0, 1)) * exp(as_tensor(self.logit_scale))


def _unit(x: Tensor) -> Tensor:
    return x / sqrt(sum_over(x * x, -1, keepdims=True))
