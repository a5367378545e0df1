"""Bottleneck adapters: two small layers behind a frozen one, whose result they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.base.numbers import FACTOR, check_choice, check_number, check_whole
from treadle.frontend.functions.activations import gelu, relu, silu
from treadle.frontend.functions.arithmetic import tanh
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn import init
from treadle.nn.layers import Embedding, Linear
from treadle.nn.lora import Adapted, Factor, freeze, has_adapter
from treadle.nn.module import Module
from treadle.nn.targets import Targets, put_in_place, targeted

ACTIVATIONS: dict[str, Callable[[Operand], Tensor]] = {
    "gelu": gelu,
    "relu": relu,
    "silu": silu,
    "tanh": tanh,
}


class Bottleneck(Adapted):
    """A module and, behind it, y + scale · up(activation(down(y))); up begins as zeros."""

    def __init__(self, base: Module, width: int, size: int, activation: str, scale: float):
        self.base = base
        self.size, self.activation, self.scale = size, activation, scale
        self.adapter_down = Factor(width, size)
        self.adapter_up = Factor(size, width)
        self.adapter_up.weight.init = init.zeros
        if self.adapter_up.bias is not None:
            self.adapter_up.bias.init = init.zeros

    def added(self) -> list[tuple[str, Any]]:
        return [(name, vars(self)[name]) for name in ("adapter_down", "adapter_up")]

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        result: Tensor = self.base(*arguments, **keywords)
        narrow = ACTIVATIONS[self.activation](self.adapter_down(result))
        return result + self.adapter_up(narrow) * self.scale


def bottleneck(
    model: Module,
    size: int = 64,
    targets: Targets = "*",
    activation: str = "relu",
    scale: float = 1.0,
) -> Module:
    """The model with bottleneck adapters behind linear layers or embeddings, and all else frozen.

    `targets` are paths as those of `nn.lora`: behind the last layer of a block's branches is where
    they are put as a rule. The activation is "relu", "gelu", "silu" or "tanh". Parameters of the
    model keep their names; new ones are "…adapter_down.weight", "…adapter_up.weight" and their
    biases.
    """
    check_whole("bottleneck", "size", size)
    check_choice("bottleneck", "activation", activation, tuple(ACTIVATIONS))
    factor = check_number("bottleneck", "scale", scale, FACTOR)
    kinds = "linear layers and embeddings"
    found = targeted(
        "bottleneck", model, targets, lambda part: width_of(part) is not None, kinds, has_adapter
    )
    parts = {
        id(part): Bottleneck(part, width_of(part) or 0, size, activation, factor)
        for part in found.values()
    }
    put_in_place(model, parts)
    freeze(model)
    model._restructured()
    return model


def bottlenecks(model: Module) -> dict[str, Bottleneck]:
    """The model's bottleneck adapters, by the path of what is before them."""
    return {n: part for n, part in model.named_modules() if isinstance(part, Bottleneck)}


def width_of(part: Module) -> int | None:
    """How wide a module's result is, if an adapter can be put behind it."""
    if isinstance(part, Linear) and not isinstance(part, Factor):
        return part.out_features
    return part.weight.shape[1] if isinstance(part, Embedding) else None
