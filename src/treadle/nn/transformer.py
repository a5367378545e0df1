"""Transformer layers, and stacks of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from treadle.base.errors import ArgumentError
from treadle.base.numbers import NOT_NEGATIVE, check_choice, check_number, check_whole
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.activations import gelu, relu
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.attention import MultiheadAttention
from treadle.nn.containers import ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import LayerNorm, Linear
from treadle.nn.module import Module

ACTIVATIONS: dict[str, Callable[[Operand], Tensor]] = {"relu": relu, "gelu": gelu}


class _Layer(Module):
    """What an encoder's and a decoder's layer share."""

    has_memory = False

    def _build(
        self, d_model: int, nhead: int, hidden: int, dropout: float, bias: bool, batch_first: bool
    ) -> None:
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first)
        if self.has_memory:
            self.multihead_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first)
        self.linear1, self.linear2 = Linear(d_model, hidden, bias), Linear(hidden, d_model, bias)
        self.dropout = Dropout(dropout)

    def _choose(self, name: str, activation: str | Callable[[Operand], Tensor], eps: float) -> None:
        check_number(name, "layer_norm_eps", eps, NOT_NEGATIVE)
        if isinstance(activation, str):
            check_choice(name, "activation", activation, tuple(ACTIVATIONS))
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _feed(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.linear1(x)))
        result: Tensor = self.linear2(hidden)
        return result


class TransformerEncoderLayer(_Layer):
    """Self-attention and a feed-forward layer, each with a residual and a norm.

    Shapes: (T, N, d_model) → the same, or (N, T, d_model) with batch_first.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Operand], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
    ):
        self._choose("TransformerEncoderLayer", activation, layer_norm_eps)
        self._build(d_model, nhead, dim_feedforward, dropout, bias, batch_first)
        self.norm1, self.norm2 = (LayerNorm(d_model, layer_norm_eps, bias=bias) for _ in range(2))
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        self.norm_first = norm_first

    def forward(
        self,
        src: Operand,
        src_mask: Operand | None = None,
        src_key_padding_mask: Operand | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x = as_tensor(src)
        given = src_key_padding_mask, False, src_mask, True, is_causal

        def attended(y: Tensor) -> Tensor:
            return self.dropout1(self.self_attn(y, y, y, *given)[0])

        def fed(y: Tensor) -> Tensor:
            return self.dropout2(self._feed(y))

        if self.norm_first:
            x = x + attended(self.norm1(x))
            return x + fed(self.norm2(x))
        x = self.norm1(x + attended(x))
        result: Tensor = self.norm2(x + fed(x))
        return result


class TransformerDecoderLayer(_Layer):
    """Self-attention, attention to a memory, and a feed-forward layer.

    Shapes: tgt (T, N, d_model), memory (S, N, d_model) → (T, N, d_model); N comes first with
    batch_first.
    """

    has_memory = True

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Operand], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
    ):
        self._choose("TransformerDecoderLayer", activation, layer_norm_eps)
        self._build(d_model, nhead, dim_feedforward, dropout, bias, batch_first)
        norms = (LayerNorm(d_model, layer_norm_eps, bias=bias) for _ in range(3))
        self.norm1, self.norm2, self.norm3 = norms
        self.dropout1, self.dropout2, self.dropout3 = (Dropout(dropout) for _ in range(3))
        self.norm_first = norm_first

    def forward(
        self,
        tgt: Operand,
        memory: Operand,
        tgt_mask: Operand | None = None,
        memory_mask: Operand | None = None,
        tgt_key_padding_mask: Operand | None = None,
        memory_key_padding_mask: Operand | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        x, kept = as_tensor(tgt), as_tensor(memory)
        own = tgt_key_padding_mask, False, tgt_mask, True, tgt_is_causal
        other = memory_key_padding_mask, False, memory_mask, True, memory_is_causal

        def attended(y: Tensor) -> Tensor:
            return self.dropout1(self.self_attn(y, y, y, *own)[0])

        def crossed(y: Tensor) -> Tensor:
            return self.dropout2(self.multihead_attn(y, kept, kept, *other)[0])

        def fed(y: Tensor) -> Tensor:
            return self.dropout3(self._feed(y))

        if self.norm_first:
            x = x + attended(self.norm1(x))
            x = x + crossed(self.norm2(x))
            return x + fed(self.norm3(x))
        x = self.norm1(x + attended(x))
        x = self.norm2(x + crossed(x))
        result: Tensor = self.norm3(x + fed(x))
        return result


class TransformerEncoder(Module):
    """A number of encoder layers, copies of one or made by a function, and a norm at the end.

    Shapes: (T, N, d_model) → the same, or (N, T, d_model) with batch_first.
    """

    def __init__(
        self,
        layer: Module | Callable[[], Module],
        num_layers: int,
        norm: Module | None = None,
    ):
        check_whole("TransformerEncoder", "num_layers", num_layers)
        self.layers = ModuleList(_made("TransformerEncoder", layer) for _ in range(num_layers))
        self.norm = norm

    def forward(
        self,
        src: Operand,
        mask: Operand | None = None,
        src_key_padding_mask: Operand | None = None,
        is_causal: bool | None = None,
        **more: object,
    ) -> Tensor:
        """`mask` is the `src_mask` of each layer. Layers get those that are given, and `more`."""
        if mask is not None and "src_mask" in more:
            raise ArgumentError(
                "TransformerEncoder", "mask and src_mask are both given", "Pass mask alone."
            )
        named = {
            "src_mask": mask,
            "src_key_padding_mask": src_key_padding_mask,
            "is_causal": is_causal,
        }
        given = {**_given(named), **more}
        x = as_tensor(src)
        for layer in self.layers:
            x = layer(x, **given)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(Module):
    """A number of decoder layers, copies of one or made by a function, and a norm at the end.

    Shapes: tgt (T, N, d_model), memory (S, N, d_model) → (T, N, d_model); N comes first with
    batch_first.
    """

    def __init__(
        self,
        layer: Module | Callable[[], Module],
        num_layers: int,
        norm: Module | None = None,
    ):
        check_whole("TransformerDecoder", "num_layers", num_layers)
        self.layers = ModuleList(_made("TransformerDecoder", layer) for _ in range(num_layers))
        self.norm = norm

    def forward(
        self,
        tgt: Operand,
        memory: Operand,
        tgt_mask: Operand | None = None,
        memory_mask: Operand | None = None,
        tgt_key_padding_mask: Operand | None = None,
        memory_key_padding_mask: Operand | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool | None = None,
        **more: object,
    ) -> Tensor:
        """Layers get those of the masks that are given, and `more`."""
        named = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
            "tgt_is_causal": tgt_is_causal,
            "memory_is_causal": memory_is_causal,
        }
        given = {**_given(named), **more}
        x = as_tensor(tgt)
        for layer in self.layers:
            x = layer(x, memory, **given)
        return x if self.norm is None else self.norm(x)


def _given(named: Mapping[str, object]) -> dict[str, object]:
    """Those that are not None: a layer of one's own need not take the others."""
    return {name: value for name, value in named.items() if value is not None}


def _made(name: str, layer: Module | Callable[[], Module]) -> Module:
    """A layer with parameters of its own: a copy of a description, or what the function makes."""
    if isinstance(layer, Module):
        return copy.deepcopy(layer)
    if not callable(layer):
        raise ArgumentError(
            name,
            f"{type(layer).__name__} is no layer",
            "Pass one, or a function that makes one: nn.TransformerEncoderLayer(512, 8).",
        )
    return layer()
