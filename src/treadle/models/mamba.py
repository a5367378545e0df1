"""Mamba, with the names of `transformers`: selective state spaces that decode from a state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.control import scan
from treadle.frontend.functions import linear, reductions
from treadle.frontend.functions.activations import silu, softplus
from treadle.frontend.functions.arithmetic import exp
from treadle.frontend.functions.shaping import chunk, concat, split, transpose, unsqueeze, zeros
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.causal import CausalModel, check_tokens
from treadle.models.config import Config
from treadle.models.context import Context, Whole
from treadle.models.decoding import RecurrentShape
from treadle.models.model import ACTIVATIONS, check_activation
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.layers import Embedding, Linear, RMSNorm
from treadle.nn.module import Module, Parameter


@dataclass(frozen=True)
class MambaConfig(Config):
    """Mamba's sizes; the defaults are those of the model with 130 million parameters."""

    model_type: str = "mamba"
    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 24
    layer_norm_epsilon: float = 1e-5
    expand: int = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    initializer_range: float = 0.1
    time_step_rank: int | str = "auto"
    time_step_scale: float = 1.0
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 0
    pad_token_id: int | None = 0

    def check(self) -> None:
        is_rank = self.time_step_rank == "auto" or isinstance(self.time_step_rank, int)
        self.need(is_rank, "time_step_rank", 'It is a whole number or "auto".')
        sizes = ("vocab_size", "hidden_size", "state_size", "num_hidden_layers", "expand")
        for name in (*sizes, "conv_kernel"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need(self.rank >= 1, "time_step_rank", "It is at least 1.")
        self.need(self.conv_kernel <= 64, "conv_kernel", "It is at most 64.")
        self.need_layers(self.num_hidden_layers, "num_hidden_layers")
        is_range = 0 < self.time_step_min <= self.time_step_max
        self.need(is_range, "time_step_min", "It is positive and at most time_step_max.")
        check_activation(self, "hidden_act")

    @property
    def width(self) -> int:
        """Channels of a mixer."""
        return self.expand * self.hidden_size

    @property
    def rank(self) -> int:
        given = self.time_step_rank
        return given if isinstance(given, int) else math.ceil(self.hidden_size / 16)

    def json(self) -> dict[str, Any]:
        return {**super().json(), "time_step_rank": self.rank, "intermediate_size": self.width}


SIZES: dict[str, tuple[int, int]] = {  # layers, width
    "130m": (24, 768),
    "370m": (48, 1024),
    "790m": (48, 1536),
    "1.4b": (48, 2048),
    "2.8b": (64, 2560),
}


def mamba_config(size: str = "130m", **changes: Any) -> MambaConfig:
    """The published configuration of a size, with changes."""
    if size not in SIZES:
        known = ", ".join(SIZES)
        raise ArgumentError("mamba", f"there is no size {size!r}", f"There are: {known}.")
    layers, width = SIZES[size]
    given: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, **changes}
    return MambaConfig(**given)


def _decays(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """log 1, log 2, … for each channel: the real part of S4D's values."""
    return np.broadcast_to(np.log(np.arange(1, shape[1] + 1)), shape).astype(np.float32)


def _step_biases(config: MambaConfig) -> init.Init:
    """What softplus takes to steps that are even in their logarithms."""

    def make(shape: Shape, rng: np.random.Generator) -> np.ndarray:
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        step = np.exp(rng.uniform(low, high, shape)).clip(config.time_step_floor)
        return (step + np.log(-np.expm1(-step))).astype(np.float32)

    return make


class _CausalConv(Module):
    """Each channel's last few positions, weighted: (B, K − 1 + T, C) → (B, T, C)."""

    def __init__(self, width: int, kernel: int, has_bias: bool):
        self.weight = Parameter((width, 1, kernel), init.uniform(-(kernel**-0.5), kernel**-0.5))
        self.bias = Parameter((width,), init.zeros) if has_bias else None

    def forward(self, window: Tensor) -> Tensor:
        weight = as_tensor(self.weight)
        kernel = weight.shape[2]
        length = window.shape[1] - kernel + 1
        parts = [window[:, k : k + length] * weight[:, 0, k] for k in range(kernel)]
        total = sum(parts[1:], parts[0])
        return total if self.bias is None else total + self.bias


class _Mixer(Module):
    def __init__(self, config: MambaConfig, layer: int):
        width, states, rank = config.width, config.state_size, config.rank
        self.config, self.layer, self.act = config, layer, ACTIVATIONS[config.hidden_act]
        self.in_proj = Linear(config.hidden_size, 2 * width, bias=config.use_bias)
        self.conv1d = _CausalConv(width, config.conv_kernel, config.use_conv_bias)
        self.x_proj = Linear(width, rank + 2 * states, bias=False)
        self.dt_proj = Linear(rank, width)
        self.A_log, self.D = Parameter((width, states), _decays), Parameter((width,), init.ones)
        self.out_proj = Linear(width, config.hidden_size, bias=config.use_bias)
        std = init.normal(std=config.initializer_range)
        self.in_proj.weight.init = self.x_proj.weight.init = std
        reach = rank**-0.5 * config.time_step_scale
        self.dt_proj.weight.init = init.uniform(-reach, reach)
        assert self.dt_proj.bias is not None
        self.dt_proj.bias.init = _step_biases(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(B, T, hidden_size) → the same."""
        given = context.given()
        inner, gate = chunk(self.in_proj(x), 2, -1)  # (B, T, C) each
        inner = _masked(inner, given)  # behind in_proj, whose bias would turn padding into values
        before, state = self._carried(context, inner)
        window = concat([before, inner], 1)
        u = _masked(self.act(self.conv1d(window)), given)
        y, state = self._selected(u, state)
        context.carry(self.layer, [window[:, inner.shape[1] :], state])
        result: Tensor = self.out_proj((y + u * self.D) * silu(gate))
        return result

    def _carried(self, context: Context, inner: Tensor) -> list[Tensor]:
        """The last positions before these (B, K − 1, C), and the state (B, C, N), float32."""
        found = context.carried(self.layer)
        if found is None:
            found = [zeros((inner.shape[0], *shape)) for shape in self.shape().shapes]
        before, state = found
        return [cast(before, inner.dtype), cast(state, float32)]

    def _selected(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """hₜ = exp(Δₜ A) hₜ₋₁ + Δₜ Bₜ uₜ and yₜ = Cₜ hₜ, for u (B, T, C), in float32."""
        config = self.config
        sizes = [config.rank, config.state_size, config.state_size]
        step, b, c = split(self.x_proj(u), sizes, -1)
        delta = softplus(self.dt_proj(step))
        decay = -exp(cast(as_tensor(self.A_log), float32))

        def move(h: Tensor, row: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            delta_t, u_t, b_t, c_t = row  # (B, C), (B, C), (B, N), (B, N)
            d = unsqueeze(delta_t, -1)
            h = exp(d * decay) * h + d * unsqueeze(u_t, -1) * unsqueeze(b_t, 1)
            return h, reductions.sum(h * unsqueeze(c_t, 1), -1)

        rows = [cast(row, float32) for row in (delta, u, b, c)]
        if u.shape[1] == 1:  # one token after another: no loop
            state, y = move(state, tuple(row[:, 0] for row in rows))
            return unsqueeze(y, 1), state
        state, ys = scan(move, state, tuple(transpose(row, 0, 1) for row in rows))
        return transpose(ys, 0, 1), state

    def shape(self) -> RecurrentShape:
        config = self.config
        last = (config.conv_kernel - 1, config.width)
        return RecurrentShape((last, (config.width, config.state_size)))


def _masked(x: Tensor, given: Tensor | None) -> Tensor:
    return x if given is None else x * unsqueeze(cast(given, x.dtype), -1)


class _Block(Module):
    def __init__(self, config: MambaConfig, layer: int):
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = _Mixer(config, layer)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x + self.mixer(self.norm(x), context)


class _Backbone(Module):
    def __init__(self, config: MambaConfig):
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.embeddings.weight.init = init.normal(std=config.initializer_range)
        self.layers = ModuleList(_Block(config, i) for i in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x = self.embeddings(tokens)
        for block in self.layers:
            x = block(x, context)
        result: Tensor = self.norm_f(x)
        return result


class Mamba(CausalModel):
    """Mamba with its language-model head: tokens (B, T) → logits (B, T, vocab_size).

    What generation keeps of earlier tokens is a state of each layer, whatever their number.
    """

    architecture = "MambaForCausalLM"
    prefix = "backbone"
    renamed = ((r"(.*)embedding\.weight", r"\1embeddings.weight"),)

    def __init__(self, config: MambaConfig):
        self.config: MambaConfig = config
        self.backbone = _Backbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.backbone.embeddings.weight

    def forward(self, tokens: Operand, attention_mask: Operand | None = None) -> Tensor:
        given = check_tokens("Mamba", tokens, None)
        mask = None if attention_mask is None else as_tensor(attention_mask)
        return self.logits(self.hidden(given, Whole(given.shape[1], mask)))

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        result: Tensor = self.backbone(tokens, context)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return linear.linear(hidden, self.lm_head.weight)

    def key_shapes(self) -> list[RecurrentShape]:
        blocks: Any = self.backbone.layers
        return [block.mixer.shape() for block in blocks]


def mamba(size: str = "130m", **changes: Any) -> Mamba:
    """Mamba with first values: `models.mamba("370m")`."""
    return Mamba(mamba_config(size, **changes))
