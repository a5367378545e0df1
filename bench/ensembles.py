"""n small networks as one program, beside n steps in turn: microseconds of one step of all.

    python bench/ensembles.py [--members 8] [--rounds 7]

Both are timed in turns in one process, each from Python, and by lists of batches in native code.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import treadle as td
from treadle import losses, nn, optim

SIZES = {"16-32-1, batch 32": (16, 32, 1, 32), "64-64-64-10, batch 64": (64, 64, 10, 64)}
TURN = 0.2  # seconds


def compiled(inputs: int, hidden: int, outputs: int, rows: int) -> tuple[td.TrainStep, dict]:
    layers = [nn.Linear(inputs, hidden), nn.ReLU()]
    if outputs > 1:
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(hidden, outputs))
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(rows, inputs)).astype(np.float32),
        "y": rng.normal(size=(rows, outputs)).astype(np.float32),
    }

    def loss(model, batch):
        return losses.mse(model(batch["x"]), batch["y"])

    return td.compile_step(model, loss, optim.adamw(1e-3), batch), batch


def microseconds(run: Callable[[], object], steps: int) -> float:
    """Of one step, over a turn."""
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < TURN:
        run()
        calls += 1
    return 1e6 * spent / (calls * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    n = asked.members
    print("| network | one program | n steps | ratio | native: one program | n steps | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, sizes in SIZES.items():
        step, batch = compiled(*sizes)
        together = td.ensemble(step, n)
        apart = [together.member(i) for i in range(n)]
        many = [batch] * 50
        contenders: list[tuple[Callable[[], object], int]] = [
            (lambda e=together, b=batch: e(b).losses, 1),
            (lambda s=apart, b=batch: [one(b).loss for one in s], 1),
            (lambda e=together, b=many: e.run(b), 50),
            (lambda s=apart, b=many: [one.run(b).losses for one in s], 50),
        ]
        times: list[list[float]] = [[] for _ in contenders]
        for _ in range(asked.rounds):
            for found, (run, steps) in zip(times, contenders, strict=True):
                found.append(microseconds(run, steps))
        a, b, c, d = (statistics.median(t) for t in times)
        print(f"| {name} | {a:.0f} | {b:.0f} | {b / a:.1f} | {c:.0f} | {d:.0f} | {d / c:.1f} |")


if __name__ == "__main__":
    main()
