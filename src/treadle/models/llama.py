"""Llama, Mistral, Mixtral, Qwen2 and Qwen3: one module, told apart by their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.causal import CausalModel, check_tokens
from treadle.models.config import Config, Json
from treadle.models.context import Context, Whole, attend, heads_of
from treadle.models.decoding import KeyShape
from treadle.models.experts import SparseMixture
from treadle.models.model import ACTIVATIONS, check_activation
from treadle.models.positions import Rotation, rotary_rates
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Embedding, Linear, RMSNorm
from treadle.nn.module import Module

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DEFAULTS: dict[str, dict[str, Any]] = {  # of `transformers`, where they are not Llama's
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "mixtral": {"num_local_experts": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2": {"vocab_size": 151936},
    "qwen3": {"vocab_size": 151936, "head_dim": 128},
}


@dataclass(frozen=True)
class LlamaConfig(Config):
    """Sizes and choices of a decoder of this family; `model_type` names the member."""

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    num_local_experts: int = 0
    num_experts_per_tok: int = 2
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @classmethod
    def read(cls, given: Json) -> Self:
        """Rotations are told in one object by newer files, in two keys by older ones."""
        kind = given.get("model_type", "llama")
        found = {**DEFAULTS.get(str(kind), {}), **given}
        rope = found.get("rope_parameters")
        if isinstance(rope, Mapping):
            rest = {k: v for k, v in rope.items() if k != "rope_theta"}
            found["rope_theta"] = rope.get("rope_theta", found.get("rope_theta", 10000.0))
            found["rope_scaling"] = rest if rest.get("rope_type", "default") != "default" else None
        return super().read(found)

    def check(self) -> None:
        self.need(self.model_type in ARCHITECTURES, "model_type", f"Known: {list(ARCHITECTURES)}.")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        for name in (*sizes, "num_attention_heads", "kv_heads", "head_width"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need_divisor("num_attention_heads", "kv_heads")
        self.need(self.head_width % 2 == 0, "head_width", "Halves of a head are rotated: even.")
        blocks = self.num_hidden_layers * max(1, self.num_local_experts)
        self.need_layers(blocks, "num_hidden_layers")
        check_activation(self, "hidden_act")
        types = self.layer_types
        is_known = types is None or {"full_attention", "sliding_attention"} >= set(types)
        self.need(is_known, "layer_types", "Each is full_attention or sliding_attention.")
        fits = types is None or len(types) == self.num_hidden_layers
        self.need(fits, "layer_types", "There is one for each layer.")
        self.rates()  # refuses rotations that are not known

    @property
    def kv_heads(self) -> int:
        given = self.num_key_value_heads
        return self.num_attention_heads if given is None else given

    @property
    def head_width(self) -> int:
        return (
            self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim
        )

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2" or self.attention_bias

    @property
    def has_qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    def rates(self) -> tuple[Any, float]:
        return rotary_rates(self.head_width, self.rope_theta, self.rope_scaling or {})

    def window(self, layer: int) -> int | None:
        """How many positions a layer sees, its own among them; None for all."""
        if self.layer_types is not None:
            return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None
        if self.model_type in ("mistral", "mixtral"):
            return self.sliding_window
        is_late = self.use_sliding_window and layer >= self.max_window_layers
        return self.sliding_window if is_late else None

    def json(self) -> dict[str, Any]:
        found = super().json()
        found |= {"head_dim": self.head_width, "num_key_value_heads": self.kv_heads}
        if self.layer_types is None:
            del found["layer_types"]  # the reference derives them
        if not self.num_local_experts:
            del found["num_local_experts"], found["num_experts_per_tok"]
        found["rope_parameters"] = {
            "rope_type": "default",
            **(found["rope_scaling"] or {}),
            "rope_theta": self.rope_theta,
        }
        return found


class _Attention(Module):
    def __init__(self, config: LlamaConfig, layer: int):
        width, inner = config.hidden_size, config.num_attention_heads * config.head_width
        narrow = config.kv_heads * config.head_width
        self.layer, self.heads, self.groups = layer, config.num_attention_heads, config.kv_heads
        self.window = config.window(layer)
        self.q_proj = Linear(width, inner, config.qkv_bias)
        self.k_proj = Linear(width, narrow, config.qkv_bias)
        self.v_proj = Linear(width, narrow, config.qkv_bias)
        self.o_proj = Linear(inner, width, config.attention_bias)
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_width, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_width, config.rms_norm_eps)
        self.has_qk_norm = config.has_qk_norm
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, x: Tensor, context: Context, rotated: Rotation) -> Tensor:
        q, k = heads_of(self.q_proj(x), self.heads), heads_of(self.k_proj(x), self.groups)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = context.seen(self.layer, rotated(k), heads_of(self.v_proj(x), self.groups))
        bias = context.bias(self.window)
        mixed = attend(rotated(q), k, v, bias, bias is None, self.dropout)
        result: Tensor = self.o_proj(mixed)
        return result


class _MLP(Module):
    def __init__(self, config: LlamaConfig):
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, hidden, bias)
        self.up_proj = Linear(width, hidden, bias)
        self.down_proj = Linear(hidden, width, bias)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(Module):
    def __init__(self, config: LlamaConfig, layer: int):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, layer)
        self.is_sparse = config.num_local_experts > 0
        if config.num_local_experts:
            self.block_sparse_moe = SparseMixture(
                width,
                config.intermediate_size,
                config.num_local_experts,
                config.num_experts_per_tok,
                ACTIVATIONS[config.hidden_act],
            )
        else:
            self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def forward(self, x: Tensor, context: Context, rotated: Rotation) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotated)
        feed = self.block_sparse_moe if self.is_sparse else self.mlp
        return x + feed(self.post_attention_layernorm(x))


class _Body(Module):
    def __init__(self, config: LlamaConfig):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(CausalModel):
    """A decoder of Llama's family with its head: tokens (B, T) → logits (B, T, vocab_size)."""

    prefix = "model"
    takes_prefix = True
    ignored = (r".*rotary_emb\.inv_freq",)

    def __init__(self, config: LlamaConfig):
        self.config: LlamaConfig = config
        self.architecture = ARCHITECTURES[config.model_type]
        self.model = _Body(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        for _, parameter in self.named_parameters():
            if parameter.ndim > 1:
                parameter.init = init.normal(std=config.initializer_range)
            elif parameter.init is not init.ones:
                parameter.init = init.zeros
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Operand, attention_mask: Operand | None = None) -> Tensor:
        given = check_tokens(type(self).__name__, tokens, None)
        mask = None if attention_mask is None else as_tensor(attention_mask)
        return self.logits(self.hidden(given, Whole(given.shape[1], mask)))

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        x: Tensor = self.model.embed_tokens(tokens)
        seen = self.prefixed(context)
        rotated = Rotation.of(seen.positions(), *self.config.rates())
        for layer in self.model.layers:
            x = layer(x, seen, rotated)
        result: Tensor = self.model.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.lm_head(hidden)
        return result

    def key_shapes(self) -> list[KeyShape]:
        config = self.config
        return [KeyShape(config.kv_heads, config.head_width)] * config.num_hidden_layers


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}


def _preset(kind: str, sizes: tuple[int, ...], theta: float, **rest: Any) -> dict[str, Any]:
    """Vocabulary, width, hidden width, layers, heads and heads of keys."""
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "num_key_value_heads"]
    return {"model_type": kind, **dict(zip(names, sizes)), "rope_theta": theta, **rest}


# As their authors published them.
PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _preset(
        "llama", (49152, 576, 1536, 30, 9, 3), 1e5, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "smollm2-360m": _preset(
        "llama", (49152, 960, 2560, 32, 15, 5), 1e5, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "smollm2-1.7b": _preset(
        "llama", (49152, 2048, 8192, 24, 32, 32), 1.3e5, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "llama-3.2-1b": _preset(
        "llama",
        (128256, 2048, 8192, 16, 32, 8),
        5e5,
        rms_norm_eps=1e-5,
        rope_scaling={**_LLAMA3, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _preset(
        "llama",
        (128256, 4096, 14336, 32, 32, 8),
        5e5,
        rms_norm_eps=1e-5,
        rope_scaling={**_LLAMA3, "factor": 8.0},
    ),
    "mistral-7b": _preset(
        "mistral", (32000, 4096, 14336, 32, 32, 8), 1e4, rms_norm_eps=1e-5, sliding_window=4096
    ),
    "mixtral-8x7b": _preset(
        "mixtral", (32000, 4096, 14336, 32, 32, 8), 1e6, rms_norm_eps=1e-5, num_local_experts=8
    ),
    "qwen2.5-0.5b": _preset("qwen2", (151936, 896, 4864, 24, 14, 2), 1e6, tie_word_embeddings=True),
    "qwen3-0.6b": _preset(
        "qwen3", (151936, 1024, 3072, 28, 16, 8), 1e6, head_dim=128, tie_word_embeddings=True
    ),
}


def llama_config(name: str, **changes: Any) -> LlamaConfig:
    """The configuration of a published model, with changes."""
    if name not in PRESETS:
        raise ArgumentError("llama", f"name = {name!r}", f"It is one of {', '.join(PRESETS)}.")
    return LlamaConfig(**{**PRESETS[name], **changes})


def llama(name: str, **changes: Any) -> Llama:
    """A model of the family with first values: `models.llama("smollm2-135m")`."""
    return Llama(llama_config(name, **changes))
