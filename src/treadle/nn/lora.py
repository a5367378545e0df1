"""Low-rank adapters: a frozen linear layer and a small trained matmul beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FACTOR, check_number, check_whole
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn import init
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Linear
from treadle.nn.module import Module, Parameter, held
from treadle.nn.targets import Targets, put_in_place, targeted


class Adapted(Module):
    """A module in the place of another, `base`, whose parameters keep their names.

    What is beside them is the adapter's.
    """

    base: Module

    def added(self) -> list[tuple[str, Any]]:
        """What the adapter has, by name."""
        raise NotImplementedError(f"{type(self).__name__} adds nothing")

    def _parts(self) -> list[tuple[str, Any]]:
        return [*self.base._parts(), *self.added()]


class Extra(Module):
    """A part that a transform added: it is trained while all else is frozen."""


class Factor(Extra, Linear):
    """A linear layer of an adapter."""


class LoRA(Adapted):
    """A linear layer and a matmul of low rank: W x + scale · B A x; A (r, in) and B (out, r).

    Once merged, B A is in W, and what is beside it is neither computed nor listed.
    """

    def __init__(self, base: Linear, r: int, alpha: float, dropout: float, rslora: bool):
        self.base: Linear = base
        self.r, self.alpha, self.rslora = r, alpha, rslora
        self.scale = alpha / (math.sqrt(r) if rslora else r)
        self.lora_dropout = Dropout(dropout)
        self.lora_A = Factor(base.in_features, r, bias=False)
        self.lora_B = Factor(r, base.out_features, bias=False)
        self.lora_B.weight.init = init.zeros
        self.merged = False

    def added(self) -> list[tuple[str, Any]]:
        if self.merged:
            return []
        names = ("lora_dropout", "lora_A", "lora_B")
        return [(name, vars(self)[name]) for name in names]

    def forward(self, x: Operand) -> Tensor:
        result: Tensor = self.base(x)
        if self.merged:
            return result
        low = self.lora_A(self.lora_dropout(x))
        return result + self.lora_B(low) * self.scale

    def change(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """What is added to the weight, in the order in which that lies."""
        product: np.ndarray = (b.astype(np.float64) @ a.astype(np.float64)) * self.scale
        return product.T if self.base.fan_in_fan_out else product


def lora(
    model: Module,
    r: int = 8,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Targets | None = None,
    rslora: bool = False,
) -> Module:
    """The model with low-rank adapters beside its linear layers, and all else frozen.

    `targets` are paths of modules: a pattern (`"attn.*"`, also of a path's end), a compiled regular
    expression, a function, or a list; without, every linear layer but those whose weight another
    module has too. What is added is multiplied by alpha / r (alpha / √r with `rslora`); alpha is r
    unless told. Parameters of the model keep their names; new ones are "…lora_A.weight" and
    "…lora_B.weight". Called again, it adds to other layers.
    """
    check_whole("lora", "r", r)
    strength = float(r) if alpha is None else check_number("lora", "alpha", alpha, FACTOR)
    chosen: Targets = _unshared(model) if targets is None else targets
    found = targeted("lora", model, chosen, is_linear, "linear layers", has_adapter)
    wrapped = {p: LoRA(part, r, strength, dropout, bool(rslora)) for p, part in found.items()}
    put_in_place(model, {id(part.base): part for part in wrapped.values()})
    freeze(model)
    model._restructured()
    return model


def is_linear(part: Module) -> TypeGuard[Linear]:
    """Whether a module is a linear layer of the model, without an adapter."""
    return isinstance(part, Linear) and not isinstance(part, Factor)


def has_adapter(part: Module) -> bool:
    return isinstance(part, Adapted)


def _unshared(model: Module) -> Targets:
    """Linear layers whose weight is their own: a head that is tied to an embedding is not."""
    if not isinstance(model, Module):
        return "*"  # refused there
    holders = _holders(model)
    linear = [(n, m) for n, m in model.named_modules() if is_linear(m)]
    own = [n for n, m in linear if n and holders[id(m.weight)] == 1]
    # A second time they have one already, which is said: a tied head is not the next best.
    return own or [n for n, m in model.named_modules() if n and has_adapter(m)] or "*"


def _holders(model: Module) -> Counter[int]:
    """How many modules have each weight, by its identity."""
    layers = (part.base if isinstance(part, Adapted) else part for part in model.modules())
    return Counter(id(vars(layer).get("weight")) for layer in layers)


def adapters(model: Module) -> dict[str, LoRA]:
    """The model's low-rank adapters, by the path of their layer."""
    return {n: part for n, part in model.named_modules() if isinstance(part, LoRA)}


def freeze(model: Module) -> None:
    """Freeze what is not an adapter's."""
    extra = [part for part in model.modules() if isinstance(part, Extra)]
    added = {id(p) for part in extra for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad = parameter.requires_grad and id(parameter) in added


def take_values(operation: str, model: Module, values: Mapping[str, object]) -> None:
    """Let a model start from values by name; those that are not given stay."""
    declared = model.declarations()
    unknown = [n for n in values if n not in declared]
    arrays = {n: np.asarray(v) for n, v in values.items()}
    wrong = [n for n, a in arrays.items() if n in declared and a.shape != declared[n].shape]
    if unknown or wrong:
        what = f"the model has no {unknown[0]!r}" if unknown else f"{wrong[0]!r} has another shape"
        raise ArgumentError(operation, what, "Pass step.params of a step of this model.")
    for name, array in arrays.items():
        declared[name].init = held(array)


def merge(model: Module, values: Mapping[str, object] | None = None) -> Module:
    """Add each adapter's B A to its weight, so that nothing is computed beside it.

    `values` are those of a step, `step.params`; without, those that the model starts from, where
    not every B is zero. The parameters have the names that they had before `nn.lora`. `nn.unmerge`
    goes back.
    """
    return _move(model, values, "merge", 1.0)


def unmerge(model: Module, values: Mapping[str, object] | None = None) -> Module:
    """Take each adapter's B A out of its weight again: to rounding what was there before."""
    return _move(model, values, "unmerge", -1.0)


def _move(
    model: Module, values: Mapping[str, object] | None, operation: str, sign: float
) -> Module:
    if not isinstance(model, Module):
        raise ArgumentError(operation, f"{model!r} is no module", "Pass a module.")
    if values is not None and not isinstance(values, Mapping):
        raise ArgumentError(operation, f"values = {values!r:.80}", "Pass step.params.")
    if values is not None:
        take_values(operation, model, values)
    found = {n: part for n, part in adapters(model).items() if part.merged == (sign < 0)}
    if not found:
        state = "merged" if sign > 0 else "apart"
        cause = f"{type(model).__name__} has no adapters, or all are {state}"
        raise ArgumentError(operation, cause, "Call nn.lora first.")
    _check_own(model, operation, found)
    if values is None and sign > 0:
        _check_trained(found)
    for name, part in found.items():
        a = part.lora_A.weight.first_value(0, f"{name}.lora_A.weight")
        b = part.lora_B.weight.first_value(0, f"{name}.lora_B.weight")
        weight = part.base.weight
        before = weight.first_value(0, f"{name}.weight")
        for parameter, value in ((part.lora_A.weight, a), (part.lora_B.weight, b)):
            parameter.init = held(value)
        weight.init = held((before + sign * part.change(a, b)).astype(before.dtype))
        part.merged = sign > 0
    model._restructured()
    return model


def _check_own(model: Module, operation: str, found: Mapping[str, LoRA]) -> None:
    """Refuse weights that cannot take what an adapter adds."""
    holders = _holders(model)
    for name, part in found.items():
        if not isinstance(part.base.weight, Parameter):
            cause = f"the weight of {name} is quantized, and would be rounded again"
            raise ArgumentError(operation, cause, "Call nn.dequantize(model) first.")
        if holders[id(part.base.weight)] > 1:
            cause = f"another module has the weight of {name} too, and would change with it"
            raise ArgumentError(operation, cause, "Leave its adapter apart, or untie the weight.")


def _check_trained(found: Mapping[str, LoRA]) -> None:
    """Refuse to merge nothing: a step holds what it trained, and the model does not know of it."""
    weights = ((f"{n}.lora_B.weight", part.lora_B.weight) for n, part in found.items())
    if not any(weight.first_value(0, name).any() for name, weight in weights):
        cause = "every lora_B that the model starts from is zero, so that nothing would be added"
        raise ArgumentError("merge", cause, "Pass what was trained: nn.merge(model, step.params).")
