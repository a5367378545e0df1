"""An ensemble that knows where it knows nothing: eight networks as one program.

python examples/ensemble.py
treadle train examples/ensemble.py --set members=32

Each member sees bootstrap samples of its own. Where there was data they agree, and the farther from
it the more they differ: the spread of their predictions is drawn beside the mean.
"""

import numpy as np

import treadle as td
from treadle import losses, nn, optim


class Net(nn.Module):
    def __init__(self, hidden: int):
        self.first, self.second = nn.Linear(1, hidden), nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.last(td.tanh(self.second(td.tanh(self.first(3 * x)))))


def loss(model, batch):
    return losses.mse(model(batch["x"]), batch["y"])


def curve(x):
    return np.sin(3 * x) + 0.3 * x


def train(members: int = 8, steps: int = 1500, hidden: int = 32, rows: int = 60, seed: int = 0):
    rng = np.random.default_rng(seed)
    sides = rng.choice([-1.0, 1.0], (rows, 1))  # nothing in the middle, nor outside
    x = (sides * rng.uniform(0.6, 1.6, (rows, 1))).astype(np.float32)
    y = (curve(x) + rng.normal(0, 0.05, x.shape)).astype(np.float32)

    spec = {"x": td.Spec((rows, 1)), "y": td.Spec((rows, 1))}
    step = td.compile_step(Net(hidden), loss, optim.adamw(3e-3), spec, seed=seed)
    ensemble = td.ensemble(step, members, own_batches=True, weight_decay=0.0)
    drawn = rng.integers(0, rows, (members, rows))  # rows of each member
    batch = {"x": x[drawn], "y": y[drawn]}  # (members, rows, 1)
    history = ensemble.run([batch] * steps)
    print(f"mean loss of {members} members: {history[0].mean():.3f} → {history[-1].mean():.4f}")

    at = np.linspace(-2.8, 2.8, 29, dtype=np.float32)[:, None]
    predict = ensemble.attach(lambda model, x: model(x), td.Spec(at.shape))
    mean, spread = predict.mean(at)[:, 0], predict.std(at)[:, 0]
    seen = (abs(at[:, 0]) > 0.6) & (abs(at[:, 0]) < 1.6)
    for place, value, width, is_seen in zip(at[:, 0], mean, spread, seen, strict=True):
        bar = "─" * min(40, round(20 * float(width)))
        print(f"{place:5.1f} {'data' if is_seen else '    '} {value:6.2f} ± {width:4.2f} {bar}")
    ratio = float(spread[~seen].mean() / spread[seen].mean())
    print(f"spread where there is no data over spread where there is: {ratio:.1f}")
    return ratio


if __name__ == "__main__":
    train()
