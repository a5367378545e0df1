"""A vision transformer: patches of an image as tokens, and one more token that is asked for it.

    python examples/vit.py

Digits of 8 × 8 are sixteen patches of 2 × 2. A convolution with a stride projects them, positions
are learned, and the class is read off the first token after a few encoder layers.
"""

import treadle as td
from treadle import data, losses, nn, optim


class ViT(nn.Module):
    def __init__(
        self,
        side: int = 8,
        patch: int = 2,
        width: int = 64,
        heads: int = 4,
        layers: int = 3,
        classes: int = 10,
    ):
        tokens = (side // patch) ** 2 + 1
        small = nn.init.truncated_normal(std=0.02)
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.cls_token = nn.Parameter((1, 1, width), small)
        self.positions = nn.Parameter((1, tokens, width), small)
        self.encoder = nn.TransformerEncoder(
            lambda: nn.TransformerEncoderLayer(
                width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            ),
            layers,
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, patches, D)
        first = self.cls_token.expand(x.shape[0], -1, -1)
        x = self.encoder(td.concat([first, x], 1) + self.positions)
        return self.head(x[:, 0])


def loss(model, batch):
    scores = model(batch["x"])
    is_right = (scores.argmax(-1) == batch["y"]).astype(td.float32)
    td.metric("accuracy", is_right.mean(), is_right.shape[0])
    return losses.cross_entropy(scores, batch["y"], label_smoothing=0.1)


def train(epochs: int = 30, lr: float = 2e-3, width: int = 64, layers: int = 3, batch: int = 64):
    images, labels = data.load_digits()
    arrays = {"x": images[:, None], "y": labels}
    rows, held_out = data.split(arrays, (0.8, 0.2), stratify=labels)
    batches = data.ArrayLoader(rows, batch, shuffle=True)
    steps = epochs * len(batches)

    rate = optim.warmup_cosine(lr, warmup=steps // 10 + 1, steps=steps + 1)
    step = td.compile_step(
        ViT(width=width, layers=layers), loss, optim.adamw(rate, weight_decay=0.05),
        next(iter(batches)), device="cpu", clip_norm=1.0,
    )  # fmt: skip
    for epoch in range(epochs):
        for rows_of_it in batches:
            out = step(rows_of_it)
        if (epoch + 1) % 5 == 0 or epoch + 1 == epochs:
            found = step.evaluate(held_out)
            accuracy = found.metrics["accuracy"]
            print(f"epoch {epoch + 1}: loss {out.loss:.3f}, {accuracy:.1%} of those held out")
    print(f"{accuracy:.1%} of {len(held_out['y'])} digits are read right")
    return accuracy


if __name__ == "__main__":
    train()
