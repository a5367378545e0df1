"""Draw a digit: a page on which a network learns to read, from the visitor's own strokes too.

treadle export-web examples/web_digits.py --out digits
python -m http.server --directory digits

The page trains on the shipped digits in the browser; weights that it saves load in Python.
`python examples/web_digits.py` trains the same step here, to compare.
"""

import treadle as td
from treadle import data, losses, nn, optim


class Net(nn.Module):
    def __init__(self, width: int = 8):
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width * 4, 10)

    def forward(self, x):
        x = td.max_pool(td.relu(self.conv1(x)), 2)  # (N, W, 4, 4)
        x = td.max_pool(td.relu(self.conv2(x)), 2)  # (N, 2W, 2, 2)
        return self.fc(x.flatten(1))


def loss(model, batch):
    scores = model(batch["x"])
    td.metric("accuracy", (scores.argmax(-1) == batch["y"]).astype(td.float32).mean())
    return losses.cross_entropy(scores, batch["y"])


def rows(seed: int = 0):
    """Images and labels to train on, and 360 held out."""
    images, labels = data.load_digits()  # (1797, 8, 8), 0 to 1
    arrays = {"x": images[:, None], "y": labels}
    return data.split(arrays, (0.8, 0.2), seed=seed, stratify=labels)


def compiled(width: int = 8, batch: int = 32, lr: float = 1e-2, seed: int = 0):
    specs = {"x": td.Spec((batch, 1, 8, 8)), "y": td.Spec((batch,), td.int32)}
    # The rate stays at a tenth of its peak: the page goes on learning as long as one likes.
    rate = optim.warmup_cosine(lr, warmup=10, steps=400, final=lr / 10)
    return td.compile_step(Net(width), loss, optim.adamw(rate), specs, device="cpu", seed=seed)


def export_web(folder: str, width: int = 8, batch: int = 32, lr: float = 1e-2):
    step = compiled(width, batch, lr)
    train_rows, held_out = rows()
    predict = step.attach(
        lambda model, b: td.softmax(model(b["x"])), {"x": td.Spec((1, 1, 8, 8))}
    )  # fmt: skip
    return step.export_web(
        folder, page="digits", data=train_rows, held_out=held_out, forwards={"predict": predict}
    )


def train(epochs: int = 10, width: int = 8, batch: int = 32, lr: float = 1e-2):
    step = compiled(width, batch, lr)
    train_rows, held_out = rows()
    batches = data.ArrayLoader(train_rows, batch, shuffle=True, seed=0)
    td.Trainer(step).fit(batches, epochs=epochs)
    accuracy = step.evaluate(held_out).metrics["accuracy"]
    print(f"{accuracy:.1%} of {len(held_out['y'])} digits are read right")
    return accuracy


if __name__ == "__main__":
    train()
