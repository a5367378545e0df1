"""Transposed convolutions: PyTorch's names, shapes, defaults and initial distributions."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_sizes, check_whole
from treadle.base.shapes import size_of
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.images import conv_transpose
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.layers import fan_in_uniform
from treadle.nn.module import Module, Parameter

Sizes = int | Sequence[int]


class _ConvTranspose(Module):
    """The transpose of a convolution over `dims` spatial axes; weight (in, out / groups, …)."""

    dims = 0

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
    ):
        name = type(self).__name__
        check_whole(name, "in_channels", in_channels)
        check_whole(name, "out_channels", out_channels)
        check_whole(name, "groups", groups)
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(
                name,
                f"{groups} groups of {in_channels} and {out_channels} channels",
                "groups divides both.",
            )
        self.kernel_size = check_sizes(name, "kernel_size", kernel_size, self.dims)
        self.stride = check_sizes(name, "stride", stride, self.dims)
        self.dilation = check_sizes(name, "dilation", dilation, self.dims)
        self.padding = check_sizes(name, "padding", padding, self.dims, least=0)
        self.output_padding = check_sizes(
            name, "output_padding", output_padding, self.dims, least=0
        )
        self.groups = groups
        shape = (in_channels, out_channels // groups, *self.kernel_size)
        fan_in = out_channels // groups * size_of(self.kernel_size)
        self.weight = Parameter(shape, fan_in_uniform(fan_in))
        self.bias = Parameter((out_channels,), fan_in_uniform(fan_in)) if bias else None

    def forward(self, x: Operand, output_size: Sequence[int] | None = None) -> Tensor:
        """`output_size` chooses the output padding."""
        value, extra = as_tensor(x), self.output_padding
        if output_size is not None:
            extra = self._padding_for(value, tuple(output_size)[-self.dims :])
        given = self.stride, self.padding, extra, self.groups, self.dilation
        return conv_transpose(value, self.weight, self.bias, *given)

    def _padding_for(self, x: Tensor, wanted: Sequence[int]) -> tuple[int, ...]:
        least = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(
                x.shape[2:], self.stride, self.padding, self.dilation, self.kernel_size, strict=True
            )
        ]
        most = [
            n + max(s, d) - 1 for n, s, d in zip(least, self.stride, self.dilation, strict=True)
        ]
        if len(wanted) != self.dims or not all(
            a <= n <= b for a, n, b in zip(least, wanted, most, strict=True)
        ):
            raise ArgumentError(
                type(self).__name__,
                f"output_size {tuple(wanted)} of {x.type}",
                f"It lies between {tuple(least)} and {tuple(most)}.",
            )
        return tuple(n - a for n, a in zip(wanted, least, strict=True))


class ConvTranspose1d(_ConvTranspose):
    """The transpose of a convolution: (N, in_channels, L) → (N, out_channels, L′)."""

    dims = 1


class ConvTranspose2d(_ConvTranspose):
    """The transpose of a convolution: (N, in_channels, H, W) → (N, out_channels, H′, W′)."""

    dims = 2


class ConvTranspose3d(_ConvTranspose):
    """The transpose of a convolution: (N, in_channels, D, H, W) → (N, out_channels, D′, H′, W′)."""

    dims = 3
