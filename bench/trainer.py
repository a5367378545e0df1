"""What `Trainer.fit` costs over a bare loop, on the MLP workload.

    python bench/trainer.py                # 9 rounds of 500 steps each
    python bench/trainer.py --rounds 15 --steps 1000

Both train the same step on the same data, `for batch in loader: step(batch).loss` and
`Trainer(step).fit(loader, steps=...)`, taking turns. The loader notes when each batch is asked for;
what is compared is the time from one batch to the next, of all rounds together: its median, and the
time that the fastest 5 % stay below, which other programs disturb least. The trainer has what it
has by default: history, a check for NaN, progress (off, as lines, as a bar drawn into a file); and
once a callback and a CSV logger too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

import treadle as td
from models import WORKLOADS, loss
from treadle import data, optim

ROWS = 12_800  # 100 batches a pass
SKIPPED = 20  # steps at the beginning of each turn


class Clocked:
    """A loader that notes when batches are asked for."""

    def __init__(self, loader: data.ArrayLoader):
        self._loader, self.times = loader, [0.0]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for batch in self._loader:
            self.times.append(time.perf_counter())
            yield batch

    def state_dict(self) -> dict[str, int]:
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._loader.load_state_dict(state)


def make() -> tuple[td.TrainStep, data.ArrayLoader]:
    work = WORKLOADS["mlp"]
    step = td.compile_step(work.make(), loss, optim.adamw(1e-3), work.specs(), device="cpu")
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((ROWS, *work.x[1:])).astype(np.float32),
        "y": rng.integers(0, work.classes, ROWS).astype(np.int32),
    }
    return step, data.ArrayLoader(arrays, work.x[0], shuffle=True)


def bare(step: td.TrainStep, loader: Clocked, steps: int) -> None:
    done = 0
    while True:
        for batch in loader:
            float(step(batch).loss)  # a loop that does not look at its loss is nobody's
            done += 1
            if done == steps:
                return


def trained(
    *callbacks: td.callbacks.Callback, progress: str, folder: Path | None = None
) -> Callable[[td.TrainStep, Clocked, int], None]:
    def run(step: td.TrainStep, loader: Clocked, steps: int) -> None:
        loggers = [] if folder is None else [td.loggers.CSVLogger(folder / "log.csv")]
        trainer = td.Trainer(step, callbacks, loggers, progress=progress)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(loader, steps=steps)

    return run


def intervals(run: Callable, step: td.TrainStep, loader: data.ArrayLoader, steps: int) -> list:
    """Milliseconds from one batch to the next."""
    clocked = Clocked(loader)
    run(step, clocked, steps)
    return (1e3 * np.diff(clocked.times[1:]))[SKIPPED:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    step, loader = make()
    first = step.state_dict()
    os.environ["TTY_COMPATIBLE"] = "1"  # the bar is drawn although nobody sees it
    with tempfile.TemporaryDirectory() as folder:
        nothing = td.callbacks.Lambda(on_step_end=lambda run: None)
        contenders = {
            "bare loop": bare,
            "fit, no progress": trained(progress="off"),
            "fit, lines": trained(progress="lines"),
            "fit, a bar": trained(progress="bar"),
            "fit, lines, callback, CSV": trained(nothing, progress="lines", folder=Path(folder)),
        }
        bare(step, Clocked(loader), options.steps)  # warm
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, run in contenders.items():
                step.load_state_dict(first)  # a loss of nearly 0 makes denormals, which are slow
                found[name] += intervals(run, step, loader, options.steps)
    base = np.quantile(found["bare loop"], [0.05, 0.5])
    print(f"{'':<28}{'fastest 5 %':>16}{'':>9}{'median':>10}")
    for name, times in found.items():
        low, middle = np.quantile(times, [0.05, 0.5])
        print(
            f"{name:<28}{low:>13.4f} ms{low / base[0] - 1:>+9.1%}{middle:>10.4f} ms"
            f"{middle / base[1] - 1:>+9.1%}"
        )


if __name__ == "__main__":
    main()
