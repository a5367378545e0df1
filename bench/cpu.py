"""Whole training steps on the CPU, float32, AdamW: Treadle and PyTorch eager in turns.

usage: python bench/cpu.py [workload ...] [--rounds 7] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import treadle as td
from models import WORKLOADS, Workload, loss
from treadle import optim


def treadle_step(work: Workload) -> tuple[Callable[[], float], float]:
    """A step and the seconds until its first result."""
    start = time.perf_counter()
    step = td.compile_step(
        work.make(), loss, optim.adamw(1e-3), work.specs(), clip_norm=work.clip, device="cpu"
    )
    batch = work.batch()
    step(batch)
    return lambda: step(batch).loss, time.perf_counter() - start


def torch_step(work: Workload) -> tuple[Callable[[], float], float]:
    import torch
    import torch.nn.functional as F

    start = time.perf_counter()
    model = work.make_torch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    batch = work.batch()
    x, y = torch.tensor(batch["x"]), torch.tensor(batch["y"]).long().reshape(-1)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        value = F.cross_entropy(model(x).reshape(-1, work.classes), y)
        value.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        return float(value.detach())

    step()
    return step, time.perf_counter() - start


def median_ms(step: Callable[[], float], seconds: float) -> float:
    """The median over as many steps as fit into some seconds, at least three."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure(name: str, rounds: int) -> dict[str, float | str]:
    work = WORKLOADS[name]
    (ours, first), (theirs, torch_first) = treadle_step(work), torch_step(work)
    pairs = [(median_ms(ours, 0.3), median_ms(theirs, 0.3)) for _ in range(rounds)]
    return {
        "workload": name,
        "treadle_ms": statistics.median(a for a, _ in pairs),
        "torch_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
        "treadle_first_s": first,
        "torch_first_s": torch_first,
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    print(
        f"{'workload':<10}{'treadle ms':>12}{'torch ms':>10}{'ratio':>8}{'first s':>9}{'torch':>8}"
    )
    for name in arguments.workloads:
        row = measure(name, arguments.rounds)
        rows.append(row)
        print(
            f"{name:<10}{row['treadle_ms']:>12.2f}{row['torch_ms']:>10.2f}{row['ratio']:>8.2f}"
            f"{row['treadle_first_s']:>9.2f}{row['torch_first_s']:>8.2f}",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
