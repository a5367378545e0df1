"""What is written out by hand beside the composite that it is: whole training steps in turn.

    python bench/spellings.py [--device cpu|cuda] [--rounds 7] [--only attention] [--seconds 240]
                              [--json FILE] [--plans] [--deterministic]

A ratio above 1 is a step that is faster by hand. Losses after a few steps are printed beside it,
and whether both run the same program, kernel for kernel, or the same kernels in another order or
with neighbouring numbers in them: then what the ratio says is noise. All
spellings of one composite start at once in processes of their own and take turns, by processor
time on the CPU and by the clock on a GPU, where programs are loaded one at a time. Each chooses
algorithms of libraries by timing them there, which differs from process to process; with
--deterministic they are those that libraries name first. --plans needs no
device: it compares programs, as for a GPU with cuBLASLt and cuDNN.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measurement import CLOSE, CLOSE_NARROW, Measurement, started
from same_programs import digests, likeness, load_in_turn, step_digests, target_without_device
from spelled import Case, Step, cases
from turns import Contender, Ratio, Running, machine, use_threads
from zoo_peers import begin, moved, specs

import treadle as td
from treadle import optim
from treadle.backends.scheduling import scheduled
from treadle.ir.graph import Graph
from treadle.kernel import cost
from treadle.kernel.program import Program
from treadle.nn.tracing import Inputs
from treadle.optim.append import Mode
from treadle.pipeline import CompileReport, StepRecipe, build_step, choose_precision


def compiled(made: Step, case: Case, task: dict[str, Any]) -> td.TrainStep:
    model, loss = made
    options = td.CompileOptions(deterministic=task["deterministic"] == "yes")
    return td.compile_step(
        model, loss, optim.adamw(1e-3), specs(case.batch), device=task["device"],
        precision=precision(task["device"]), seed=0, options=options,
    )  # fmt: skip


def precision(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def graph_of(made: Step, case: Case, device: str) -> tuple[Graph, CompileReport]:
    """The graph of a step, which needs no device, and what was recognised in it."""
    model, loss = made
    narrow = choose_precision(precision(device))
    options = td.CompileOptions()
    recipe = StepRecipe(model, loss, optim.adamw(1e-3), "step0:", 1, None, narrow, options)
    report = CompileReport(device, narrow.name)
    inputs = Inputs.of(specs(case.batch))
    return build_step(recipe, recipe.plan(), inputs, report)[Mode.UPDATE], report


def start(name: str, task: dict[str, Any]) -> Running:
    """A spelling's step, or the composite's of a base."""
    device = task["device"]
    if device == "cuda":
        load_in_turn()
    every = cases(device)
    case = next(c for c in every if name in (c.name, composite_of(c)))
    step = compiled((case.by_hand if name == case.name else case.composite)(), case, task)
    batch, last = moved(case.batch, device), list[Any]()

    def run() -> None:
        last[:] = [step(batch)]

    return Running(
        run,
        lambda: last[0].loss,
        lambda: float(last[0].loss),
        lambda: step.report.peak_bytes / 2**20,
        lambda: {"digests": step_digests(step)},
    )


def composite_of(case: Case) -> str:
    return f"composite {case.base}"


def prepare(name: str, task: dict[str, Any]) -> Callable[[], Running]:
    begin(task["device"])
    return functools.partial(start, name, task)


CONTENDERS = {
    name: Contender(name, (), functools.partial(prepare, name))
    for device in ("cpu", "cuda")
    for case in cases(device)
    for name in (case.name, composite_of(case))
}


def contests(given: argparse.Namespace) -> list[tuple[Measurement, list[Case]]]:
    """For each composite all that is spelled out of it, as far as it was asked for."""
    bases: dict[str, list[Case]] = {}
    for case in cases(given.device):
        if given.only in case.name:
            bases.setdefault(composite_of(case), []).append(case)
    close = CLOSE_NARROW if given.device == "cuda" else CLOSE
    return [
        (
            Measurement(
                base, [base, *(c.name for c in some)], given, given.environment, "spellings", close
            ),
            some,
        )
        for base, some in bases.items()
    ]


def rows_of(each: Measurement, some: list[Case]) -> Iterator[dict[str, Any]]:
    """Figures of each spelling. One with the composite's own kernels is as fast by construction."""
    composite = each.found[each.workload]
    for case in some:
        by_hand = each.found[case.name]
        row: dict[str, Any] = {"case": case.name, "least": case.least}
        errors = [f["error"] for f in (composite, by_hand) if "error" in f]
        if errors:
            yield row | {"error": errors[0]}
            continue
        row["likeness"] = likeness(composite["digests"], by_hand["digests"])
        row["losses"] = composite["values"][-1], by_hand["values"][-1]
        row["memory"] = by_hand["steps_mib"] / composite["steps_mib"]
        ratio = Ratio.of(composite["round_ms"], by_hand["round_ms"])
        row |= {"ms": (composite["ms"], by_hand["ms"]), "ratio": asdict(ratio)}
        row["fine"] = row["likeness"] != "others" or ratio.median >= case.least
        yield row


def told(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']:32}FAILED: {row['error'][:300]}"
    (composite, by_hand), losses = row["ms"], row["losses"]
    return (
        f"{row['case']:32}{composite:9.3f}{by_hand:9.3f}  {Ratio(**row['ratio'])!s:18}"
        f"{'ok ' if row['fine'] else 'LOW'} {row['likeness']:13}"
        f"memory {row['memory']:.3f}  losses {losses[0]:.4f} {losses[1]:.4f}"
    )


def show_plans(given: argparse.Namespace) -> None:
    """Of each spelling whether its program is the composite's, kernel for kernel."""
    target, composites = target_without_device(given.device), dict[str, Program]()
    options = td.CompileOptions()
    for case in cases(given.device):
        if given.only not in case.name:
            continue
        if case.base not in composites:
            graph, _ = graph_of(case.composite(), case, given.device)
            composites[case.base] = scheduled(graph, options, target)
        graph, report = graph_of(case.by_hand(), case, given.device)
        both = composites[case.base], scheduled(graph, options, target)
        kind = likeness(digests(both[0]), digests(both[1]))
        figures = "; ".join(
            f"{title} {figure(both[0]):,.0f} {figure(both[1]):,.0f}" for title, figure in FIGURES
        )
        names = ", ".join(dict.fromkeys(r.name for r in report.recognised)) or "nothing"
        seconds = report.seconds["recognise"]
        print(f"{case.name:32}{kind:13} {figures}; recognise {seconds:.2f} s: {names}", flush=True)


FIGURES: tuple[tuple[str, Callable[[Program], float]], ...] = (
    ("calls", lambda p: sum(n for _, n in p.counted_calls())),
    ("MB moved", lambda p: sum(cost.traffic(c.kernel) * n for c, n in p.counted_calls()) / 1e6),
    ("GFLOP", lambda p: sum(cost.flops(c.kernel) * n for c, n in p.counted_calls()) / 1e9),
)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="none begun after so many")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--plans", action="store_true", help="compare programs, time nothing")
    parser.add_argument("--threads", type=int, help="default 1; on a GPU all")
    parser.add_argument("--deterministic", action="store_true", help="no algorithm is timed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    is_gpu = given.device == "cuda"
    given.threads = given.threads or (len(os.sched_getaffinity(0)) if is_gpu else 1)
    given.clock = "perf_counter" if is_gpu else "process_time"
    given.patience, given.patience_compile = 0.0, 300.0
    given.environment = use_threads(given.threads)
    return given


def prepared(each: Measurement, folder: Path, given: argparse.Namespace) -> None:
    is_deterministic = "yes" if given.deterministic else "no"
    each.prepare(folder, {}, device=given.device, deterministic=is_deterministic)


def main() -> None:
    given = options_of()
    if given.plans:
        return show_plans(given)
    print(f"{'case':32}{'composite':>9}{'by hand':>9}  ratio (ms; composite / by hand)")
    begun, every = time.perf_counter(), list[dict[str, Any]]()
    for each, some in contests(given):
        if time.perf_counter() - begun > given.seconds:
            print(f"time is up: {', '.join(c.name for c in some)} left for another run")
            continue
        for contest in started([each], functools.partial(prepared, given=given)):
            contest.finish()
        for row in rows_of(each, some):
            every.append(row)
            print(told(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps({"machine": machine(), "rows": every}, indent=1))
    return None


if __name__ == "__main__":
    main()
