"""A network that knows digits learns another question from few images: is the digit odd?

    python examples/transfer.py

Its backbone is a group of its own with a tenth of the head's rate, and the statistics of its batch
norms stay (`backbone.eval()`). The head is new. The same network from scratch, on the same few
images, is what it is compared with.
"""

import treadle as td
from treadle import data, losses, nn, optim


class Net(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10):
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def loss(model, batch):
    scores = model(batch["x"])
    is_right = (scores.argmax(-1) == batch["y"]).astype(td.float32)
    td.metric("accuracy", is_right.mean(), is_right.shape[0])
    return losses.cross_entropy(scores, batch["y"])


def two_groups(lr: float):
    """Momentum and a small rate for what is known, Adam for what is new."""
    return optim.groups(
        ("backbone.*", optim.sgd(0.1 * lr, momentum=0.9)),
        ("head.*", optim.adamw(lr, weight_decay=0.01)),
    )


def fit(model, optimizer, rows, held_out, epochs, start=None):
    """Parameters after training, and the share of held-out images that is read right."""
    batches = data.ArrayLoader(rows, min(32, len(rows["y"])), shuffle=True)
    step = td.compile_step(model, loss, optimizer, next(iter(batches)), device="cpu")
    if start is not None:
        step.load_params(start, strict=False)
    for _ in range(epochs):
        for batch in batches:
            step(batch)
    return step.params, step.evaluate(held_out).metrics["accuracy"]


def train(epochs: int = 20, few: int = 40, lr: float = 1e-2, width: int = 16):
    images, labels = data.load_digits()
    arrays = {"x": images[:, None], "y": labels}
    rows, held_out = data.split(arrays, (0.6, 0.4), stratify=labels)
    params, accuracy = fit(Net(width), optim.adamw(lr), rows, held_out, epochs)
    print(f"ten digits, from {len(rows['y'])} images: {accuracy:.1%} of those held out are right")

    odd = {"x": held_out["x"], "y": held_out["y"] % 2}  # images that the backbone has not seen
    rows, held_out = {n: a[:few] for n, a in odd.items()}, {n: a[few:] for n, a in odd.items()}
    _, scratch = fit(Net(width, 2), optim.adamw(lr), rows, held_out, 4 * epochs)
    print(f"odd or even from scratch, from {few} images: {scratch:.1%}")

    model = Net(width, 2)
    model.backbone.eval()  # running statistics stay as they were learned
    known = {name: value for name, value in params.items() if name.startswith("backbone.")}
    _, transferred = fit(model, two_groups(lr), rows, held_out, 4 * epochs, known)
    print(f"odd or even from the same {few}, with the backbone: {transferred:.1%}")
    return scratch, transferred


if __name__ == "__main__":
    train()
