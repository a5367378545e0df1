"""A variational autoencoder that learns to draw digits.

python examples/vae.py          # writes vae.png
"""

import struct
import zlib
from pathlib import Path

import numpy as np

import treadle as td
from treadle import data, losses, nn, optim

PIXELS, LATENT = 64, 8


class VAE(nn.Module):
    def __init__(self, hidden: int = 128):
        self.fc1 = nn.Linear(PIXELS, hidden)
        self.mean, self.log_var = nn.Linear(hidden, LATENT), nn.Linear(hidden, LATENT)
        self.fc2, self.fc3 = nn.Linear(LATENT, hidden), nn.Linear(hidden, PIXELS)

    def encode(self, x):
        h = td.relu(self.fc1(x))
        return self.mean(h), self.log_var(h)

    def decode(self, z):
        """Logits of the pixels."""
        return self.fc3(td.relu(self.fc2(z)))

    def forward(self, x):
        mean, log_var = self.encode(x)
        noise = td.random.normal(mean.shape)  # drawn inside the program, anew in every step
        return self.decode(mean + td.exp(0.5 * log_var) * noise), mean, log_var


def loss(model, x):
    """The evidence bound: how well pixels come back, and how far codes are from a normal law."""
    logits, mean, log_var = model(x)
    pixels = losses.bce_with_logits(logits, x, reduction="sum") / x.shape[0]
    spread = 0.5 * (td.square(mean) + td.exp(log_var) - 1 - log_var).sum(-1).mean()
    td.metric("pixels", pixels)
    td.metric("spread", spread)
    return pixels + spread


def sheet(images, columns, scale=6, gap=1):
    """Images of (N, 8, 8) side by side, as bytes of grey, black on white."""
    rows = len(images) // columns
    tiles = images.reshape(rows, columns, 8, 8)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, gap), (0, gap)))
    page = tiles.transpose(0, 2, 1, 3).reshape(rows * (8 + gap), columns * (8 + gap))
    grey = 255 - np.rint(255 * np.clip(page, 0, 1)).astype(np.uint8)
    return grey.repeat(scale, 0).repeat(scale, 1)


def save_png(path, grey):
    """A grey picture as a PNG file: a header, packed rows, an end."""

    def chunk(kind, content):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    height, width = grey.shape
    rows = b"".join(b"\0" + row.tobytes() for row in grey)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    packed = chunk(b"IDAT", zlib.compress(rows, 9))
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + header + packed + chunk(b"IEND", b""))


def train(epochs: int = 150, lr: float = 2e-3, out: str = "vae.png"):
    images, _ = data.load_digits()
    x = images.reshape(-1, PIXELS)
    rows, held_out = data.split(x, (0.9, 0.1))
    batches = data.ArrayLoader(rows, 64, shuffle=True)
    test = data.ArrayLoader(held_out, 64, drop_last=True)

    rate = optim.cosine(lr, steps=epochs * len(batches))
    step = td.compile_step(VAE(), loss, optim.adam(rate), next(iter(batches)), device="cpu")
    trainer = td.Trainer(step)
    history = trainer.fit(batches, epochs=epochs, validation=test, validate_every=25 * len(batches))

    given = held_out[:20]
    back = trainer.predict([given], lambda m, x: td.sigmoid(m.decode(m.encode(x)[0])))
    codes = np.random.default_rng(0).normal(size=(60, LATENT)).astype(np.float32)
    drawn = trainer.predict([codes], lambda m, z: td.sigmoid(m.decode(z)))
    pictures = np.concatenate([given, back, drawn]).reshape(-1, 8, 8)
    save_png(out, sheet(pictures, columns=20))
    print(f"{out}: digits of the data, the same after coding, and three rows that were made up")
    return history.last("val/loss").value


if __name__ == "__main__":
    train()
