"""Whisper, with the names of `transformers`: spectrograms in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import linear
from treadle.frontend.functions.activations import gelu
from treadle.frontend.functions.shaping import transpose
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.types import TensorType
from treadle.models.causal import check_tokens
from treadle.models.config import Config, Json
from treadle.models.context import Context, Whole, attend, heads_of
from treadle.models.decoding import KeyShape, Programs
from treadle.models.generation import Prompts, Settings, generate, stream
from treadle.models.model import ACTIVATIONS, check_activation
from treadle.models.seq2seq import SourceModel
from treadle.models.sources import Source
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Conv1d, Embedding, LayerNorm, Linear
from treadle.nn.module import Module, Parameter

PER_SIDE = ("layers", "attention_heads", "ffn_dim")  # of the encoder, and of the decoder


@dataclass(frozen=True)
class WhisperConfig(Config):
    """Whisper's sizes; the defaults are those of the tiny model."""

    model_type: str = "whisper"
    vocab_size: int = 51865
    num_mel_bins: int = 80
    d_model: int = 384
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1536
    decoder_layers: int = 4
    decoder_attention_heads: int = 6
    decoder_ffn_dim: int = 1536
    encoder_layerdrop: float = 0.0
    decoder_layerdrop: float = 0.0
    activation_function: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_std: float = 0.02
    max_source_positions: int = 1500
    max_target_positions: int = 448
    tie_word_embeddings: bool = True
    decoder_start_token_id: int = 50257
    pad_token_id: int | None = 50256
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = (220, 50256)

    def check(self) -> None:
        sides = [f"{part}_{n}" for part in ("encoder", "decoder") for n in PER_SIDE]
        positions = ("max_source_positions", "max_target_positions")
        for name in ("vocab_size", "num_mel_bins", "d_model", *sides, *positions):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need(self.d_model >= 4 and self.d_model % 2 == 0, "d_model", "It is even, at least 4.")
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            self.need_divisor("d_model", name)
        for name in ("encoder_layerdrop", "decoder_layerdrop"):
            self.need(getattr(self, name) == 0, name, "Layers are not dropped: it is 0.")
        self.need_layers(self.encoder_layers + self.decoder_layers, "encoder_layers")
        check_activation(self, "activation_function")

    def json(self) -> dict[str, Any]:
        return {**super().json(), "is_encoder_decoder": True}


SIZES: dict[str, tuple[int, int, int]] = {  # layers, heads, width
    "tiny": (4, 6, 384),
    "base": (6, 8, 512),
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (32, 20, 1280),
}


def whisper_config(size: str = "tiny", **changes: Any) -> WhisperConfig:
    """The configuration of a multilingual model of a size, with changes."""
    if size not in SIZES:
        known = ", ".join(SIZES)
        raise ArgumentError("whisper", f"there is no size {size!r}", f"There are: {known}.")
    layers, heads, width = SIZES[size]
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    given: dict[str, Any] = {"d_model": width, "decoder_start_token_id": 50258}
    given |= {"eos_token_id": 50257, "pad_token_id": 50257, "bos_token_id": 50257}
    given |= {"begin_suppress_tokens": (220, 50257)}
    given |= {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in sizes.items()}
    return WhisperConfig(**{**given, **changes})


def sinusoids(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Sines, then cosines, of positions: (length, channels)."""
    length, channels = shape
    half = channels // 2
    rates = np.exp(-np.log(10000) / (half - 1) * np.arange(half))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


class _Attention(Module):
    def __init__(self, config: WhisperConfig, heads: int):
        width, self.heads = config.d_model, heads
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (Linear(width, width) for _ in range(3))
        self.dropout = Dropout(config.attention_dropout)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return heads_of(self.k_proj(x), self.heads), heads_of(self.v_proj(x), self.heads)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q = heads_of(self.q_proj(x), self.heads)
        result: Tensor = self.out_proj(attend(q, k, v, bias, is_causal, self.dropout))
        return result


class _Layer(Module):
    """Attention and a feed-forward part, each behind a norm; a decoder's looks at the source."""

    def __init__(self, config: WhisperConfig, heads: int, hidden: int, is_decoder: bool):
        width = config.d_model
        self.self_attn, self.self_attn_layer_norm = _Attention(config, heads), LayerNorm(width)
        if is_decoder:
            self.encoder_attn = _Attention(config, heads)
            self.encoder_attn_layer_norm = LayerNorm(width)
        self.fc1, self.fc2 = Linear(width, hidden), Linear(hidden, width)
        self.final_layer_norm = LayerNorm(width)
        self.act = ACTIVATIONS[config.activation_function]
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)

    def feed(self, x: Tensor) -> Tensor:
        hidden = self.activation_dropout(self.act(self.fc1(self.final_layer_norm(x))))
        return x + self.dropout(self.fc2(hidden))


class _Encoder(Module):
    def __init__(self, config: WhisperConfig):
        width = config.d_model
        self.conv1 = Conv1d(config.num_mel_bins, width, 3, padding=1)
        self.conv2 = Conv1d(width, width, 3, 2, padding=1)
        self.embed_positions = Embedding(config.max_source_positions, width)
        # The reference does not train them.
        self.embed_positions.weight = Parameter(
            (config.max_source_positions, width), sinusoids, requires_grad=False
        )
        sizes = (config.encoder_attention_heads, config.encoder_ffn_dim)
        self.layers = ModuleList(
            _Layer(config, *sizes, False) for _ in range(config.encoder_layers)
        )
        self.layer_norm, self.dropout = LayerNorm(width), Dropout(config.dropout)

    def forward(self, features: Tensor) -> Tensor:
        """(B, mels, 2 S) → (B, S, d_model)."""
        x = transpose(gelu(self.conv2(gelu(self.conv1(features)))), 1, 2)
        x = self.dropout(x + self.embed_positions.weight)
        layers: Any = self.layers
        for layer in layers:
            y = layer.self_attn_layer_norm(x)
            x = x + layer.dropout(layer.self_attn(y, *layer.self_attn.keys(y)))
            x = layer.feed(x)
        result: Tensor = self.layer_norm(x)
        return result


class _Decoder(Module):
    def __init__(self, config: WhisperConfig):
        self.embed_tokens = Embedding(config.vocab_size, config.d_model)
        self.embed_positions = Embedding(config.max_target_positions, config.d_model)
        sizes = (config.decoder_attention_heads, config.decoder_ffn_dim)
        self.layers = ModuleList(_Layer(config, *sizes, True) for _ in range(config.decoder_layers))
        self.layer_norm, self.dropout = LayerNorm(config.d_model), Dropout(config.dropout)

    def forward(self, tokens: Tensor, context: Context, source: Source) -> Tensor:
        x = self.dropout(self.embed_tokens(tokens) + self.embed_positions(context.positions()))
        bias = context.bias(None)
        layers: Any = self.layers
        for i, layer in enumerate(layers):
            y = layer.self_attn_layer_norm(x)
            k, v = context.seen(i, *layer.self_attn.keys(y))
            x = x + layer.dropout(layer.self_attn(y, k, v, bias, bias is None))
            y = layer.encoder_attn_layer_norm(x)
            x = layer.feed(x + layer.dropout(layer.encoder_attn(y, *source.pairs[i])))
        result: Tensor = self.layer_norm(x)
        return result


class _Both(Module):
    def __init__(self, config: WhisperConfig):
        self.encoder, self.decoder = _Encoder(config), _Decoder(config)


class Whisper(SourceModel):
    """Whisper with its head: log-mel features (B, mels, 2 S) and tokens (B, T) → logits (B, T, V).

    `starts` are the tokens that its decoder begins with: the start, and where they are wanted
    those of a language, a task and no time stamps. `suppressed` and `suppressed_first` are tokens
    that are never chosen, and not as the first one.
    """

    architecture = "WhisperForConditionalGeneration"
    prefix = "model"
    pads_sources = False

    def __init__(self, config: WhisperConfig):
        self.config: WhisperConfig = config
        self.starts = (config.decoder_start_token_id,)
        self.suppressed = self._known(config.suppress_tokens)
        self.suppressed_first = self._known(config.begin_suppress_tokens)
        self.model = _Both(config)
        self.proj_out = Linear(config.d_model, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and name != "model.encoder.embed_positions.weight":
                parameter.init = init.normal(std=config.init_std)
        if config.tie_word_embeddings:
            self.proj_out.weight = self.model.decoder.embed_tokens.weight

    def _known(self, tokens: Any) -> tuple[int, ...]:
        """Those of a list that are tokens of this model."""
        known = range(self.config.vocab_size)
        given = tokens if isinstance(tokens, (list, tuple)) else ()
        return tuple(t for t in given if type(t) is int and t in known)

    def forward(self, features: Operand, decoder_tokens: Operand) -> Tensor:
        tokens = check_tokens("Whisper", decoder_tokens, self.longest)
        source = self.encode_source({"features": as_tensor(features)})
        return self.logits(self.hidden(tokens, Whole(tokens.shape[1]), source))

    @property
    def longest(self) -> int | None:
        return self.config.max_target_positions

    def encode_source(self, batch: dict[str, Tensor]) -> Source:
        features = batch["features"]
        mels, frames = self._frames
        if features.ndim != 3 or features.shape[1:] != (mels, frames):
            cause = f"features are {features.type}"
            raise ShapeError("Whisper", cause, f"They are (B, {mels}, {frames}): models.log_mel.")
        encoded = self.model.encoder(features)
        layers: Any = self.model.decoder.layers
        return Source([layer.encoder_attn.keys(encoded) for layer in layers], None)

    @property
    def _frames(self) -> tuple[int, int]:
        return self.config.num_mel_bins, 2 * self.config.max_source_positions

    def hidden(self, tokens: Tensor, context: Context, source: Source) -> Tensor:
        result: Tensor = self.model.decoder(tokens, context, source)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return linear.linear(hidden, self.proj_out.weight)

    def key_shapes(self) -> list[KeyShape]:
        heads = self.config.decoder_attention_heads
        return [KeyShape(heads, self.config.d_model // heads)] * self.config.decoder_layers

    def source_width(self, prompts: Sequence[np.ndarray]) -> int:
        return self.config.max_source_positions

    def source_types(self, batch: int, width: int) -> dict[str, TensorType]:
        return {"features": TensorType((batch, *self._frames), float32)}

    def source_arrays(self, prompts: Sequence[np.ndarray], width: int) -> dict[str, np.ndarray]:
        return {"features": np.stack(prompts).astype(np.float32)}

    def configure(self, given: Json) -> None:
        """What generation_config.json says of the decoder's first and unwanted tokens."""
        forced = given.get("forced_decoder_ids")
        pairs = forced if isinstance(forced, list) else []
        if pairs and all(isinstance(p, list) and len(p) == 2 for p in pairs):
            found = self._known([p[1] for p in pairs])
            if len(found) == len(pairs):  # a language that is left open is not one
                self.starts = (self.config.decoder_start_token_id, *found)
        if "suppress_tokens" in given:
            self.suppressed = self._known(given["suppress_tokens"])
        if "begin_suppress_tokens" in given:
            self.suppressed_first = self._known(given["begin_suppress_tokens"])

    def programs(
        self, prompts: list[np.ndarray], slots: int, settings: Settings, share: Any
    ) -> Programs:
        found = super().programs(prompts, slots, settings, share)
        if not self.suppressed and not self.suppressed_first:
            return found
        return Suppressing(found, list(self.suppressed), list(self.suppressed_first))

    def generate(self, prompt: Any, max_new_tokens: int = 20, **settings: Any) -> Any:
        """The tokens that the decoder says to features (mels, 2 S), or to each of a batch.

        They begin with `starts`; `model.tokenizer.decode` makes text of them.
        """
        return generate(self, self._prompts(prompt), max_new_tokens, **settings)

    def stream(self, prompt: Any, max_new_tokens: int = 20, **settings: Any) -> Any:
        """The tokens that answer features (mels, 2 S), each when it is chosen."""
        return stream(self, self._prompts(prompt), max_new_tokens, **settings)

    def _prompts(self, features: Any) -> Prompts:
        given = np.asarray(features.numpy() if isinstance(features, Tensor) else features)
        is_one = given.ndim == 2
        rows = given[None] if is_one else given
        if rows.ndim != 3 or rows.shape[1:] != self._frames or rows.dtype.kind != "f":
            cause = f"features of shape {given.shape} and dtype {given.dtype}"
            remedy = f"They are floats {self._frames}, or several: models.log_mel."
            raise ShapeError("generate", cause, remedy)
        return Prompts(list(rows), is_one, False)


def whisper(size: str = "tiny", **changes: Any) -> Whisper:
    """Whisper with first values: `models.whisper("base")`."""
    return Whisper(whisper_config(size, **changes))


class Suppressing:
    """Programs some of whose tokens are not chosen."""

    has_likeliest = False

    def __init__(self, programs: Programs, never: list[int], first: list[int]):
        self.programs, self.never, self.first = programs, never, first
        self.session = programs.session

    def start(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        return self._without(self.programs.start(prompts), self.never + self.first)

    def advance(self, tokens: np.ndarray) -> np.ndarray:
        return self._without(self.programs.advance(tokens), self.never)

    def take(self, rows: np.ndarray) -> None:
        self.programs.take(rows)

    def give_back(self) -> None:
        self.programs.give_back()

    def _without(self, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
        found = logits.astype(np.float32)
        found[:, tokens] = -np.inf
        return found
