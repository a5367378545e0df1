"""Time against memory: a workload's step under smaller and smaller budgets, each bit the same.

    python bench/memory_budget.py                       # GPT 6 × 384 on the CPU, with the picture
    python bench/memory_budget.py gpt2_b32 --device cuda --budgets 1 0.75 0.6 0.5

Steps take turns; the least of all rounds counts. `--processor` takes the processor time of one
thread on the CPU, which other programs on the machine disturb less. Losses are compared bit by bit:
on a GPU steps are deterministic. Figures go to bench/results/, the picture to docs/images/.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import treadle as td
from models import WORKLOADS, loss
from treadle import optim
from treadle.base.errors import OutOfMemoryError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "memory_budget.json"
PICTURE = ROOT / "docs" / "images" / "memory_budget.png"


def compiled(name: str, device: str, budget: float) -> td.TrainStep:
    work = WORKLOADS[name]
    return td.compile_step(
        work.make(), loss, optim.adamw(1e-4), work.specs(), clip_norm=work.clip, device=device,
        precision="bfloat16" if device == "cuda" else "float32",
        options=td.CompileOptions(memory_budget=budget, deterministic=True),
    )  # fmt: skip


def measured(name: str, device: str, budgets: list[float], rounds: int, clock: Any) -> list[Any]:
    """A row for each budget that can be reached: bytes, arithmetic, time, and losses."""
    steps: dict[float, td.TrainStep] = {}
    for budget in budgets:
        try:
            steps[budget] = compiled(name, device, budget)
        except OutOfMemoryError as error:
            print(error)
    work = WORKLOADS[name]
    losses = {b: [float(step(work.batch(i)).loss) for i in range(3)] for b, step in steps.items()}
    times: dict[float, list[float]] = {b: [] for b in steps}
    for _ in range(rounds):
        for budget, step in steps.items():
            start = clock()
            float(step(work.batch(0)).loss)
            times[budget].append(clock() - start)
    rows = []
    for budget, step in steps.items():
        program = step.report.programs[0]
        rows.append({
            "budget": budget, "arena": program.arena, "peak": step.report.peak_bytes,
            "gflop": program.flops / 1e9, "again": sum(k.calls for k in program.again),
            "ms": 1e3 * min(times[budget]), "losses": losses[budget],
            "same bits": losses[budget] == losses[budgets[0]],
            "schedule_s": step.report.seconds.get("schedule", 0.0),
        })  # fmt: skip
    return rows


def shown(rows: list[Any]) -> str:
    first = rows[0]
    lines = [
        f"{'budget':>7}{'arena MB':>10}{'':>7}{'peak MB':>10}{'':>7}{'GFLOP':>9}"
        f"{'again':>7}{'ms':>9}{'':>8}  bits"
    ]
    for r in rows:
        lines.append(
            f"{r['budget']:>7}{r['arena'] / 1e6:>10.1f}{r['arena'] / first['arena']:>7.2f}"
            f"{r['peak'] / 1e6:>10.1f}{r['peak'] / first['peak']:>7.2f}{r['gflop']:>9.1f}"
            f"{r['again']:>7}{r['ms']:>9.2f}{r['ms'] / first['ms']:>7.3f}x"
            f"  {'same' if r['same bits'] else 'OTHER'}"
        )
    return "\n".join(lines)


def draw(rows: list[Any], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    first = rows[0]
    memory = [100 * r["arena"] / first["arena"] for r in rows]
    for key, label, style in (("ms", "time", "o-"), ("gflop", "arithmetic", "s--")):
        axes.plot(memory, [r[key] / first[key] for r in rows], style, label=label)
    axes.set_xlabel("arena, percent of that without a budget")
    axes.set_ylabel("over the step without a budget")
    axes.invert_xaxis()
    axes.set_ylim(bottom=0.99)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title, fontsize=10)
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="gpt_char", choices=[*WORKLOADS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 0.9, 0.8, 0.75, 0.7, 0.6])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor", action="store_true", help="processor time of one thread")
    options = parser.parse_args()
    if options.processor:
        os.environ["TREADLE_THREADS"] = "1"
    clock = time.process_time if options.processor else time.perf_counter
    rows = measured(options.workload, options.device, options.budgets, options.rounds, clock)
    print(shown(rows))
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found[f"{options.workload} {options.device}"] = rows
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if options.workload == "gpt_char" and options.device == "cpu":
        draw(rows, f"{WORKLOADS['gpt_char'].title}, CPU")


if __name__ == "__main__":
    main()
