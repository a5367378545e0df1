"""Networks of images of later years: depthwise convolutions, squeezed channels, shifted windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats
from families.images import labelled
from families.transformers import heads_of, joined


def convnext(s: Any, widths: Any, depths: Any, patch: int, count: int, **others: int) -> Any:
    """ConvNeXt: depthwise 7 × 7, then LayerNorm over channels and two layers for each pixel."""
    nn = s.nn

    class Norm(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(channels, eps=1e-6)

        def forward(self, x: Any) -> Any:
            return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
            self.norm = nn.LayerNorm(width, eps=1e-6)
            self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.scale = s.parameter(width, spread=0.1)

        def forward(self, x: Any) -> Any:
            y = self.norm(self.conv(x).permute(0, 2, 3, 1))
            y = self.out(s.gelu(self.into(y))) * self.scale
            return x + y.permute(0, 3, 1, 2)

    class ConvNeXt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers, channels = [], 3
            for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
                size = 2 if i else patch
                smaller = nn.Conv2d(channels, width, size, size)
                layers += [Norm(channels), smaller] if i else [smaller, Norm(width)]
                layers += [Block(width) for _ in range(depth)]
                channels = width
            self.layers = nn.Sequential(*layers)
            self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, count)

        def forward(self, batch: Any) -> Any:
            x = self.layers(batch["x"]).mean((2, 3))
            return s.cross_entropy(self.head(self.norm(x)), batch["y"])

    return ConvNeXt()


def efficientnet(s: Any, settings: Any, stem: int, last: int, count: int, **others: int) -> Any:
    """EfficientNet: MobileNet's blocks with SiLU, whose channels are weighed by their means."""
    nn = s.nn

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[Any]:
        return [
            nn.Conv2d(
                inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
            ),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
        ]

    class Squeeze(nn.Module):
        def __init__(self, channels: int, narrow: int) -> None:
            super().__init__()
            self.into, self.out = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)

        def forward(self, x: Any) -> Any:
            y = s.silu(self.into(x.mean((2, 3))[:, :, None, None]))
            return x * s.sigmoid(self.out(y))

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int, times: int, kernel: int) -> None:
            super().__init__()
            wide = inputs * times
            layers = conv(inputs, wide, 1) if times > 1 else []
            layers += [*conv(wide, wide, kernel, stride, wide), Squeeze(wide, max(1, inputs // 4))]
            self.layers = nn.Sequential(*layers, *conv(wide, outputs, 1)[:-1])
            self.is_residual = stride == 1 and inputs == outputs

        def forward(self, x: Any) -> Any:
            return x + self.layers(x) if self.is_residual else self.layers(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers, channels = conv(3, stem, 3, 2), stem
            for times, outputs, repeats, stride, kernel in settings:
                for i in range(repeats):
                    layers.append(Block(channels, outputs, 1 if i else stride, times, kernel))
                    channels = outputs
            self.layers = nn.Sequential(*layers, *conv(channels, last, 1))
            self.fc = nn.Linear(last, count)

        def forward(self, batch: Any) -> Any:
            return s.cross_entropy(self.fc(self.layers(batch["x"]).mean((2, 3))), batch["y"])

    return Net()


EFFICIENTNET_B0 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip
EFFICIENTNET_SMALL = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5))


def pairs_of(window: int) -> np.ndarray:
    """The row of the table of biases for each two pixels of a window: (w², w²)."""
    at = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None, :] + window - 1
    return (apart[0] * (2 * window - 1) + apart[1]).astype(np.int32)


def seams(side: int, window: int, shift: int) -> np.ndarray:
    """−100 where a shifted window has pixels that were not neighbours: (windows, 1, w², w²)."""
    part = (np.arange(side) >= side - window).astype(int) + (np.arange(side) >= side - shift)
    regions = (3 * part[:, None] + part).reshape(side // window, window, side // window, window)
    flat = regions.transpose(0, 2, 1, 3).reshape(-1, 1, window * window)
    return np.where(flat[:, :, :, None] == flat[:, :, None], 0, -100).astype(np.float32)


def windows(s: Any, d: int, heads: int, side: int, window: int, shift: int) -> Any:
    """A block of Swin: attention within windows with learnt biases, then the layers of a pixel."""
    nn, count, pixels = s.nn, side // window, window * window

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
            self.bias = s.parameter((2 * window - 1) ** 2, heads)
            self.index = s.constant(pairs_of(window).reshape(-1))
            self.seams = s.constant(seams(side, window, shift)) if shift else None

        def biases(self, n: int) -> Any:
            """(1 or all windows, heads, w², w²)"""
            found = s.take(self.bias, self.index, 0).reshape(pixels, pixels, heads)
            found = found.permute(2, 0, 1)[None]
            if self.seams is None:
                return found
            every = (found + self.seams)[None].expand(n, count * count, heads, pixels, pixels)
            return every.reshape(n * count * count, heads, pixels, pixels)

        def forward(self, x: Any) -> Any:  # (N, side, side, d)
            n = x.shape[0]
            y = self.norm1(x)
            y = s.roll(y, -shift, (1, 2)) if shift else y
            y = y.reshape(n, count, window, count, window, d).permute(0, 1, 3, 2, 4, 5)
            parts = self.qkv(y.reshape(n * count * count, pixels, d)).chunk(3, -1)
            q, k, v = (heads_of(p, heads) for p in parts)
            y = self.out(joined(s.biased_attention(q, k, v, self.biases(n))))
            y = y.reshape(n, count, count, window, window, d).permute(0, 1, 3, 2, 4, 5)
            y = y.reshape(n, side, side, d)
            x = x + (s.roll(y, shift, (1, 2)) if shift else y)
            return x + self.fc2(s.gelu(self.fc1(self.norm2(x))))

    return Block()


def swin(
    s: Any, size: int, patch: int, window: int, d: int, heads: int, depths: Any, count: int,
    **others: int,
) -> Any:  # fmt: skip
    """Swin: windows that are shifted in every other block, and pixels merged by four."""
    nn = s.nn

    class Merge(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4 * width)
            self.out = nn.Linear(4 * width, 2 * width, bias=False)

        def forward(self, x: Any) -> Any:
            n, side, _, width = x.shape
            x = x.reshape(n, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 2, 4, 5)
            return self.out(self.norm(x.reshape(n, side // 2, side // 2, 4 * width)))

    class Swin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, d, patch, patch)
            layers, width, side, h = [], d, size // patch, heads
            for i, depth in enumerate(depths):
                if i:
                    layers.append(Merge(width))
                    width, side, h = 2 * width, side // 2, 2 * h
                for j in range(depth):
                    shift = window // 2 if j % 2 and side > window else 0
                    layers.append(windows(s, width, h, side, window, shift))
            self.layers = nn.Sequential(*layers)
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, count)

        def forward(self, batch: Any) -> Any:
            x = self.layers(self.patches(batch["x"]).permute(0, 2, 3, 1))
            return s.cross_entropy(self.head(self.norm(x).mean((1, 2))), batch["y"])

    return Swin()


def unet3d(s: Any, width: int, stages: int, count: int, **others: int) -> Any:
    """Volumes segmented: 3 × 3 × 3 convolutions, pooled and brought back by transposed ones."""
    nn = s.nn

    class Double(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv3d(inputs, outputs, 3, padding=1, bias=False)
            self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm3d(outputs), nn.BatchNorm3d(outputs)

        def forward(self, x: Any) -> Any:
            return s.relu(self.norm2(self.conv2(s.relu(self.norm1(self.conv1(x))))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [width << i for i in range(stages + 1)]
            self.down = nn.ModuleList(
                [Double(a, b) for a, b in zip([1, *widths], widths, strict=False)]
            )
            self.pool = nn.MaxPool3d(2)
            self.larger = nn.ModuleList(
                [nn.ConvTranspose3d(2 * a, a, 2, 2) for a in reversed(widths[:-1])]
            )
            self.up = nn.ModuleList([Double(2 * a, a) for a in reversed(widths[:-1])])
            self.head = nn.Conv3d(width, count, 1)

        def forward(self, batch: Any) -> Any:
            levels = [self.down[0](batch["x"])]
            for layer in list(self.down)[1:]:
                levels.append(layer(self.pool(levels[-1])))
            x = levels.pop()
            for larger, up in zip(self.larger, self.up, strict=True):
                x = up(s.cat([larger(x), levels.pop()], 1))
            return s.pixel_cross_entropy(self.head(x), batch["y"])

    return Net()


def volumes(rng: np.random.Generator, n: int, size: int, count: int, **others: int) -> Arrays:
    shape = (size, size, size)
    return {"x": floats(rng, n, 1, *shape), "y": classes(rng, count, n, *shape)}


ENTRIES = [
    Entry(
        "convnext",
        "ConvNeXt",
        convnext,
        labelled,
        {"n": 4, "size": 64, "widths": (32, 64), "depths": (2, 2), "patch": 4, "count": 10},
        {"n": 64, "size": 224, "widths": (96, 192, 384, 768), "depths": (3, 3, 9, 3), "patch": 4,
         "count": 1000},
        is_image=True,
    ),
    Entry(
        "efficientnet",
        "EfficientNet, squeeze-excite",
        efficientnet,
        labelled,
        {"n": 8, "size": 64, "settings": EFFICIENTNET_SMALL, "stem": 16, "last": 160, "count": 10},
        {"n": 64, "size": 224, "settings": EFFICIENTNET_B0, "stem": 32, "last": 1280,
         "count": 1000},
        is_image=True,
    ),
    Entry(
        "swin",
        "Swin, shifted windows",
        swin,
        labelled,
        {"n": 4, "size": 32, "patch": 2, "window": 4, "d": 64, "heads": 2, "depths": (2, 2),
         "count": 10},
        {"n": 32, "size": 224, "patch": 4, "window": 7, "d": 96, "heads": 3,
         "depths": (2, 2, 6, 2), "count": 1000},
    ),
    Entry(
        "unet3d",
        "U-Net of volumes",
        unet3d,
        volumes,
        {"n": 1, "size": 24, "width": 8, "stages": 2, "count": 4},
        {"n": 4, "size": 64, "width": 32, "stages": 3, "count": 4},
    ),
]  # fmt: skip
