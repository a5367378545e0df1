"""A network that reads handwritten digits, trained and then served over HTTP.

python examples/serve_digits.py
treadle serve examples/serve_digits.py
curl -s localhost:8000/v1
"""

import numpy as np

import treadle as td
from treadle import data, losses, nn, optim

WEIGHTS = "digits.safetensors"


class Net(nn.Module):
    def __init__(self, hidden: int = 64):
        self.first = nn.Linear(64, hidden)
        self.second = nn.Linear(hidden, 10)

    def forward(self, images):  # (..., 8, 8), 0 to 1
        x = images.reshape(*images.shape[:-2], 64)
        return self.second(td.relu(self.first(x)))


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def read(model, image):
    """What a request gets: the digit, and how likely each is."""
    scores = model(image)
    return {"digit": scores.argmax(-1), "probabilities": td.softmax(scores)}


def forwards(weights: str = WEIGHTS):
    """What `treadle serve` calls: compiled for one image; requests are put together by it."""
    forward = td.compile_forward(Net(), read, td.Spec((8, 8)), device="cpu")
    forward.load(weights)
    return {"digits": forward}


def train(epochs: int = 20, lr: float = 3e-3, weights: str = WEIGHTS, seed: int = 0):
    images, labels = data.load_digits()
    rows, held_out = data.split({"x": images, "y": labels}, (0.8, 0.2), seed=seed, stratify=labels)
    batches = data.ArrayLoader(rows, 32, shuffle=True, seed=seed)
    step = td.compile_step(
        Net(), loss, optim.adamw(lr), next(iter(batches)), device="cpu", seed=seed
    )
    td.Trainer(step).fit(batches, epochs=epochs)
    attached = step.attach(read, td.Spec((8, 8)))
    attached.save(weights)
    right = [attached(x)["digit"] == y for x, y in zip(held_out["x"], held_out["y"], strict=True)]
    print(
        f"{np.mean(right):.1%} of {len(right)} digits are read right; {weights} is there to serve"
    )


if __name__ == "__main__":
    train()
