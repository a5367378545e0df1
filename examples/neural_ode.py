"""A neural ODE: the law of motion is a network, and what is seen are points of its paths.

    python examples/neural_ode.py

Paths of a spiral are observed at a few times, with noise. The network gives the velocity at a
place; Runge and Kutta's method of fourth order goes along it, as a `td.scan`, and training goes
back through the solver. At the end a path from a new start is compared with the truth.
"""

import numpy as np

import treadle as td
from treadle import losses, nn, optim

TIMES, STEP = 20, 0.15  # of a path


class Velocity(nn.Module):
    def __init__(self, hidden: int = 64):
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, y):
        return self.net(y**3)  # cubes, as in the paper: the spiral is a linear law of these


def solve(velocity, start, times: int, h: float):
    """Places at `times` equal steps after the start: (times, B, 2)."""

    def move(y, _):
        k1 = velocity(y)
        k2 = velocity(y + h / 2 * k1)
        k3 = velocity(y + h / 2 * k2)
        k4 = velocity(y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, y

    _, path = td.scan(move, start, length=times)
    return path


def loss(model, batch):
    path = solve(model, batch["start"], batch["path"].shape[0], STEP)
    return losses.mse(path, batch["path"])


def spiral(y):
    """The truth: cubes of the place, turned and shrunk."""
    return y**3 @ np.array([[-0.1, -2.0], [2.0, -0.1]])


def true_path(start, times: int, h: float, fine: int = 50):
    """Many small steps of Euler's method."""
    y, path = start, []
    for _ in range(times):
        for _ in range(fine):
            y = y + h / fine * spiral(y + h / fine / 2 * spiral(y))
        path.append(y)
    return np.stack(path)


def observed(rng, rows: int, times: int = TIMES, noise: float = 0.02):
    angles, radii = rng.uniform(0, 2 * np.pi, rows), rng.uniform(0.8, 1.6, rows)
    start = np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1)
    path = true_path(start, times, STEP)
    seen = path + noise * rng.normal(size=path.shape)
    return {"start": start.astype(np.float32), "path": seen.astype(np.float32)}


def train(steps: int = 1500, lr: float = 1e-2, hidden: int = 64, paths: int = 256, batch: int = 32):
    rng = np.random.default_rng(0)
    data = observed(rng, paths)
    rate = optim.cosine(lr, steps=steps + 1)
    example = {"start": data["start"][:batch], "path": data["path"][:, :batch]}
    step = td.compile_step(
        Velocity(hidden), loss, optim.adam(rate), example, device="cpu", clip_norm=1.0
    )
    for i in range(1, steps + 1):
        rows = rng.choice(paths, batch, replace=False)
        out = step({"start": data["start"][rows], "path": data["path"][:, rows]})
        if i % 100 == 0 or i == steps:
            print(f"step {i}: mean squared error {out.loss:.5f}")

    start = np.array([[1.2, 0.3]], np.float32)
    go = step.attach(lambda model, y: solve(model, y, TIMES, STEP), start)
    found, truth = go(start)[:, 0], true_path(start.astype(np.float64), TIMES, STEP)[:, 0]
    for i in range(3, TIMES, 4):
        (x, y), (u, v) = found[i], truth[i]
        print(f"t = {STEP * (i + 1):.2f}: found ({x:+.3f}, {y:+.3f}), truth ({u:+.3f}, {v:+.3f})")
    worst = float(np.abs(found - truth).max())
    print(f"largest error along a path that was not seen: {worst:.3f}")
    return worst


if __name__ == "__main__":
    train()
