"""What `Trainer.fit` costs over a bare loop, on the MLP workload.

    python bench/trainer.py                # 7 rounds of 2,000 steps each
    python bench/trainer.py --rounds 15 --steps 4000

Both train the same step on the same loader, `for batch in loader: step(batch)` and
`Trainer(step).fit(loader, steps=...)`, taking turns; what is compared is the processor time of
this process and its wall time, each as a median over rounds of one round's ratio. The trainer has
what it has by default: history, a check for NaN, progress (as lines, and as a bar drawn into a
file), and once a callback and a CSV logger too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import treadle as td
from models import WORKLOADS, loss
from treadle import data, optim

ROWS = 12_800  # 100 batches a pass


def make() -> tuple[td.TrainStep, data.ArrayLoader]:
    work = WORKLOADS["mlp"]
    step = td.compile_step(work.make(), loss, optim.adamw(1e-3), work.specs(), device="cpu")
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((ROWS, *work.x[1:])).astype(np.float32),
        "y": rng.integers(0, work.classes, ROWS).astype(np.int32),
    }
    return step, data.ArrayLoader(arrays, work.x[0], shuffle=True)


def bare(step: td.TrainStep, loader: data.ArrayLoader, steps: int) -> None:
    done = 0
    while True:
        for batch in loader:
            step(batch)
            done += 1
            if done == steps:
                return


def trained(
    *callbacks: td.callbacks.Callback, progress: str, folder: Path | None = None
) -> Callable:
    def run(step: td.TrainStep, loader: data.ArrayLoader, steps: int) -> None:
        loggers = [] if folder is None else [td.loggers.CSVLogger(folder / "log.csv")]
        trainer = td.Trainer(step, callbacks, loggers, progress=progress)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(loader, steps=steps)

    return run


def times(run: Callable, step: td.TrainStep, loader: data.ArrayLoader, steps: int) -> list[float]:
    wall, used = time.perf_counter(), time.process_time()
    run(step, loader, steps)
    return [time.perf_counter() - wall, time.process_time() - used]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    step, loader = make()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TTY_COMPATIBLE"] = "1"
        monitor = td.callbacks.Lambda(on_step_end=lambda run: None)
        contenders = {
            "off": trained(progress="off"),
            "lines": trained(progress="lines"),
            "bar": trained(progress="bar"),
            "lines, callback, CSV": trained(monitor, progress="lines", folder=Path(folder)),
        }
        bare(step, loader, options.steps)  # warm
        ratios: dict[str, list[list[float]]] = {name: [] for name in contenders}
        base: list[float] = []
        for _ in range(options.rounds):
            for name, run in contenders.items():
                before = times(bare, step, loader, options.steps)
                taken = times(run, step, loader, options.steps)
                after = times(bare, step, loader, options.steps)
                means = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
                ratios[name].append([t / m for t, m in zip(taken, means, strict=True)])
                base += [before[0], after[0]]
    print(f"bare loop: {1e3 * statistics.median(base) / options.steps:.3f} ms a step")
    for name, found in ratios.items():
        wall, used = (sorted(column) for column in zip(*found, strict=True))
        quartiles = [wall[len(wall) // 4], wall[-1 - len(wall) // 4]]
        print(
            f"{name:<24} wall {statistics.median(wall) - 1:+.1%} "
            f"(quartiles {quartiles[0] - 1:+.1%} to {quartiles[1] - 1:+.1%}), "
            f"processor {statistics.median(used) - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
