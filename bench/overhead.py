"""What a step costs besides its arithmetic: microseconds around a program of almost nothing.

    python bench/overhead.py [--seconds 3] [--device cpu]

The model has four weights; the batch is checked, the program launched and the result made as for
any other. `step(batch)` is one step a call, `step.run` many steps of a list in one call. Medians of
short turns. Last, what looking at the labels costs: steps of the smallest workload of `cpu.py` with
it and without it, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import treadle as td
from models import WORKLOADS, loss
from treadle import nn, optim

TURN = 200  # steps


def each(run: Callable[[], object], steps: int, seconds: float) -> float:
    """Seconds of a step, the median of turns."""
    times = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times)


def indices(device: str, seconds: float) -> tuple[float, float]:
    """Seconds of a step of the small MLP with `check_indices`, and what that adds: medians."""
    workload = WORKLOADS["mlp"]
    batch = workload.batch()
    checked, plain = (
        td.compile_step(
            workload.make(), loss, optim.adamw(1e-3), workload.specs(), device=device,
            options=td.CompileOptions(check_indices=is_checked),
        )
        for is_checked in (True, False)
    )  # fmt: skip

    def turn(step: td.TrainStep) -> float:
        start = time.perf_counter()
        for _ in range(TURN // 4):
            step(batch)
        return (time.perf_counter() - start) / (TURN // 4)

    turn(checked), turn(plain)
    times, added = [], []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 3:
        pair = turn(checked), turn(plain)
        times.append(pair[0])
        added.append(pair[0] - pair[1])
    return statistics.median(times), statistics.median(added)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    batch = {"x": np.ones((2, 4), np.float32), "y": np.ones((2, 1), np.float32)}
    specs = {name: td.Spec(a.shape) for name, a in batch.items()}
    step = td.compile_step(
        nn.Linear(4, 1, bias=False), lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(),
        optim.sgd(1e-3), specs, device=given.device,
    )  # fmt: skip
    step.run([batch] * TURN)

    def single() -> None:
        for _ in range(TURN):
            step(batch)

    def looked_at() -> None:
        for _ in range(TURN):
            float(step(batch).loss)

    for name, run in (("step(batch)", single), ("step(batch).loss", looked_at)):
        print(f"{name:20s}   {1e6 * each(run, TURN, given.seconds):6.1f} µs")
    many = each(lambda: step.run([batch] * TURN), TURN, given.seconds)
    print(f"{f'step.run of {TURN}':20s}   {1e6 * many:6.1f} µs")
    whole, added = indices(given.device, given.seconds)
    print(f"{WORKLOADS['mlp'].title}: {1e6 * whole:.1f} µs a step, of which looking at the labels "
          f"{1e6 * added:.2f} µs ({added / whole:.2%})")  # fmt: skip


if __name__ == "__main__":
    main()
