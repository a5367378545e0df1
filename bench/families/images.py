"""Images: convolutions with their norms, transposed ones, resizing, patches."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats


def labelled(rng: np.random.Generator, n: int, size: int, count: int, **others: int) -> Arrays:
    return {"x": floats(rng, n, 3, size, size), "y": classes(rng, count, n)}


def group_norm_net(s: Any, width: int, blocks: int, count: int, **others: int) -> Any:
    """A residual network with GroupNorm in place of BatchNorm, as for small batches."""
    nn = s.nn

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
            self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
            self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

        def forward(self, x: Any) -> Any:
            y = s.relu(self.norm1(self.conv1(x)))
            y = self.norm2(self.conv2(y))
            return s.relu(y + (x if self.skip is None else self.skip(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(8, width)
            layers, channels = [], width
            for i in range(blocks):
                after = width << (i + 1) // 2
                layers.append(Block(channels, after, 2 if after > channels else 1))
                channels = after
            self.blocks, self.fc = nn.Sequential(*layers), nn.Linear(channels, count)

        def forward(self, batch: Any) -> Any:
            x = self.blocks(s.relu(self.norm(self.stem(batch["x"]))))
            return s.cross_entropy(self.fc(x.mean((2, 3))), batch["y"])

    return Net()


def decoder(s: Any, width: int, latent: int, stages: int, **others: int) -> Any:
    """From a vector to an image by transposed convolutions, as DCGAN's generator."""
    nn = s.nn

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            top = width << (stages - 1)
            self.first, layers, channels = nn.Linear(latent, top * 16), [], top
            for _ in range(stages - 1):
                layers += [
                    nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False),
                    nn.BatchNorm2d(channels // 2),
                    nn.ReLU(),
                ]
                channels //= 2
            layers.append(nn.ConvTranspose2d(channels, 3, 4, 2, 1))
            self.layers = nn.Sequential(*layers)

        def forward(self, batch: Any) -> Any:
            x = s.relu(self.first(batch["z"]))
            image = s.tanh(self.layers(x.reshape(x.shape[0], -1, 4, 4)))
            return s.mse(image, batch["image"])

    return Decoder()


def decoded(rng: np.random.Generator, n: int, latent: int, stages: int, **others: int) -> Arrays:
    size = 4 << stages
    return {"z": floats(rng, n, latent), "image": np.tanh(floats(rng, n, 3, size, size))}


def upsampling_net(s: Any, width: int, stages: int, count: int, **others: int) -> Any:
    """Pixels classified: strides down, bilinear resizing up, with what was there added."""
    nn = s.nn

    def conv(inputs: int, outputs: int, stride: int = 1) -> Any:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [width << i for i in range(stages + 1)]
            pairs = list(pairwise(widths))
            self.stem = conv(3, width)
            self.down = nn.ModuleList([conv(a, b, 2) for a, b in pairs])
            self.up = nn.ModuleList([conv(b, a) for a, b in reversed(pairs)])
            self.twice = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            self.head = nn.Conv2d(width, count, 1)

        def forward(self, batch: Any) -> Any:
            levels = [self.stem(batch["x"])]
            for layer in self.down:
                levels.append(layer(levels[-1]))
            x = levels.pop()
            for layer in self.up:
                x = layer(self.twice(x)) + levels.pop()
            return s.pixel_cross_entropy(self.head(x), batch["y"])

    return Net()


def segmented(rng: np.random.Generator, n: int, size: int, count: int, **others: int) -> Arrays:
    return {"x": floats(rng, n, 3, size, size), "y": classes(rng, count, n, size, size)}


def unet(s: Any, width: int, groups: int, heads: int, **others: int) -> Any:
    """A diffusion model's denoiser: GroupNorm, time, attention at the bottom."""
    nn, timed = s.nn, 4 * width

    class Residual(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.GroupNorm(groups, inputs), nn.GroupNorm(groups, outputs)
            self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
            self.time = nn.Linear(timed, outputs)
            self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

        def forward(self, x: Any, t: Any) -> Any:
            y = self.conv1(s.silu(self.norm1(x)))
            y = y + self.time(s.silu(t))[:, :, None, None]
            y = self.conv2(s.silu(self.norm2(y)))
            return y + (x if self.skip is None else self.skip(x))

    class Attention(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(groups, channels)
            self.qkv, self.out = (
                nn.Conv2d(channels, 3 * channels, 1),
                nn.Conv2d(channels, channels, 1),
            )

        def forward(self, x: Any) -> Any:
            n, c, h, w = x.shape
            parts = self.qkv(self.norm(x)).reshape(n, 3, heads, c // heads, h * w)
            q, k, v = (parts[:, i].transpose(2, 3) for i in range(3))
            mixed = s.attention(q, k, v).transpose(2, 3).reshape(n, c, h, w)
            return x + self.out(mixed)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = width
            self.time1, self.time2 = nn.Linear(w, timed), nn.Linear(timed, timed)
            self.first = nn.Conv2d(3, w, 3, padding=1)
            self.down1, self.down2 = Residual(w, w), Residual(w, 2 * w)
            self.smaller1 = nn.Conv2d(w, w, 3, 2, padding=1)
            self.smaller2 = nn.Conv2d(2 * w, 2 * w, 3, 2, padding=1)
            self.middle1, self.middle2 = Residual(2 * w, 2 * w), Residual(2 * w, 2 * w)
            self.attention = Attention(2 * w)
            self.larger = nn.Upsample(scale_factor=2, mode="nearest")
            self.up2, self.up1 = Residual(4 * w, w), Residual(2 * w, w)
            self.norm, self.last = nn.GroupNorm(groups, w), nn.Conv2d(w, 3, 3, padding=1)

        def forward(self, batch: Any) -> Any:
            rates = s.exp(s.arange(width // 2) * (-math.log(10000.0) * 2 / width))
            angle = s.outer(batch["t"], rates)
            t = self.time2(s.silu(self.time1(s.cat([s.sin(angle), s.cos(angle)], -1))))
            one = self.down1(self.first(batch["x"]), t)
            two = self.down2(self.smaller1(one), t)
            x = self.middle1(self.smaller2(two), t)
            x = self.middle2(self.attention(x), t)
            x = self.up2(s.cat([self.larger(x), two], 1), t)
            x = self.up1(s.cat([self.larger(x), one], 1), t)
            return s.mse(self.last(s.silu(self.norm(x))), batch["noise"])

    return UNet()


def noised(rng: np.random.Generator, n: int, size: int, **others: int) -> Arrays:
    shape = (n, 3, size, size)
    t = rng.uniform(0, 1000, n).astype(np.float32)
    return {"x": floats(rng, *shape), "noise": floats(rng, *shape), "t": t}


def mobilenet(s: Any, settings: Any, stem: int, last: int, count: int, **others: int) -> Any:
    """MobileNetV2: depthwise convolutions between narrow residuals."""
    nn = s.nn

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[Any]:
        return [
            nn.Conv2d(
                inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
            ),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
        ]

    class Inverted(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int, times: int) -> None:
            super().__init__()
            wide = inputs * times
            layers = conv(inputs, wide, 1) if times > 1 else []
            layers += conv(wide, wide, 3, stride, wide) + conv(wide, outputs, 1)[:-1]
            self.layers, self.is_residual = (
                nn.Sequential(*layers),
                stride == 1 and inputs == outputs,
            )

        def forward(self, x: Any) -> Any:
            return x + self.layers(x) if self.is_residual else self.layers(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers, channels = conv(3, stem, 3, 2), stem
            for times, outputs, repeats, stride in settings:
                for i in range(repeats):
                    layers.append(Inverted(channels, outputs, 1 if i else stride, times))
                    channels = outputs
            self.layers = nn.Sequential(*layers, *conv(channels, last, 1))
            self.fc = nn.Linear(last, count)

        def forward(self, batch: Any) -> Any:
            return s.cross_entropy(self.fc(self.layers(batch["x"]).mean((2, 3))), batch["y"])

    return Net()


MOBILENET_V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
    (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
MOBILENET_SMALL = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2), (6, 64, 1, 2))


def vae(s: Any, width: int, latent: int, size: int, **others: int) -> Any:
    """A variational autoencoder of strided and transposed convolutions; its noise is given."""
    nn, small = s.nn, size // 4

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, width, 4, 2, padding=1)
            self.conv2 = nn.Conv2d(width, 2 * width, 4, 2, padding=1)
            flat = 2 * width * small * small
            self.statistics, self.first = nn.Linear(flat, 2 * latent), nn.Linear(latent, flat)
            self.up1 = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
            self.up2 = nn.ConvTranspose2d(width, 3, 4, 2, 1)

        def forward(self, batch: Any) -> Any:
            x = batch["x"]
            y = s.relu(self.conv2(s.relu(self.conv1(x))))
            mean, logvar = self.statistics(y.reshape(x.shape[0], -1)).chunk(2, -1)
            z = mean + s.exp(logvar * 0.5) * batch["noise"]
            y = s.relu(self.first(z)).reshape(x.shape[0], 2 * width, small, small)
            logits = self.up2(s.relu(self.up1(y)))
            divergence = (mean * mean + s.exp(logvar) - logvar - 1).mean() * 0.5
            return s.bce_with_logits(logits, x) + divergence * (latent / (3 * size * size))

    return Autoencoder()


def pictures(rng: np.random.Generator, n: int, size: int, latent: int, **others: int) -> Arrays:
    x = rng.uniform(0, 1, (n, 3, size, size)).astype(np.float32)
    return {"x": x, "noise": floats(rng, n, latent)}


ENTRIES = [
    Entry(
        "group_norm",
        "residual network with GroupNorm",
        group_norm_net,
        labelled,
        {"n": 16, "size": 32, "width": 32, "blocks": 5, "count": 10},
        {"n": 128, "size": 64, "width": 64, "blocks": 9, "count": 100},
        is_image=True,
    ),
    Entry(
        "conv_transpose",
        "decoder of transposed convolutions",
        decoder,
        decoded,
        {"n": 16, "width": 32, "latent": 64, "stages": 3},
        {"n": 128, "width": 64, "latent": 128, "stages": 4},
        is_image=True,
    ),
    Entry(
        "interpolate",
        "pixels classified, bilinear resizing",
        upsampling_net,
        segmented,
        {"n": 4, "size": 64, "width": 16, "stages": 3, "count": 8},
        {"n": 32, "size": 128, "width": 64, "stages": 3, "count": 21},
        is_image=True,
    ),
    Entry(
        "unet",
        "diffusion U-Net",
        unet,
        noised,
        {"n": 4, "size": 32, "width": 32, "groups": 8, "heads": 4},
        {"n": 16, "size": 64, "width": 128, "groups": 32, "heads": 8},
        is_image=True,
    ),
    Entry(
        "mobilenet",
        "MobileNetV2",
        mobilenet,
        labelled,
        {"n": 8, "size": 64, "settings": MOBILENET_SMALL, "stem": 16, "last": 256, "count": 10},
        {"n": 64, "size": 224, "settings": MOBILENET_V2, "stem": 32, "last": 1280, "count": 1000},
        is_image=True,
    ),
    Entry(
        "vae",
        "convolutional VAE",
        vae,
        pictures,
        {"n": 16, "size": 32, "width": 32, "latent": 32},
        {"n": 128, "size": 64, "width": 64, "latent": 128},
        is_image=True,
    ),
]
