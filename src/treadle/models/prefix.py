"""Prefix tuning: trained keys and values that every layer sees before all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_whole
from treadle.frontend.coerce import broadcast_to, cast
from treadle.frontend.functions.shaping import concat, permute, reshape, zeros
from treadle.frontend.tensor import Tensor
from treadle.models.context import Context
from treadle.models.decoding import KeyShape
from treadle.nn import init
from treadle.nn.lora import Extra, freeze
from treadle.nn.module import Module, Parameter

PREFIX = "prefix_keys.embeddings"  # what the parameter is called


class Prefix(Extra):
    """Keys and values of some positions, for all layers: (length, layers · 2 · heads · width)."""

    def __init__(self, length: int, shapes: list[KeyShape]):
        self.length, self.shapes = length, shapes
        widths = [s.heads * s.width for s in shapes]
        self.starts = [2 * sum(widths[:i]) for i in range(len(widths))]
        self.embeddings = Parameter((length, 2 * sum(widths)), init.normal())

    def of(self, layer: int, batch: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, (B, G, length, D) each."""
        shape, start = self.shapes[layer], self.starts[layer]
        width = shape.heads * shape.width
        both = self.embeddings.tensor()[:, start : start + 2 * width]
        found = permute(reshape(both, (self.length, 2, shape.heads, shape.width)), 1, 2, 0, 3)
        whole = (batch, shape.heads, self.length, shape.width)
        return broadcast_to(found[0:1], whole), broadcast_to(found[1:2], whole)


@dataclass(frozen=True)
class Prefixed:
    """A context behind a prefix, which all of its tokens see."""

    inner: Context
    before: Prefix

    def positions(self) -> Tensor:
        return self.inner.positions() + self.before.length

    def seen(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.seen(layer, k, v)
        own = self.before.of(layer, keys.shape[0])
        ahead = (cast(part, keys.dtype) for part in own)
        return tuple(concat([a, b], 2) for a, b in zip(ahead, (keys, values)))  # type: ignore[return-value]

    def bias(self, window: int | None) -> Tensor | None:
        return self.hiding(window)

    def hiding(self, window: int | None) -> Tensor:
        if window is not None:
            cause = f"a layer sees a window of {window} positions, which leaves the prefix behind"
            raise ArgumentError("prefix_tuning", cause, "Use a model without sliding windows.")
        bias = self.inner.hiding(window)
        return concat([zeros((*bias.shape[:-1], self.before.length), bias.dtype), bias], -1)

    def distances(self) -> Tensor:
        raise ArgumentError("prefix_tuning", "keys have distances here", "Use another model.")

    def given(self) -> Tensor | None:
        return self.inner.given()

    def carried(self, layer: int) -> list[Tensor] | None:
        return self.inner.carried(layer)

    def carry(self, layer: int, values: Sequence[Tensor]) -> None:
        self.inner.carry(layer, values)


def prefix_of(model: object) -> Prefix | None:
    """The prefix of a model, if it has one."""
    found = vars(model).get("prefix_keys") if isinstance(model, Module) else None
    return found if isinstance(found, Prefix) else None


def prefix_tuning(model: Any, length: int = 20) -> Any:
    """The model with `length` trained keys and values before all tokens of each layer, else frozen.

    Positions of tokens begin behind them, as in `peft`. The parameter is
    "prefix_keys.embeddings".
    """
    check_whole("prefix_tuning", "length", length)
    if not getattr(model, "takes_prefix", False):
        cause = f"{type(model).__name__} takes no prefix"
        raise ArgumentError("prefix_tuning", cause, "GPT2 and Llama of td.models do.")
    if prefix_of(model) is not None:
        raise ArgumentError("prefix_tuning", "the model has a prefix already", "Load it anew.")
    _check_room(model, length)
    vars(model)["prefix_keys"] = Prefix(length, model.key_shapes())
    freeze(model)
    model._restructured()
    return model


def _check_room(model: Any, length: int) -> None:
    longest = model.longest
    if longest is not None and length >= longest:
        cause = f"{length} keys before {longest} positions"
        raise ArgumentError("prefix_tuning", cause, "Leave room for tokens.")
