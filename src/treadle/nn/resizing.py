"""Layers that resize images, or move pixels to channels and windows to columns."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.numbers import check_choice, check_whole
from treadle.frontend.functions import images
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.module import Module

Sizes = int | Sequence[int]
Factors = float | Sequence[float]


class Upsample(Module):
    """Spatial axes resized to a size or by a factor: (N, C, …) → (N, C, size …)."""

    def __init__(
        self,
        size: Sizes | None = None,
        scale_factor: Factors | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
        recompute_scale_factor: bool = False,
    ):
        check_choice("Upsample", "mode", mode, images.MODES)
        self.size, self.scale_factor, self.mode = size, scale_factor, mode
        self.align_corners = bool(align_corners)
        self.recompute_scale_factor = bool(recompute_scale_factor)

    def forward(self, x: Operand) -> Tensor:
        return images.interpolate(
            x,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            self.recompute_scale_factor,
        )


class UpsamplingNearest2d(Upsample):
    """Resized, each pixel that of the nearest place: (N, C, H, W) → (N, C, H′, W′)."""

    def __init__(self, size: Sizes | None = None, scale_factor: Factors | None = None):
        super().__init__(size, scale_factor, "nearest")


class UpsamplingBilinear2d(Upsample):
    """Resized between neighbours, corners staying where they are: (N, C, H, W) → (N, C, H′, W′)."""

    def __init__(self, size: Sizes | None = None, scale_factor: Factors | None = None):
        super().__init__(size, scale_factor, "bilinear", align_corners=True)


class PixelShuffle(Module):
    """Channels as pixels: (…, C · r², H, W) → (…, C, H · r, W · r)."""

    def __init__(self, upscale_factor: int):
        self.upscale_factor = check_whole("PixelShuffle", "upscale_factor", upscale_factor)

    def forward(self, x: Operand) -> Tensor:
        return images.pixel_shuffle(x, self.upscale_factor)


class PixelUnshuffle(Module):
    """Pixels as channels: (…, C, H · r, W · r) → (…, C · r², H, W)."""

    def __init__(self, downscale_factor: int):
        self.downscale_factor = check_whole("PixelUnshuffle", "downscale_factor", downscale_factor)

    def forward(self, x: Operand) -> Tensor:
        return images.pixel_unshuffle(x, self.downscale_factor)


class ChannelShuffle(Module):
    """Channels of the groups taken in turn: (N, C, …) → the same."""

    def __init__(self, groups: int):
        self.groups = check_whole("ChannelShuffle", "groups", groups)

    def forward(self, x: Operand) -> Tensor:
        return images.channel_shuffle(x, self.groups)


class Unfold(Module):
    """Windows as columns: (N, C, H, W) → (N, C · kernel, windows)."""

    def __init__(
        self, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
    ):
        self.kernel_size, self.dilation = kernel_size, dilation
        self.padding, self.stride = padding, stride

    def forward(self, x: Operand) -> Tensor:
        return images.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)


class Fold(Module):
    """Columns added up where windows overlap: (N, C · kernel, windows) → (N, C, H, W)."""

    def __init__(
        self,
        output_size: Sizes,
        kernel_size: Sizes,
        dilation: Sizes = 1,
        padding: Sizes = 0,
        stride: Sizes = 1,
    ):
        self.output_size, self.kernel_size, self.dilation = output_size, kernel_size, dilation
        self.padding, self.stride = padding, stride

    def forward(self, x: Operand) -> Tensor:
        return images.fold(
            x, self.output_size, self.kernel_size, self.dilation, self.padding, self.stride
        )
