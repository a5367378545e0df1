"""A U-Net finds shapes in noise: for every pixel whether it belongs to one.

    python examples/unet.py

Pictures of 32 × 32 are made up: discs and rectangles under heavy noise. The network goes down by
pooling, up by transposed convolutions, and joins what it had on the way down. The loss is the
cross-entropy of pixels plus Dice's; the overlap with the truth (IoU) is what counts.
"""

import numpy as np

import treadle as td
from treadle import losses, nn, optim

SIDE = 32


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int = 8):
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        fine = self.down1(x)  # (N, W, 32, 32)
        coarse = self.down2(self.pool(fine))  # (N, 2W, 16, 16)
        x = self.bottom(self.pool(coarse))  # (N, 4W, 8, 8)
        x = self.join2(td.concat([self.up2(x), coarse], 1))
        x = self.join1(td.concat([self.up1(x), fine], 1))
        return self.out(x)  # (N, 1, 32, 32), logits


def loss(model, batch):
    logits, truth = model(batch["x"]), batch["y"]
    found, wanted = logits > 0, truth > 0.5
    both = td.logical_and(found, wanted).astype(td.float32).sum()
    either = td.logical_or(found, wanted).astype(td.float32).sum()
    td.metric("iou", both / either.clamp(min=1.0))
    chance = td.sigmoid(logits)
    overlap = (chance * truth).sum((1, 2, 3))
    total = (chance + truth).sum((1, 2, 3))
    dice = 1 - ((2 * overlap + 1) / (total + 1)).mean()
    return losses.bce_with_logits(logits, truth) + dice


def pictures(count: int, seed: int, noise: float = 0.8):
    """Noisy pictures of one disc and one rectangle, and which pixels are theirs."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:SIDE, :SIDE]
    y = np.zeros((count, 1, SIDE, SIDE), np.float32)
    for picture in y:
        centre, radius = rng.uniform(6, SIDE - 6, 2), rng.uniform(3, 7)
        corner, size = rng.uniform(2, SIDE - 10, 2), rng.uniform(4, 10, 2)
        disc = (row - centre[0]) ** 2 + (column - centre[1]) ** 2 < radius**2
        inside = (row >= corner[0]) & (row < corner[0] + size[0])
        picture[0] = disc | (inside & (column >= corner[1]) & (column < corner[1] + size[1]))
    return {"x": y + noise * rng.normal(size=y.shape).astype(np.float32), "y": y}


def drawn(x, chance, y) -> str:
    """A picture, what was found in it, and the truth, side by side as letters."""
    shades = " .:-=+*#%@"
    noisy = np.clip((x + 1) / 3 * 10, 0, 9).astype(int)
    parts = zip(noisy[::2], np.round(9 * chance[::2]).astype(int), (9 * y[::2]).astype(int))
    return "\n".join("  ".join("".join(shades[v] for v in row) for row in rows) for rows in parts)


def train(steps: int = 300, lr: float = 3e-3, width: int = 8, batch: int = 16):
    held_out = pictures(64, seed=10**6)
    rate = optim.cosine(lr, steps=steps + 1)
    step = td.compile_step(UNet(width), loss, optim.adam(rate), pictures(batch, 0), device="cpu")
    for i in range(1, steps + 1):
        out = step(pictures(batch, seed=i))
        if i % 50 == 0 or i == steps:
            iou = step.evaluate(held_out).metrics["iou"]
            print(f"step {i}: loss {out.loss:.3f}, overlap of pictures held out {iou:.1%}")
    show = {name: value[:1] for name, value in held_out.items()}
    predict = step.attach(lambda model, x: td.sigmoid(model(x)), show["x"])
    print(drawn(show["x"][0, 0], predict(show["x"])[0, 0], show["y"][0, 0]))
    plain = ((held_out["x"] > 0.5) & (held_out["y"] > 0)).sum()
    plain /= ((held_out["x"] > 0.5) | (held_out["y"] > 0)).sum()
    print(f"the network's overlap is {iou:.1%}; that of a threshold {plain:.1%}")
    return iou


if __name__ == "__main__":
    train()
