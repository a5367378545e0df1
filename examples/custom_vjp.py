"""A backward of one's own: weights that are +1 or -1, trained by a straight-through gradient.

python examples/custom_vjp.py
"""

import numpy as np

import treadle as td
from treadle import data, losses, nn, optim


def ones_with_sign(w):
    return td.where(w >= 0, td.ones_like(w), -td.ones_like(w))


def straight_through(ct, out, w):
    """As if the sign were the identity, but only where |w| ≤ 1: weights do not run away."""
    return (ct * (td.abs(w) <= 1).astype(ct.dtype),)


# The gradient of a sign is zero everywhere. This one is not, and treadle checks its number, shape
# and dtype while the step is compiled.
binary = td.custom_vjp(ones_with_sign, straight_through)


class BinaryLinear(nn.Module):
    """x @ sign(W).T, scaled so that sums have the size of one input."""

    def __init__(self, inputs: int, outputs: int):
        self.weight = nn.Parameter((outputs, inputs), nn.init.uniform(-0.5, 0.5))
        self.bias = nn.Parameter((outputs,), nn.init.zeros)

    def forward(self, x):
        scale = x.shape[-1] ** -0.5
        return td.linear(x, binary(self.weight)) * scale + self.bias


class Net(nn.Module):
    def __init__(self, hidden: int):
        self.fc1, self.norm = BinaryLinear(64, hidden), nn.BatchNorm1d(hidden)
        self.fc2 = BinaryLinear(hidden, 10)

    def forward(self, x):
        return self.fc2(td.relu(self.norm(self.fc1(x))))


def loss(model, batch):
    scores = model(batch["x"])
    is_right = (scores.argmax(-1) == batch["y"]).astype(td.float32)
    td.metric("accuracy", is_right.mean(), is_right.shape[0])
    return losses.cross_entropy(scores, batch["y"])


def train(epochs: int = 30, lr: float = 1e-2, hidden: int = 256):
    images, labels = data.load_digits()
    arrays = {"x": images.reshape(-1, 64), "y": labels}
    rows, held_out = data.split(arrays, (0.8, 0.2), stratify=labels)
    batches = data.ArrayLoader(rows, 64, shuffle=True)
    test = data.ArrayLoader(held_out, 120)

    rate = optim.cosine(lr, steps=epochs * len(batches))
    step = td.compile_step(Net(hidden), loss, optim.adam(rate), next(iter(batches)), device="cpu")
    trainer = td.Trainer(step)
    trainer.fit(batches, epochs=epochs, validation=test, validate_every=5 * len(batches))
    accuracy = trainer.evaluate(test)["accuracy"]
    kept = np.packbits(step.params["fc1.weight"] >= 0).nbytes
    print(f"{accuracy:.1%} of held-out digits with weights of one bit; the first layer: {kept} B")
    return accuracy


if __name__ == "__main__":
    train()
