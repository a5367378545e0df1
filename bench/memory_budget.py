"""Time against memory: a workload's step under smaller and smaller budgets, each bit the same.

    python bench/memory_budget.py                       # GPT 6 × 384 on the CPU, with the picture
    python bench/memory_budget.py gpt2_b32 --device cuda --budgets 1 0.7 0.6 0.47

Each budget has a process of its own; they take turns, and the median of the rounds' ratios counts.
On the CPU it is processor time of one thread, which other programs on the machine disturb less;
`--threads 2` is by the clock. Losses are compared bit by bit: on a GPU steps are deterministic,
unless --no-deterministic. `held` are the bytes that Treadle had allocated on the GPU after some
steps. Figures go to bench/results/, the picture to docs/images/.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from same_programs import load_in_turn
from turns import Contender, Patience, Ratio, Running, Unable, Worker, take_turns, use_threads
from zoo_peers import begin, moved

import treadle as td
from models import WORKLOADS, loss
from treadle import optim

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "memory_budget.json"
PICTURE = ROOT / "docs" / "images" / "memory_budget.png"


TURN = 0.4  # seconds


def compiled(name: str, device: str, budget: float, deterministic: bool) -> td.TrainStep:
    work = WORKLOADS[name]
    return td.compile_step(
        work.make(), loss, optim.adamw(1e-4), work.specs(), clip_norm=work.clip, device=device,
        precision="bfloat16" if device == "cuda" else "float32",
        options=td.CompileOptions(memory_budget=budget, deterministic=deterministic),
    )  # fmt: skip


def start(task: dict[str, Any]) -> Running:
    """A step under a budget."""
    device = task["device"]
    if device == "cuda":
        load_in_turn()
    step = compiled(task["workload"], device, task["budget"], task["deterministic"])
    batch, last = moved(WORKLOADS[task["workload"]].batch(0), device), list[Any]()

    def run() -> None:
        last[:] = [step(batch)]

    def facts() -> dict[str, Any]:
        program = step.report.programs[0]
        return {
            "arena": program.arena,
            "peak": step.report.peak_bytes,
            "held": held_on_gpu() if device == "cuda" else None,
            "gflop": program.flops / 1e9,
            "again": sum(k.calls for k in program.again),
            "schedule_s": step.report.seconds.get("schedule", 0.0),
        }

    return Running(run, lambda: last[0].loss, lambda: float(last[0].loss), None, facts)


def held_on_gpu() -> int:
    """Bytes that are allocated there, not those of the driver and its libraries."""
    from treadle.runtime.cuda.device import Block

    gc.collect()
    blocks = {id(b): b.nbytes for b in gc.get_objects() if isinstance(b, Block) and b.address}
    return sum(blocks.values())


def prepare(task: dict[str, Any]) -> Any:
    begin(task["device"])
    return lambda: start(task)


CONTENDERS = {"step": Contender("step", (), prepare)}


def measured(given: argparse.Namespace) -> list[Any]:
    """A row for each budget that can be reached: bytes, arithmetic, time, and losses."""
    with ExitStack() as stack, ThreadPoolExecutor(len(given.budgets)) as pool:
        workers = []
        for budget in given.budgets:
            worker = Worker("memory_budget", "step", {**given.environment, "TREADLE_CACHE": "off"})
            stack.callback(worker.close)
            worker.name = str(budget)
            workers.append(worker)

        def built(worker: Worker) -> dict[str, Any]:
            task = {n: getattr(given, n) for n in ("workload", "device", "deterministic")}
            try:
                return worker.ask(
                    "build", task={**task, "budget": float(worker.name)}, memory=False
                )
            except Unable as error:
                print(error)
                return {}

        answers = dict(zip(workers, pool.map(built, workers), strict=True))
        ready = [w for w in workers if answers[w]]
        turns = take_turns(ready, given.rounds, TURN, Patience(0), given.clock)
    first, rows = ready[0], []
    for worker in ready:
        answer, ms = answers[worker], turns.ms[worker.name]
        ratio = Ratio.of(ms, turns.ms[first.name])
        figures = ("arena", "peak", "held", "gflop", "again", "schedule_s")
        rows.append(
            {"budget": float(worker.name), "ms": statistics.median(ms), "time": ratio.median}
            | {"quartiles": [ratio.low, ratio.high], "losses": answer["values"]}
            | {"same bits": answer["values"] == answers[first]["values"]}
            | {figure: answer[figure] for figure in figures}
        )
    return rows


def shown(rows: list[Any]) -> str:
    first = rows[0]
    lines = [
        f"{'budget':>7}{'arena MB':>10}{'':>7}{'peak MB':>10}{'':>7}{'held MB':>10}{'GFLOP':>9}"
        f"{'again':>7}{'ms':>9}{'':>8}  bits"
    ]
    for r in rows:
        held = "" if r["held"] is None else f"{r['held'] / 1e6:.1f}"
        lines.append(
            f"{r['budget']:>7}{r['arena'] / 1e6:>10.1f}{r['arena'] / first['arena']:>7.3f}"
            f"{r['peak'] / 1e6:>10.1f}{r['peak'] / first['peak']:>7.3f}{held:>10}"
            f"{r['gflop']:>9.1f}{r['again']:>7}{r['ms']:>9.2f}{r['time']:>7.3f}x"
            f"  {'same' if r['same bits'] else 'OTHER'}"
        )
    return "\n".join(lines)


def draw(rows: list[Any], title: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return print("no picture: matplotlib is not installed")
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    first = rows[0]
    memory = [100 * r["arena"] / first["arena"] for r in rows]
    axes.plot(memory, [r["time"] for r in rows], "o-", label="time")
    flops = [r["gflop"] / first["gflop"] for r in rows]
    axes.plot(memory, flops, "s--", label="arithmetic")
    axes.set_xlabel("arena, percent of that without a budget")
    axes.set_ylabel("over the step without a budget")
    axes.invert_xaxis()
    axes.set_ylim(bottom=0.99)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title, fontsize=10)
    figure.savefig(PICTURE, dpi=120)
    return None


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", nargs="?", default="gpt_char", choices=[*WORKLOADS])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    budgets = [1, 0.9, 0.8, 0.75, 0.7, 0.6]  # of the arena
    parser.add_argument("--budgets", type=float, nargs="+", default=budgets)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    by_processor = given.device == "cpu" and given.threads == 1
    given.clock = "process_time" if by_processor else "perf_counter"
    given.environment = use_threads(given.threads) if given.device == "cpu" else {}
    return given


def main() -> None:
    given = options_of()
    rows = measured(given)
    print(shown(rows))
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kind = "" if given.deterministic else " fastest"
    found[f"{given.workload} {given.device}{kind}"] = rows
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if given.workload == "gpt_char" and given.device == "cpu":
        draw(rows, f"{WORKLOADS['gpt_char'].title}, CPU")


if __name__ == "__main__":
    main()
