"""Learning to learn (MAML): first weights from which one step of descent fits a new sine.

    python examples/maml.py

Every task is a sine of its own height and phase, seen at ten points. The loss takes a step of
descent on those points (`td.grad` inside), asks how well the changed network does on ten others,
and is differentiated through that step. `model.apply` calls the network with weights that are not
its own.
"""

import numpy as np

import treadle as td
from treadle import losses, nn, optim

INNER = 0.02  # the rate of the step inside


def network(hidden: int = 40) -> nn.Module:
    return nn.Sequential(
        nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )


def adapted(model, weights, x, y, steps: int):
    """Weights after some steps of descent on points of one task."""

    def error(weights):
        return losses.mse(model.apply(weights, x), y)

    for _ in range(steps):
        gradients = td.grad(error)(weights)
        weights = {name: w - INNER * gradients[name] for name, w in weights.items()}
    return weights


def loss(model, tasks, steps: int = 1):
    """The mean error on the second half of each task, after descent on the first."""
    weights = model.declarations()

    def one(total, task):
        found = adapted(model, weights, task["x"], task["y"], steps)
        error = losses.mse(model.apply(found, task["x2"]), task["y2"])
        return total + error, error

    total, _ = td.scan(one, td.zeros(()), tasks)
    return total / tasks["x"].shape[0]


def sines(rng, tasks: int, points: int = 10):
    """x, y and x2, y2 are (tasks, points, 1)."""
    height, phase = rng.uniform(0.5, 5, (tasks, 1, 1)), rng.uniform(0, np.pi, (tasks, 1, 1))
    found = {}
    for end in ("", "2"):
        x = rng.uniform(-5, 5, (tasks, points, 1))
        found |= {"x" + end: x, "y" + end: height * np.sin(x - phase)}
    return {name: array.astype(np.float32) for name, array in found.items()}


def train(steps: int = 3000, lr: float = 2e-3, hidden: int = 40, tasks: int = 16):
    rng = np.random.default_rng(0)
    model = network(hidden)
    step = td.compile_step(model, loss, optim.adam(lr), sines(rng, tasks), device="cpu")
    for i in range(1, steps + 1):
        out = step(sines(rng, tasks))
        if i % 500 == 0 or i == steps:
            print(f"step {i}: error after one step inside {out.loss:.3f}")

    unseen = sines(np.random.default_rng(1), 100)
    errors = []
    for count in (0, 1, 5):
        judge = step.attach(lambda model, tasks, count=count: loss(model, tasks, count), unseen)
        errors.append(float(judge(unseen)))
        print(
            f"100 new sines, error after {count} steps of descent on ten points: {errors[-1]:.3f}"
        )
    return errors


if __name__ == "__main__":
    train()
