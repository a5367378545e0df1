"""How much a step slows down when another process keeps one processor busy.

    python bench/busy.py
    python bench/busy.py mlp_wide gpt_nano lstm --rounds 7

The step has as many threads as there are processors; a process that only counts is bound to the
first of them and stopped or let go on by turns. What is compared is the median time of a step in
the turns of either kind; with one of two processors gone, twice the time is the best there is for
equal shares, and 1.5 × if the busy process gets half of its processor.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

import treadle as td
from models import WORKLOADS, loss
from treadle import optim

BUSY = "import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True:\n    pass\n"


def median_ms(step: td.TrainStep, batch: dict[str, np.ndarray], seconds: float) -> float:
    """Of the steps that fit into a time, after a first one."""
    step(batch)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measure(name: str, rounds: int, seconds: float, busy: int) -> str:
    work = WORKLOADS[name]
    rng = np.random.default_rng(0)
    x = rng.integers(0, work.classes, work.x) if work.tokens else rng.normal(size=work.x)
    y = rng.integers(0, work.classes, work.y)
    batch = {"x": x.astype(np.int32 if work.tokens else np.float32), "y": y.astype(np.int32)}
    specs = {k: td.Spec(a.shape, td.int32 if a.dtype.kind == "i" else td.float32)
             for k, a in batch.items()}  # fmt: skip
    step = td.compile_step(
        work.make(), loss, optim.adamw(1e-3), specs, clip_norm=work.clip, device="cpu"
    )
    alone: list[float] = []
    disturbed: list[float] = []
    for _ in range(rounds):
        os.kill(busy, signal.SIGSTOP)
        alone.append(median_ms(step, batch, seconds))
        os.kill(busy, signal.SIGCONT)
        disturbed.append(median_ms(step, batch, seconds))
    ratio = statistics.median(d / a for d, a in zip(disturbed, alone, strict=True))
    times = statistics.median(alone), statistics.median(disturbed)
    return f"{name:<12}{times[0]:>10.2f}{times[1]:>12.2f}{ratio:>8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=["gpt_nano", "lstm", "gpt_char"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    cpu = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", BUSY.format(cpu=cpu)])
    try:
        print(
            f"{'':<12}{'alone ms':>10}{'busy ms':>12}{'ratio':>8}   load {os.getloadavg()[0]:.2f}"
        )
        for name in given.workloads:
            print(measure(name, given.rounds, given.seconds, busy.pid), flush=True)
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    main()
