"""Modules of modules, and modules without parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.base.numbers import (
    PROBABILITY,
    check_choice,
    check_integer,
    check_number,
    check_sizes,
)
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import activations, linear, shaping
from treadle.frontend.functions.arithmetic import tanh, where
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.module import Module


class Sequential(Module):
    """One module after the other; names are "0", "1", …"""

    def __init__(self, *modules: Module):
        for i, module in enumerate(modules):
            setattr(self, str(i), _checked("Sequential", module))

    def __iter__(self) -> Iterator[Module]:
        return (m for m in vars(self).values() if isinstance(m, Module))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


def _checked(container: str, module: object) -> Module:
    if not isinstance(module, Module):
        raise ArgumentError(
            container,
            f"{module!r} is not a module",
            "Use a module, for instance nn.ReLU() for td.relu.",
        )
    return module


class ModuleList(Module):
    """A list of modules; names are "0", "1", …"""

    def __init__(self, modules: Iterable[Module] = ()):
        if not isinstance(modules, Iterable):
            raise ArgumentError("ModuleList", f"modules = {modules!r}", "Pass a list of modules.")
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> ModuleList:
        setattr(self, str(len(self)), _checked("ModuleList", module))
        return self

    def __iter__(self) -> Iterator[Module]:
        return (m for m in vars(self).values() if isinstance(m, Module))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]


class Dropout(Module):
    """Zero each element with probability p and scale the rest by 1 / (1 − p), in training only."""

    def __init__(self, p: float = 0.5):
        self.p = check_number("Dropout", "p", p, PROBABILITY)

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if not self.training or self.p == 0:
            return value
        if self.p == 1:
            return value * 0
        kept = random.bernoulli(1 - self.p, value.shape)
        return where(kept, value * (1 / (1 - self.p)), 0)


class MaxPool2d(Module):
    """The greatest of each window of the last two axes."""

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
    ):
        self.kernel_size = check_sizes("MaxPool2d", "kernel_size", kernel_size, 2)
        self.stride = None if stride is None else check_sizes("MaxPool2d", "stride", stride, 2)
        self.padding = check_sizes("MaxPool2d", "padding", padding, 2, least=0)
        self.dilation = check_sizes("MaxPool2d", "dilation", dilation, 2)

    def forward(self, x: Operand) -> Tensor:
        return linear.max_pool(x, self.kernel_size, self.stride, self.padding, self.dilation)


class AvgPool2d(Module):
    """The mean of each window of the last two axes."""

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        count_include_pad: bool = True,
    ):
        self.kernel_size = check_sizes("AvgPool2d", "kernel_size", kernel_size, 2)
        self.stride = None if stride is None else check_sizes("AvgPool2d", "stride", stride, 2)
        self.padding = check_sizes("AvgPool2d", "padding", padding, 2, least=0)
        self.count_include_pad = count_include_pad

    def forward(self, x: Operand) -> Tensor:
        return linear.avg_pool(
            x, self.kernel_size, self.stride, self.padding, self.count_include_pad
        )


class Flatten(Module):
    """The axes from `start_dim` to `end_dim` as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1):
        self.start_dim = check_integer("Flatten", "start_dim", start_dim)
        self.end_dim = check_integer("Flatten", "end_dim", end_dim)

    def forward(self, x: Operand) -> Tensor:
        return shaping.flatten(x, self.start_dim, self.end_dim)


class Identity(Module):
    """x itself."""

    def forward(self, x: Any) -> Any:
        return x


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.relu(x)


class GELU(Module):
    """x · Φ(x)."""

    def __init__(self, approximate: str = "none"):
        check_choice("GELU", "approximate", approximate, ("none", "tanh"))
        self.approximate = approximate

    def forward(self, x: Operand) -> Tensor:
        return activations.gelu(x, self.approximate)


class SiLU(Module):
    """x · sigmoid(x)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.silu(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Operand) -> Tensor:
        return tanh(x)


class Sigmoid(Module):
    """1 / (1 + e⁻ˣ)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.sigmoid(x)


class Softmax(Module):
    """eˣ / Σ eˣ along an axis."""

    def __init__(self, dim: int = -1):
        self.dim = check_integer("Softmax", "dim", dim)

    def forward(self, x: Operand) -> Tensor:
        return activations.softmax(x, self.dim)
