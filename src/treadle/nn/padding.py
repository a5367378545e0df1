"""Padding layers: PyTorch's names and argument order, the last axis first."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import FINITE, check_integer, check_number
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.padding import pad
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.module import Module


class _Pad(Module):
    """The last `dims` axes padded; amounts are (before, after) of the last axis first."""

    dims = 0
    mode = "constant"

    def __init__(self, padding: int | Sequence[int]):
        name = type(self).__name__
        given = tuple(padding) if isinstance(padding, Sequence) else (padding,) * (2 * self.dims)
        if len(given) != 2 * self.dims:
            raise ArgumentError(
                name, f"padding {padding}", f"Give one amount, or {2 * self.dims} of them."
            )
        self.padding = tuple(check_integer(name, "padding", n) for n in given)
        self.value = 0.0

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if value.ndim <= self.dims:
            raise ShapeError(
                type(self).__name__, f"x is {value.type}", f"It has {self.dims + 1} axes or more."
            )
        pairs = list(zip(self.padding[::2], self.padding[1::2], strict=True))[::-1]
        amounts = [(0, 0)] * (value.ndim - self.dims) + pairs
        return pad(value, amounts, self.value, mode=self.mode)


class _ConstantPad(_Pad):
    def __init__(self, padding: int | Sequence[int], value: float):
        super().__init__(padding)
        self.value = check_number(type(self).__name__, "value", value, FINITE)


class ConstantPad1d(_ConstantPad):
    """A number around (N, C, L): → (N, C, L′)."""

    dims = 1


class ConstantPad2d(_ConstantPad):
    """A number around (N, C, H, W): → (N, C, H′, W′)."""

    dims = 2


class ConstantPad3d(_ConstantPad):
    """A number around (N, C, D, H, W): → (N, C, D′, H′, W′)."""

    dims = 3


class ZeroPad1d(_Pad):
    """Zeros around (N, C, L): → (N, C, L′)."""

    dims = 1


class ZeroPad2d(_Pad):
    """Zeros around (N, C, H, W): → (N, C, H′, W′)."""

    dims = 2


class ZeroPad3d(_Pad):
    """Zeros around (N, C, D, H, W): → (N, C, D′, H′, W′)."""

    dims = 3


class ReflectionPad1d(_Pad):
    """(N, C, L) mirrored at both ends: → (N, C, L′)."""

    dims, mode = 1, "reflect"


class ReflectionPad2d(_Pad):
    """(N, C, H, W) mirrored at its edges: → (N, C, H′, W′)."""

    dims, mode = 2, "reflect"


class ReflectionPad3d(_Pad):
    """(N, C, D, H, W) mirrored at its faces: → (N, C, D′, H′, W′)."""

    dims, mode = 3, "reflect"


class ReplicationPad1d(_Pad):
    """The ends of (N, C, L) repeated: → (N, C, L′)."""

    dims, mode = 1, "replicate"


class ReplicationPad2d(_Pad):
    """The edges of (N, C, H, W) repeated: → (N, C, H′, W′)."""

    dims, mode = 2, "replicate"


class ReplicationPad3d(_Pad):
    """The faces of (N, C, D, H, W) repeated: → (N, C, D′, H′, W′)."""

    dims, mode = 3, "replicate"


class CircularPad1d(_Pad):
    """(N, C, L) continued with its other end: → (N, C, L′)."""

    dims, mode = 1, "circular"


class CircularPad2d(_Pad):
    """(N, C, H, W) continued with its opposite edges: → (N, C, H′, W′)."""

    dims, mode = 2, "circular"


class CircularPad3d(_Pad):
    """(N, C, D, H, W) continued with its opposite faces: → (N, C, D′, H′, W′)."""

    dims, mode = 3, "circular"
