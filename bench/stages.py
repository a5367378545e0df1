"""Processor seconds of the stages of a cold compile, for entries of the zoo.

    python bench/stages.py bert unet mobilenet
    python bench/stages.py swin efficientnet --device cuda    # scheduled and rendered: needs no GPU
    python bench/stages.py bert --against OTHER_CHECKOUT      # its figures beside ours, in turns

Each run is a fresh process without a plan cache; the least of the repeats counts, stage by stage.
Processor time of all threads, so that others on the machine matter little; imports of Treadle are
not counted. `all` has the parameters' first values and the first step too, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRAPH = ("trace", "apply_precision", "recognise", "differentiate", "append_updates", "optimize")
COLUMNS = ("graph", "schedule", "plan_buffers", "render", "compile", "all")


def once(name: str, device: str) -> dict[str, float]:
    """Compile here and now, stages by the processor's clock."""
    from families import ZOO
    from zoo_peers import specs, treadle_step

    import treadle as td

    time.perf_counter = time.process_time  # what stages are timed by
    entry, batch = ZOO[name], ZOO[name].arrays(device)
    if device == "cpu":
        start = time.process_time()
        step = treadle_step(entry, device)
        float(step(batch).loss)
        found = dict(step.report.seconds)
        return found | {"all": time.process_time() - start}
    from families import with_treadle

    from treadle.codegen.cuda.driver import render_program
    from treadle.memory.assemble import assemble
    from treadle.memory.plan import plan_buffers
    from treadle.nn.tracing import Inputs
    from treadle.optim.append import Mode
    from treadle.pipeline import CompileReport, StepRecipe, build_step
    from treadle.schedule.schedule import GPU, schedule

    precision = getattr(td, entry.precision(device))
    report, options = CompileReport(device, precision.name), td.CompileOptions()
    start = time.process_time()
    model, update = entry.make(with_treadle, **entry.sizes(device)), td.optim.adamw(1e-3)
    recipe = StepRecipe(model, lambda m, b: m(b), update, "step0:", 1, None, precision, options)
    graphs = build_step(recipe, recipe.plan(), Inputs.of(specs(batch)), report)
    target = replace(GPU, has_attention=True, has_conv=True)
    with report.stage("schedule"):
        program = schedule(graphs[Mode.UPDATE], True, in_place=True, target=target)
    with report.stage("plan_buffers"):
        assemble(program, plan_buffers(program, target), target)
    with report.stage("render"):
        render_program(program)
    getattr(report.evidence, "settle", lambda: None)()  # another checkout may compare at once
    return report.seconds | {"all": time.process_time() - start}


def run(name: str, device: str, root: Path) -> dict[str, float]:
    path = os.pathsep.join([str(root / "src"), str(root / "bench")])
    environment = os.environ | {"TREADLE_CACHE": "0", "PYTHONPATH": path}
    command = [sys.executable, __file__, name, "--device", device, "--once"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    graph = sum(found.pop(stage, 0.0) for stage in GRAPH)
    return found | {"graph": graph}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("entries", nargs="+")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        sys.path.remove(str(ROOT / "bench"))  # the checkout's own is on the path
        print(json.dumps(once(given.entries[0], given.device)))
        return
    roots = {"": ROOT} | ({" there": given.against.resolve()} if given.against else {})
    print(f"{'':<24}" + "".join(f"{c:>13}" for c in COLUMNS))
    for name in given.entries:
        runs = [
            (k, run(name, given.device, r)) for _ in range(given.repeats) for k, r in roots.items()
        ]
        for key in roots:
            own = [found for k, found in runs if k == key]
            least = [min(f.get(c, 0.0) for f in own) for c in COLUMNS]
            print(f"{name + key:<24}" + "".join(f"{s:>13.2f}" for s in least), flush=True)


if __name__ == "__main__":
    main()
