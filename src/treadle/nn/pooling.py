"""Pooling layers: PyTorch's names, arguments and defaults."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.errors import ArgumentError
from treadle.base.numbers import POSITIVE, check_flag, check_number, check_sizes, check_whole
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import pooling
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.module import Module

Sizes = int | Sequence[int]


class _MaxPool(Module):
    """The greatest of each window of the last axes; with `return_indices` where they were, too."""

    dims = 0

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ):
        name = type(self).__name__
        check_flag(name, return_indices=return_indices, ceil_mode=ceil_mode)
        self.kernel_size = check_sizes(name, "kernel_size", kernel_size, self.dims)
        self.stride = None if stride is None else check_sizes(name, "stride", stride, self.dims)
        self.padding = check_sizes(name, "padding", padding, self.dims, least=0)
        self.dilation = check_sizes(name, "dilation", dilation, self.dims)
        self.return_indices, self.ceil_mode = return_indices, ceil_mode
        if return_indices and ceil_mode:
            raise ArgumentError(
                name, "return_indices with ceil_mode", "Pad the input, and leave ceil_mode out."
            )

    def forward(self, x: Operand) -> Tensor | tuple[Tensor, Tensor]:
        given = self.kernel_size, self.stride, self.padding, self.dilation
        if self.return_indices:
            return pooling.max_pool_with_indices(x, *given)
        return pooling.max_pool(x, *given, ceil_mode=self.ceil_mode)


class MaxPool1d(_MaxPool):
    """The greatest of each window of (N, C, L): → (N, C, L′)."""

    dims = 1


class MaxPool2d(_MaxPool):
    """The greatest of each window of (N, C, H, W): → (N, C, H′, W′)."""

    dims = 2


class MaxPool3d(_MaxPool):
    """The greatest of each window of (N, C, D, H, W): → (N, C, D′, H′, W′)."""

    dims = 3


class _MaxUnpool(Module):
    """Values put back to where a max pool found them, zeros elsewhere."""

    dims = 0

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0):
        name = type(self).__name__
        self.kernel_size = check_sizes(name, "kernel_size", kernel_size, self.dims)
        self.stride = None if stride is None else check_sizes(name, "stride", stride, self.dims)
        self.padding = check_sizes(name, "padding", padding, self.dims, least=0)

    def forward(
        self, x: Operand, indices: Operand, output_size: Sequence[int] | None = None
    ) -> Tensor:
        return pooling.max_unpool(
            x, indices, self.kernel_size, self.stride, self.padding, output_size
        )


class MaxUnpool1d(_MaxUnpool):
    """The counterpart of MaxPool1d with return_indices: (N, C, L) → (N, C, L′)."""

    dims = 1


class MaxUnpool2d(_MaxUnpool):
    """The counterpart of MaxPool2d with return_indices: (N, C, H, W) → (N, C, H′, W′)."""

    dims = 2


class MaxUnpool3d(_MaxUnpool):
    """The counterpart of MaxPool3d with return_indices: (N, C, D, H, W) → (N, C, D′, H′, W′)."""

    dims = 3


class _AvgPool(Module):
    """The mean of each window of the last axes."""

    dims = 0

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ):
        name = type(self).__name__
        check_flag(name, ceil_mode=ceil_mode, count_include_pad=count_include_pad)
        self.kernel_size = check_sizes(name, "kernel_size", kernel_size, self.dims)
        self.stride = None if stride is None else check_sizes(name, "stride", stride, self.dims)
        self.padding = check_sizes(name, "padding", padding, self.dims, least=0)
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad
        if divisor_override is not None:
            check_whole(name, "divisor_override", divisor_override)
        self.divisor_override = divisor_override

    def forward(self, x: Operand) -> Tensor:
        given = self.kernel_size, self.stride, self.padding, self.count_include_pad
        return pooling.avg_pool(x, *given, self.ceil_mode, self.divisor_override)


class AvgPool1d(_AvgPool):
    """The mean of each window of (N, C, L): → (N, C, L′)."""

    dims = 1


class AvgPool2d(_AvgPool):
    """The mean of each window of (N, C, H, W): → (N, C, H′, W′)."""

    dims = 2


class AvgPool3d(_AvgPool):
    """The mean of each window of (N, C, D, H, W): → (N, C, D′, H′, W′)."""

    dims = 3


class _LPPool(Module):
    """The p-norm of each window of the last axes."""

    dims = 0

    def __init__(self, norm_type: float, kernel_size: Sizes, stride: Sizes | None = None):
        name = type(self).__name__
        self.norm_type = check_number(name, "norm_type", norm_type, POSITIVE)
        self.kernel_size = check_sizes(name, "kernel_size", kernel_size, self.dims)
        self.stride = None if stride is None else check_sizes(name, "stride", stride, self.dims)

    def forward(self, x: Operand) -> Tensor:
        return pooling.lp_pool(x, self.norm_type, self.kernel_size, self.stride)


class LPPool1d(_LPPool):
    """The p-norm of each window of (N, C, L): → (N, C, L′)."""

    dims = 1


class LPPool2d(_LPPool):
    """The p-norm of each window of (N, C, H, W): → (N, C, H′, W′)."""

    dims = 2


class LPPool3d(_LPPool):
    """The p-norm of each window of (N, C, D, H, W): → (N, C, D′, H′, W′)."""

    dims = 3


OutputSize = int | None | Sequence[int | None]


class _AdaptivePool(Module):
    """As many windows of the last axes as the output has elements; None keeps an axis."""

    dims = 0

    def __init__(self, output_size: OutputSize):
        given: tuple[int | None, ...]
        if isinstance(output_size, Sequence):
            given = tuple(output_size)
        else:
            given = (output_size,) * self.dims
        if len(given) != self.dims:
            raise ArgumentError(
                type(self).__name__, f"output_size {output_size}", f"Give {self.dims} sizes."
            )
        for n in given:
            if n is not None:
                check_whole(type(self).__name__, "output_size", n)
        self.output_size = given


class _AdaptiveAvgPool(_AdaptivePool):
    def forward(self, x: Operand) -> Tensor:
        return pooling.adaptive_avg_pool(as_tensor(x), self.output_size)


class _AdaptiveMaxPool(_AdaptivePool):
    def forward(self, x: Operand) -> Tensor:
        return pooling.adaptive_max_pool(as_tensor(x), self.output_size)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Means of (N, C, L) in as many windows as asked for: → (N, C, output_size …)."""

    dims = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Means of (N, C, H, W) in as many windows as asked for: → (N, C, output_size …)."""

    dims = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """Means of (N, C, D, H, W) in as many windows as asked for: → (N, C, output_size …)."""

    dims = 3


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """The greatest of (N, C, L) in as many windows as asked for: → (N, C, output_size …)."""

    dims = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """The greatest of (N, C, H, W) in as many windows as asked for: → (N, C, output_size …)."""

    dims = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """The greatest of (N, C, D, H, W) in as many windows as asked for: → (N, C, output_size …)."""

    dims = 3
