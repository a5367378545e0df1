"""Frozen weights in 8 or 4 bits, in GGUF's blocks of 32: decoded where they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.blocks import block_format, encoded, scales_and_codes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import check_choice, check_seed
from treadle.base.shapes import Shape
from treadle.frontend.coerce import broadcast_to, cast
from treadle.frontend.functions.arithmetic import bitwise_and, floor_divide, where
from treadle.frontend.functions.shaping import iota, reshape, transpose
from treadle.frontend.tensor import Placeholder, Tensor
from treadle.ir.types import TensorType
from treadle.nn.layers import Embedding, Linear
from treadle.nn.lora import Adapted, Factor
from treadle.nn.module import Module, Parameter, held
from treadle.nn.targets import Targets, put_in_place, targeted

BLOCK = block_format("q8_0").size  # elements that share a scale: as many in both formats


@dataclass(frozen=True)
class Format:
    """How blocks of 32 elements along a row are held: codes, and a float16 scale for each."""

    name: str
    dtype: DType  # of the codes
    codes: int  # of a block
    decode: Callable[[Tensor], Tensor]  # codes (…, n) → whole numbers (…, 32), float32


def _decode_q8_0(codes: Tensor) -> Tensor:
    return cast(codes, dtypes.float32)


def _decode_q4_0(codes: Tensor) -> Tensor:
    """(…, 16) bytes → (…, 32): the low halves, then the high ones."""
    *around, count = codes.shape
    shape = (*around, 2, count)
    twice = broadcast_to(reshape(codes, (*around, 1, count)), shape)
    is_low = iota(shape, len(around)) == 0
    nibbles = where(is_low, bitwise_and(twice, 15), floor_divide(twice, 16))
    return reshape(cast(nibbles, dtypes.float32) - 8.0, (*around, 2 * count))


FORMATS = {
    f.name: f
    for f in (
        Format("q8_0", dtypes.int8, 32, _decode_q8_0),
        Format("q4_0", dtypes.uint8, 16, _decode_q4_0),
    )
}


class Quantized(Module, Placeholder):
    """Stands where a weight was: `codes` and `scales`, of which it is made where it is read.

    Blocks lie along a layer's inputs, as in GGUF's files. Neither part is trained.
    """

    def __init__(self, form: Format, shape: Shape, is_transposed: bool):
        self.form, self.is_transposed = form, is_transposed
        self.type = TensorType(shape, dtypes.float32)
        rows, width = shape[::-1] if is_transposed else shape
        self.stored = (rows, width)
        blocks = width // BLOCK
        codes, scales = (rows, blocks * form.codes), (rows, blocks)
        self.codes = Parameter(codes, requires_grad=False, dtype=form.dtype)
        self.scales = Parameter(scales, requires_grad=False, dtype=dtypes.float16)

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    def tensor(self) -> Tensor:
        rows, blocks = self.scales.shape
        codes = reshape(self.codes.tensor(), (rows, blocks, self.form.codes))
        scales = reshape(cast(self.scales.tensor(), dtypes.float32), (rows, blocks, 1))
        weight = reshape(self.form.decode(codes) * scales, self.stored)
        return transpose(weight, 0, 1) if self.is_transposed else weight

    def encode(self, weight: np.ndarray) -> None:
        """Start from the codes and scales of a weight."""
        matrix = weight.T if self.is_transposed else weight
        scales, codes = scales_and_codes(self.form.name, encoded(self.form.name, matrix))
        self.codes.init = held(codes.reshape(self.codes.shape))
        self.scales.init = held(scales)

    def decoded(self, path: str) -> np.ndarray:
        """The weight that its first values are."""
        values = {n: d.first_value(0, f"{path}.{n}") for n, d in self.declarations().items()}
        found: np.ndarray = self.apply(values).numpy()
        return found

    def forward(self) -> Tensor:
        return self.tensor()

    def __repr__(self) -> str:
        return f"Quantized({self.type}, {self.form.name})"


def quantize(model: Module, form: str = "q8_0", targets: Targets = "*", seed: int = 0) -> Module:
    """The model with weights in blocks of 8 or 4 bits, which are frozen: "q8_0" or "q4_0".

    `targets` are paths of linear layers and embeddings, as those of `nn.lora`. The model's values
    are those it was loaded with, or first values by `seed`. A weight that several modules have is
    one for all of them still. It is decoded where it is read, for the backward pass once more.
    """
    check_choice("quantize", "form", form, tuple(FORMATS))
    chosen = check_seed("quantize", seed)
    found = targeted("quantize", model, targets, _has_weight, "linear layers and embeddings")
    names = {id(p): name for name, p in model.named_parameters()}
    parts: dict[int, Quantized] = {}
    for path, module in found.items():
        part = _layer(module)
        weight = part.weight
        width = weight.shape[0 if _is_transposed(part) else 1]
        if width % BLOCK:
            cause = f"{path}.weight is {weight.type}: rows of {width} are no whole blocks"
            raise ShapeError("quantize", cause, f"Leave it out of targets: {BLOCK} must divide it.")
        if id(weight) not in parts:
            packed = Quantized(FORMATS[form], weight.shape, _is_transposed(part))
            packed.encode(weight.first_value(chosen, names[id(weight)]))
            parts[id(weight)] = packed
    put_in_place(model, parts)
    model._restructured()
    return model


def dequantize(model: Module) -> Module:
    """The model with float32 parameters, which stay frozen, in the place of quantized weights."""
    if not isinstance(model, Module):
        raise ArgumentError("dequantize", f"{model!r} is no module", "Pass a module.")
    parts: dict[int, Parameter] = {}
    for path, part in model.named_modules():
        if isinstance(part, Quantized):
            value = part.decoded(path)
            parts[id(part)] = Parameter(value.shape, held(value), requires_grad=False)
    put_in_place(model, parts)
    model._restructured()
    return model


def _layer(part: Module) -> Any:
    """The layer itself, which may have an adapter around it."""
    return part.base if isinstance(part, Adapted) else part


def _has_weight(part: Module) -> bool:
    layer = _layer(part)
    is_layer = isinstance(layer, (Linear, Embedding)) and not isinstance(layer, Factor)
    return is_layer and isinstance(layer.weight, Parameter)


def _is_transposed(part: Linear | Embedding) -> bool:
    return isinstance(part, Linear) and part.fan_in_fan_out
