"""What a look at a compiled step costs: processor seconds and memory of verify="fast" and "full".

    python bench/verification.py
    python bench/verification.py gpt2_b4:cuda --json verification.json

A workload of bench/models.py and a target, in a process of its own with one thread, without a plan
cache: the stages up to the kernels, then what the levels look at. Nothing is run, and no GPU is
needed. "fast" is types and invariants of the graphs and that they are equal around every stage,
then types, bounds, races, phases and memory of the kernels; "full" also the gradient and every
distinct kernel against its part of the graph.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

CASES = ("gpt_char:cpu", "gpt_6x384:cuda", "gpt2_b4:cuda")


def measured(name: str, target: str) -> dict[str, Any]:
    """Compile here and now up to the plan, and look at everything."""
    import treadle as td
    from models import FOR_GPUS, WORKLOADS, loss
    from treadle.compile_report import CompileReport
    from treadle.kernel.machine import Machine
    from treadle.memory.plan import plan_buffers
    from treadle.nn.tracing import Inputs
    from treadle.optim.append import Mode
    from treadle.pipeline import StepRecipe, build_step
    from treadle.schedule.schedule import CPU, GPU, schedule
    from treadle.verify.certificate.left import judged
    from treadle.verify.kernels import check_kernels

    given = WORKLOADS[name]
    precision = "bfloat16" if target == "cuda" and name in FOR_GPUS else "float32"
    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = work()
        seconds[stage] = seconds.get(stage, 0.0) + time.process_time() - start
        return found

    def graph_of(verify: str) -> Any:
        recipe = StepRecipe(
            given.make(), loss, td.optim.adamw(1e-3), "step0:", 1, given.clip,
            getattr(td, precision), td.CompileOptions(verify=verify),
        )  # fmt: skip
        report = CompileReport(target, precision)
        graph = build_step(recipe, recipe.plan(), Inputs.of(given.specs()), report)[Mode.UPDATE]
        report.evidence.settle()  # a compile compares the graphs of all stages later
        return graph, report.claims

    timed("graph, off", lambda: graph_of("off"))  # and what is made once in a process
    timed("graph, off again", lambda: graph_of("off"))
    timed("graph, fast", lambda: graph_of("fast"))
    graph, claims = timed("graph, full", lambda: graph_of("full"))
    gpu = replace(GPU, has_attention=True, has_conv=True)
    target_ = gpu if target == "cuda" else CPU
    lanes = () if target == "cuda" else (2 * Machine(8).width,)
    program = timed(
        "schedule", lambda: schedule(graph, True, *lanes, in_place=True, target=target_)
    )
    timed("kernels, always", lambda: program_verified(program, target_))
    timed("plan", lambda: plan_buffers(program, target_))
    before = _peak_mib()
    claims = claims + timed("kernels, full", lambda: judged(program, check_kernels(program)))
    kinds = [c for c in claims if c.kind == "kernel"]
    return {
        "workload": name,
        "target": target,
        "seconds": {k: round(s, 3) for k, s in seconds.items()},
        "fast": round(seconds["graph, fast"] - seconds["graph, off again"], 3),
        "full": round(
            seconds["graph, full"] - seconds["graph, fast"] + seconds["kernels, full"], 3
        ),
        "kernels": len(kinds),
        "established": sum(c.is_established for c in kinds),
        "gradient": [str(c) for c in claims if c.kind == "gradient"],
        "left": sorted({c.reason for c in kinds if c.reason}),
        "before_mib": before,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def program_verified(program: Any, target: Any) -> None:
    """What is done to every kernel, once more."""
    from treadle.kernel.verify import verify

    for kernel in program.distinct():
        verify(kernel, target.mapping)


def in_a_fresh_process(case: str) -> dict[str, Any]:
    environment = os.environ | {"TREADLE_CACHE": "0", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--once", case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("fast s", "of compiling", "full s", "kernels", "established", "MiB before", "MiB")
    lines = [f"{'':22}" + "".join(f"{h:>14}" for h in heads)]
    for r in rows:
        compiling = r["seconds"]["graph, off again"] + r["seconds"]["schedule"]
        share = (r["fast"] + r["seconds"]["kernels, always"]) / compiling
        cells = (
            f"{r['fast'] + r['seconds']['kernels, always']:.2f}", f"{100 * share:.0f} %",
            f"{r['full']:.1f}", r["kernels"], r["established"], r["before_mib"], r["peak_mib"],
        )  # fmt: skip
        lines.append(f"{r['workload'] + ' ' + r['target']:22}" + "".join(f"{c:>14}" for c in cells))
        lines += [f"    left: {reason}" for reason in r["left"]]
        lines += [f"    {told}" for told in r["gradient"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help="workload:target")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", metavar="CASE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(measured(*given.once.split(":"))))
        return
    rows = [in_a_fresh_process(case) for case in given.cases]
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
