"""T5, with the names of `transformers`: an encoder, a decoder, and generation from a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.dtypes import int32
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.shaping import permute, unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.types import TensorType
from treadle.models.causal import check_tokens
from treadle.models.config import Config
from treadle.models.context import Context, Whole, attend, heads_of, padding_bias
from treadle.models.decoding import KeyShape, bucket
from treadle.models.model import ACTIVATIONS
from treadle.models.seq2seq import SourceModel
from treadle.models.sources import Source
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Embedding, Linear, RMSNorm
from treadle.nn.module import Module, Parameter
from treadle.nn.positions import t5_buckets

GATED = {"gated-gelu": "gelu_new", "gated-silu": "silu", "gated-relu": "relu"}


@dataclass(frozen=True)
class T5Config(Config):
    """Sizes of T5; the defaults are those of the small model."""

    model_type: str = "t5"
    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None
    pad_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    decoder_start_token_id: int | None = None

    def check(self) -> None:
        sizes = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "decoder_layers")
        for name in (*sizes, "num_heads"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need_layers(self.num_layers + self.decoder_layers, "num_layers")
        buckets, far = self.relative_attention_num_buckets, self.relative_attention_max_distance
        self.need(buckets >= 4, "relative_attention_num_buckets", "It is at least 4.")
        self.need(far > buckets // 2, "relative_attention_max_distance", "Beyond buckets.")
        known = (*ACTIVATIONS, *GATED)
        is_known = self.feed_forward_proj in known
        self.need(is_known, "feed_forward_proj", f"Known are: {', '.join(known)}.")

    @property
    def decoder_layers(self) -> int:
        given = self.num_decoder_layers
        return self.num_layers if given is None else given

    @property
    def scales_outputs(self) -> bool:
        """Files of before the setting scale where the embeddings are the head's."""
        given = self.scale_decoder_outputs
        return self.tie_word_embeddings if given is None else given

    @property
    def start(self) -> int:
        given = self.decoder_start_token_id
        return (self.pad_token_id or 0) if given is None else given

    def json(self) -> dict[str, Any]:
        found = super().json()
        found |= {
            "num_decoder_layers": self.decoder_layers,
            "scale_decoder_outputs": self.scales_outputs,
            "decoder_start_token_id": self.start,
            "is_encoder_decoder": True,
        }
        return found


class RelativeBias(Module):
    """Learned biases of distances in buckets: distances (T, S) → (1, heads, T, S)."""

    def __init__(self, config: T5Config, is_decoder: bool):
        shape = (config.relative_attention_num_buckets, config.num_heads)
        std = config.initializer_factor * config.d_model**-0.5
        self.weight = Parameter(shape, init.normal(std=std))
        self.config, self.is_decoder = config, is_decoder

    def forward(self, distances: Tensor, longest: int) -> Tensor:
        every = np.arange(-longest, longest + 1)
        config = self.config
        known = config.relative_attention_num_buckets, config.relative_attention_max_distance
        buckets = t5_buckets(every, *known, not self.is_decoder)
        at = take(as_tensor(buckets), distances + longest, 0)
        return unsqueeze(permute(take(as_tensor(self.weight), at, 0), 2, 0, 1), 0)


class _Attention(Module):
    def __init__(self, config: T5Config, is_decoder: bool, has_bias: bool):
        width, inner = config.d_model, config.num_heads * config.d_kv
        self.heads, factor = config.num_heads, config.initializer_factor
        self.q, self.k, self.v = (Linear(width, inner, bias=False) for _ in range(3))
        self.o = Linear(inner, width, bias=False)
        self.q.weight.init = init.normal(std=factor * (width * config.d_kv) ** -0.5)
        self.k.weight.init = self.v.weight.init = init.normal(std=factor * width**-0.5)
        self.o.weight.init = init.normal(std=factor * inner**-0.5)
        if has_bias:
            self.relative_attention_bias = RelativeBias(config, is_decoder)
        self.dropout = Dropout(config.dropout_rate)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return heads_of(self.k(x), self.heads), heads_of(self.v(x), self.heads)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        q = heads_of(self.q(x), self.heads)
        result: Tensor = self.o(attend(q, k, v, bias, is_causal, self.dropout, 1.0))
        return result


class _Attending(Module):
    """Attention behind a norm; the two kinds have names of their own."""

    def __init__(self, config: T5Config, name: str, is_decoder: bool, has_bias: bool):
        self.attention = _Attention(config, is_decoder, has_bias)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = Dropout(config.dropout_rate)
        self.name = name

    def _parts(self) -> list[tuple[str, Any]]:
        return [(self.name if n == "attention" else n, part) for n, part in super()._parts()]


class _Dense(Module):
    def __init__(self, config: T5Config):
        width, hidden, factor = config.d_model, config.d_ff, config.initializer_factor
        self.is_gated = config.feed_forward_proj in GATED
        self.act = ACTIVATIONS[GATED.get(config.feed_forward_proj, config.feed_forward_proj)]
        names = ("wi_0", "wi_1") if self.is_gated else ("wi",)
        for name in names:
            layer = Linear(width, hidden, bias=False)
            layer.weight.init = init.normal(std=factor * width**-0.5)
            setattr(self, name, layer)
        self.wo = Linear(hidden, width, bias=False)
        self.wo.weight.init = init.normal(std=factor * hidden**-0.5)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self
        hidden = self.act(layers.wi_0(x)) * layers.wi_1(x) if self.is_gated else None
        result: Tensor = self.wo(self.dropout(self.act(layers.wi(x)) if hidden is None else hidden))
        return result


class _Feeding(Module):
    def __init__(self, config: T5Config):
        self.DenseReluDense = _Dense(config)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.DenseReluDense(self.layer_norm(x)))


class _Block(Module):
    def __init__(self, config: T5Config, is_decoder: bool, is_first: bool):
        parts: list[Module] = [_Attending(config, "SelfAttention", is_decoder, is_first)]
        if is_decoder:
            parts.append(_Attending(config, "EncDecAttention", is_decoder, False))
        self.layer = ModuleList([*parts, _Feeding(config)])


class _Stack(Module):
    def __init__(self, config: T5Config, count: int, is_decoder: bool, shared: Embedding):
        self.embed_tokens = shared
        self.block = ModuleList(_Block(config, is_decoder, i == 0) for i in range(count))
        self.final_layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = Dropout(config.dropout_rate)

    def blocks(self) -> Iterator[list[Any]]:
        blocks: Any = self.block
        return (list(block.layer) for block in blocks)

    def position_bias(self, distances: Tensor, longest: int) -> Tensor:
        first: Any = next(self.blocks())[0]
        result: Tensor = first.attention.relative_attention_bias(distances, longest)
        return result


class T5(SourceModel):
    """T5 with its head: tokens (B, S) and decoder's tokens (B, T) → logits (B, T, vocab_size)."""

    architecture = "T5ForConditionalGeneration"
    ignored = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)

    def __init__(self, config: T5Config):
        self.config: T5Config = config
        self.starts = (config.start,)
        self.shared = Embedding(config.vocab_size, config.d_model)
        self.shared.weight.init = init.normal(std=config.initializer_factor)
        self.encoder = _Stack(config, config.num_layers, False, self.shared)
        self.decoder = _Stack(config, config.decoder_layers, True, self.shared)
        self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.shared.weight

    def forward(
        self, tokens: Operand, decoder_tokens: Operand, attention_mask: Operand | None = None
    ) -> Tensor:
        given = check_tokens("T5", tokens, None)
        decoded = check_tokens("T5", decoder_tokens, None)
        bias = padding_bias(attention_mask)
        source = self.source_of(self.encoded(given, bias), bias)
        return self.logits(self.hidden(decoded, Whole(decoded.shape[1]), source))

    def encoded(self, tokens: Tensor, bias: Tensor | None) -> Tensor:
        """(B, S) → (B, S, d_model)."""
        stack, length = self.encoder, tokens.shape[1]
        x: Tensor = stack.dropout(stack.embed_tokens(tokens))
        every = stack.position_bias(Whole(length).distances(), length)
        every = every if bias is None else every + bias
        for own, feed in stack.blocks():
            y = own.layer_norm(x)
            k, v = own.attention.keys(y)
            x = feed(x + own.dropout(own.attention(y, k, v, every)))
        result: Tensor = stack.dropout(stack.final_layer_norm(x))
        return result

    def source_of(self, encoded: Tensor, bias: Tensor | None) -> Source:
        """The keys and values that the decoder's layers look at."""
        pairs = [crossed.attention.keys(encoded) for _, crossed, _ in self.decoder.blocks()]
        return Source(pairs, bias)

    def hidden(self, tokens: Tensor, context: Context, source: Source) -> Tensor:
        stack = self.decoder
        x: Tensor = stack.dropout(stack.embed_tokens(tokens))
        distances = context.distances()
        every = stack.position_bias(distances, sum(distances.shape))
        hidden = context.bias(None)
        is_causal = hidden is None
        every = every if hidden is None else every + hidden
        for i, (own, crossed, feed) in enumerate(stack.blocks()):
            y = own.layer_norm(x)
            k, v = context.seen(i, *own.attention.keys(y))
            x = x + own.dropout(own.attention(y, k, v, every, is_causal))
            k, v = source.pairs[i]
            y = crossed.layer_norm(x)
            x = feed(x + crossed.dropout(crossed.attention(y, k, v, source.bias)))
        result: Tensor = stack.dropout(stack.final_layer_norm(x))
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        scaled = hidden * self.config.d_model**-0.5 if self.config.scales_outputs else hidden
        result: Tensor = self.lm_head(scaled)
        return result

    def key_shapes(self) -> list[KeyShape]:
        return [KeyShape(self.config.num_heads, self.config.d_kv)] * self.config.decoder_layers

    def source_width(self, prompts: Sequence[np.ndarray]) -> int:
        return bucket(max(map(len, prompts)))

    def source_types(self, batch: int, width: int) -> dict[str, TensorType]:
        return {name: TensorType((batch, width), int32) for name in ("tokens", "mask")}

    def source_arrays(self, prompts: Sequence[np.ndarray], width: int) -> dict[str, np.ndarray]:
        tokens, mask = (np.zeros((len(prompts), width), np.int32) for _ in range(2))
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)], mask[i, : len(prompt)] = prompt, 1
        return {"tokens": tokens, "mask": mask}

    def encode_source(self, batch: dict[str, Tensor]) -> Source:
        bias = padding_bias(batch["mask"])
        return self.source_of(self.encoded(batch["tokens"], bias), bias)
