"""n small networks as one program, beside n steps in turn: microseconds of one step of all.

    TREADLE_THREADS=1 python bench/ensembles.py --clock process_time [--members 8] [--rounds 7]

Both are timed in turns in one process, each from Python, and by lists of batches in native code. On
a machine with other work, processor time of one thread is what can be compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn, optim

TURN = 0.2  # seconds
STEPS = 50  # of a native run
CLOCKS = {"perf_counter": time.perf_counter, "process_time": time.process_time}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        self.rnn, self.out = nn.LSTM(6, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: td.Tensor) -> td.Tensor:
        states, _ = self.rnn(x)
        return self.out(states[:, -1])


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def cnn() -> nn.Module:
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(8 * 16, 3))


# A network, the shape of its input and the number of its outputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP 16-32-1, batch 32": (lambda: mlp(16, 32, 1), (32, 16), 1),
    "MLP 64-64-64-10, batch 64": (lambda: mlp(64, 64, 64, 10), (64, 64), 10),
    "convolutions of 8 × 8, batch 16": (cnn, (16, 1, 8, 8), 3),
    "LSTM 6-16, 7 steps, batch 16": (Recurrent, (16, 7, 6), 3),
}


def compiled(
    make: Callable[[], nn.Module], shape: tuple[int, ...], outputs: int, device: str
) -> tuple[td.TrainStep, dict[str, Any]]:
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=shape).astype(np.float32),
        "y": rng.normal(size=(shape[0], outputs)).astype(np.float32),
    }

    def loss(model, batch):
        return losses.mse(model(batch["x"]), batch["y"])

    return td.compile_step(make(), loss, optim.adamw(1e-3), batch, device=device), batch


def microseconds(run: Callable[[], object], steps: int, clock: Callable[[], float]) -> float:
    """Of one step, over a turn."""
    calls, start = 0, clock()
    while (spent := clock() - start) < TURN:
        run()
        calls += 1
    return 1e6 * spent / (calls * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="perf_counter")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    n, clock = asked.members, CLOCKS[asked.clock]
    print("| network | one program | n steps | ratio | native: one program | n steps | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, network in NETWORKS.items():
        step, batch = compiled(*network, asked.device)
        together = td.ensemble(step, n)
        apart = [together.member(i) for i in range(n)]
        many = [batch] * STEPS
        contenders: list[tuple[Callable[[], object], int]] = [
            (lambda e=together, b=batch: e(b).losses, 1),
            (lambda s=apart, b=batch: [one(b).loss for one in s], 1),
            (lambda e=together, b=many: e.run(b), STEPS),
            (lambda s=apart, b=many: [one.run(b).losses for one in s], STEPS),
        ]
        times: list[list[float]] = [[] for _ in contenders]
        for _ in range(asked.rounds):
            for found, (run, steps) in zip(times, contenders, strict=True):
                found.append(microseconds(run, steps, clock))
        a, b, c, d = (statistics.median(t) for t in times)
        print(f"| {name} | {a:.0f} | {b:.0f} | {b / a:.1f} | {c:.0f} | {d:.0f} | {d / c:.1f} |")


if __name__ == "__main__":
    main()
