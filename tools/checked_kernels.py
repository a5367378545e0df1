"""Which kernels of many training steps the independent checker establishes, and why not others.

usage: python tools/checked_kernels.py [program ...] [--device cpu] [--width 16] [--seconds 60]

Programs are the workloads of bench/models.py and the entries of the zoo (bench/families), at the
sizes for processors, or with --device cuda at those for a GPU. Nothing is run, and no GPU is
needed: programs are scheduled, recorded and checked. One line for each, with the reasons of claims
that are not established; the last line is their sum.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools"), str(ROOT / "src")]


def step_graph(name: str, device: str) -> Any:
    """The graph of a training step, of a workload or of an entry of the zoo."""
    from families import ZOO, with_treadle

    import treadle as td
    from models import FOR_GPUS, WORKLOADS, loss
    from treadle.nn.tracing import Inputs
    from treadle.optim.append import Mode
    from treadle.pipeline import CompileReport, StepRecipe, build_step

    if name in WORKLOADS:
        given = WORKLOADS[name]
        is_narrow = device == "cuda" and name in FOR_GPUS
        precision = td.bfloat16 if is_narrow else td.float32
        model, function, clip, specs = given.make(), loss, given.clip, given.specs()
    else:
        entry = ZOO[name]
        precision = getattr(td, entry.precision(device))
        model, clip = entry.make(with_treadle, **entry.sizes(device)), None
        arrays = entry.arrays(device)
        specs = {n: td.Spec(a.shape, getattr(td, a.dtype.name)) for n, a in arrays.items()}
        function = _own_loss
    recipe = StepRecipe(
        model, function, td.optim.adamw(1e-3), "step0:", 1, clip, precision,
        td.CompileOptions(verify="off"),
    )  # fmt: skip
    report = CompileReport(device, precision.name)
    return build_step(recipe, recipe.plan(), Inputs.of(specs), report)[Mode.UPDATE]


def _own_loss(model: Any, batch: Any) -> Any:
    return model(batch)


def scheduled(name: str, device: str, width: int) -> tuple[Any, Any]:
    """A program, and where its buffers lie."""
    from treadle.memory.plan import plan_buffers
    from treadle.schedule.schedule import CPU, GPU, schedule

    graph = step_graph(name, device)
    if device == "cuda":
        program, target = schedule(graph, in_place=True, target=GPU), GPU
    else:
        program, target = schedule(graph, True, 2 * width, in_place=True), CPU
    return program, plan_buffers(program, target)


def records(program: Any, plan: Any) -> tuple[Any, dict[str, Any]]:
    """What the checker reads: the program and the graphs of its scopes, through JSON."""
    from treadle.verify.certificate.graphs import Records
    from treadle.verify.certificate.programs import program_records
    from treadle_checker.graph import read_graph
    from treadle_checker.program import read_program

    stored = Records()
    record, names = program_records(program, plan, stored)

    def graph_of(name: str) -> Any:
        return read_graph(json.loads(stored.texts[name]), graph_of, name)

    graphs = {scope: graph_of(name) for scope, name in names.items()}
    return read_program(json.loads(json.dumps(record))), graphs


def main() -> None:
    from families import ZOO

    from models import FOR_GPUS, WORKLOADS
    from treadle_checker.kernel_checks import check_program
    from treadle_checker.reading import Rejected

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=16, help="lanes of a vector")
    given = parser.parse_args()
    workloads = [n for n in WORKLOADS if given.device == "cuda" or n not in FOR_GPUS]
    total: Counter[str] = Counter()
    for name in given.programs or [*workloads, *ZOO]:
        program, graphs = records(*scheduled(name, given.device, given.width))
        start = time.process_time()
        try:
            claims = check_program(program, graphs)
        except Rejected as wrong:
            total["rejected"] += 1
            print(f"{name:22} REJECTED {wrong}", flush=True)
            continue
        seconds = time.process_time() - start
        about = [c for c in claims if c.claim.startswith("computes")]
        left = Counter(c.reason for c in about if c.reason)
        total += Counter(kernels=len(program.kernels), claims=len(about), left=left.total())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        told = "".join(f"\n  {count} × {reason}" for reason, count in left.items())
        part = f"{len(about) - left.total()} of {len(about)} claims, {seconds:.1f} s, {peak} MB"
        print(f"{name:22} {len(program.kernels):4} kernels, {part}{told}", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
