"""GPT-2, with the names of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import linear
from treadle.frontend.functions.shaping import chunk
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.causal import CausalModel, check_tokens
from treadle.models.config import Config
from treadle.models.context import Context, Whole, attend, heads_of
from treadle.models.decoding import KeyShape
from treadle.models.model import ACTIVATIONS, check_activation
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Embedding, LayerNorm, Linear
from treadle.nn.module import Module, Parameter


@dataclass(frozen=True)
class GPT2Config(Config):
    """GPT-2's sizes; the defaults are those of the small model."""

    model_type: str = "gpt2"
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    pad_token_id: int | None = None

    def check(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need_divisor("n_embd", "n_head")
        self.need_layers(self.n_layer, "n_layer")
        check_activation(self, "activation_function")
        self.need(not self.add_cross_attention, "add_cross_attention", "Only decoders are known.")


SIZES: dict[str, tuple[int, int, int]] = {  # layers, heads, width
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (36, 20, 1280),
    "xl": (48, 25, 1600),
}


def gpt2_config(size: str = "small", **changes: object) -> GPT2Config:
    """The configuration of one of the four sizes, with changes."""
    if size not in SIZES:
        raise ArgumentError("gpt2", f"size = {size!r}", f"It is one of {', '.join(SIZES)}.")
    layers, heads, width = SIZES[size]
    given = {"n_layer": layers, "n_head": heads, "n_embd": width, **changes}
    return GPT2Config(**given)  # type: ignore[arg-type]


class Projection(Linear):
    """x W + b, with a weight (in, out): the Conv1D of `transformers`."""

    fan_in_fan_out = True

    def __init__(self, inputs: int, outputs: int, std: float):
        self.in_features, self.out_features = inputs, outputs
        self.weight = Parameter((inputs, outputs), init.normal(std=std))
        self.bias = Parameter((outputs,), init.zeros)

    def forward(self, x: Operand) -> Tensor:
        product = linear.matmul(x, self.weight)
        return product if self.bias is None else product + self.bias


class _Attention(Module):
    def __init__(self, config: GPT2Config, layer: int, std_out: float):
        width = config.n_embd
        self.layer, self.heads = layer, config.n_head
        self.c_attn = Projection(width, 3 * width, config.initializer_range)
        self.c_proj = Projection(width, width, std_out)
        self.attn_dropout, self.resid_dropout = (
            Dropout(config.attn_pdrop),
            Dropout(config.resid_pdrop),
        )
        scale = (width // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        self.scale = scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale

    def forward(self, x: Tensor, context: Context, bias: Tensor | None) -> Tensor:
        q, k, v = (heads_of(part, self.heads) for part in chunk(self.c_attn(x), 3, -1))
        k, v = context.seen(self.layer, k, v)
        mixed = attend(q, k, v, bias, bias is None, self.attn_dropout, self.scale)
        return self.resid_dropout(self.c_proj(mixed))


class _MLP(Module):
    def __init__(self, config: GPT2Config, std_out: float):
        hidden = 4 * config.n_embd if config.n_inner is None else config.n_inner
        self.c_fc = Projection(config.n_embd, hidden, config.initializer_range)
        self.c_proj = Projection(hidden, config.n_embd, std_out)
        self.act, self.dropout = (
            ACTIVATIONS[config.activation_function],
            Dropout(config.resid_pdrop),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class _Block(Module):
    def __init__(self, config: GPT2Config, layer: int):
        std_out = config.initializer_range / (2 * config.n_layer) ** 0.5
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = _Attention(config, layer, std_out)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = _MLP(config, std_out)

    def forward(self, x: Tensor, context: Context, bias: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), context, bias)
        return x + self.mlp(self.ln_2(x))


class _Transformer(Module):
    def __init__(self, config: GPT2Config):
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd)
        for table in (self.wte, self.wpe):
            table.weight.init = init.normal(std=config.initializer_range)
        self.drop = Dropout(config.embd_pdrop)
        self.h = ModuleList(_Block(config, i) for i in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(context.positions()))
        bias = context.bias(None)
        for block in self.h:
            x = block(x, context, bias)
        result: Tensor = self.ln_f(x)
        return result


class _Head(Module):
    def __init__(self, weight: Parameter):
        self.weight = weight

    def forward(self, hidden: Operand) -> Tensor:
        return linear.linear(hidden, self.weight)


class GPT2(CausalModel):
    """GPT-2 with its language-model head: tokens (B, T) → logits (B, T, vocab_size)."""

    architecture = "GPT2LMHeadModel"
    prefix = "transformer"
    takes_prefix = True
    ignored = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",)  # masks, in older files

    def __init__(self, config: GPT2Config):
        self.config: GPT2Config = config
        self.transformer = _Transformer(config)
        shape = (config.vocab_size, config.n_embd)
        own = Parameter(shape, init.normal(std=config.initializer_range))
        self.lm_head = _Head(self.transformer.wte.weight if config.tie_word_embeddings else own)

    def forward(self, tokens: Operand, attention_mask: Operand | None = None) -> Tensor:
        given = check_tokens("GPT2", tokens, self.longest)
        mask = None if attention_mask is None else as_tensor(attention_mask)
        return self.logits(self.hidden(given, Whole(given.shape[1], mask)))

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        result: Tensor = self.transformer(tokens, self.prefixed(context))
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.lm_head(hidden)
        return result

    @property
    def longest(self) -> int | None:
        before = 0 if self.prefix_keys is None else self.prefix_keys.length
        return self.config.n_positions - before

    def key_shapes(self) -> list[KeyShape]:
        width = self.config.n_embd // self.config.n_head
        return [KeyShape(self.config.n_head, width)] * self.config.n_layer


def gpt2(size: str = "small", **changes: object) -> GPT2:
    """GPT-2 with first values: `models.gpt2("medium", n_positions=512)`."""
    return GPT2(gpt2_config(size, **changes))
