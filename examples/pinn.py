"""A network that solves a differential equation: u_t = a u_xx, with second derivatives.

    python examples/pinn.py

Nothing but the equation, the start u(x, 0) = sin(πx) and the edges u = 0 is given. The solution is
exp(-aπ²t) sin(πx), which the network is compared with at the end.
"""

import numpy as np

import treadle as td
from treadle import nn, optim

A = 0.2  # how fast heat spreads
POINTS, EDGE = 256, 64  # of a batch, inside and on the edges


class Field(nn.Module):
    """(x, t) to u, for points in a row."""

    def __init__(self, width: int = 48):
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, width)
        self.third, self.last = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x, t):
        h = td.tanh(self.first(td.stack([x, t], -1)))  # (N, W)
        h = td.tanh(self.third(td.tanh(self.second(h))))
        return self.last(h)[:, 0]


def residual(model, x, t):
    """u_t − a u_xx at each point: a point's u depends on its own x and t only, so that the gradient
    of a sum is the derivative at each."""
    u_t = td.grad(lambda s: model(x, s).sum())(t)
    u_x = td.grad(lambda s: model(s, t).sum())
    u_xx = td.grad(lambda s: u_x(s).sum())(x)
    return u_t - A * u_xx


def loss(model, batch):
    inside = td.square(residual(model, batch["x"], batch["t"])).mean()
    start = model(batch["x0"], td.zeros_like(batch["x0"])) - td.sin(np.pi * batch["x0"])
    edges = model(batch["side"], batch["t0"])  # side is 0 or 1, where u is 0
    at_edges = td.square(start).mean() + td.square(edges).mean()
    td.metric("residual", inside)
    td.metric("edges", at_edges)
    return inside + 20 * at_edges


def points(seed: int):
    """Other random points for every step."""
    rng = np.random.default_rng(seed)
    uniform = {"x": POINTS, "t": POINTS, "x0": EDGE, "t0": EDGE}
    batch = {name: rng.random(count).astype(np.float32) for name, count in uniform.items()}
    return batch | {"side": rng.integers(0, 2, EDGE).astype(np.float32)}


def train(steps: int = 4000, lr: float = 5e-3, width: int = 48):
    schedule = optim.warmup_cosine(lr, warmup=max(1, steps // 40), steps=steps)
    step = td.compile_step(Field(width), loss, optim.adam(schedule), points(0), device="cpu")
    trainer = td.Trainer(step)
    trainer.fit((points(i) for i in range(steps)), steps=steps)

    side = np.linspace(0, 1, 64, dtype=np.float32)
    x, t = (grid.reshape(-1) for grid in np.meshgrid(side, side))
    exact = np.exp(-A * np.pi**2 * t) * np.sin(np.pi * x)
    found = trainer.predict([{"x": x, "t": t}], lambda model, b: model(b["x"], b["t"]))
    worst = float(np.abs(found - exact).max())
    print(f"largest error at {len(x)} points: {worst:.4f} (u is 1 at most)")
    return worst


if __name__ == "__main__":
    train()
