"""How the time to compile grows with depth: a GPT of 6 and of 24 equal layers.

    python bench/compile_time.py
    python bench/compile_time.py --layers 6 12 24 48 --width 384 --repeats 5 --json compile.json

Each depth is compiled in fresh processes without a plan cache, the depths in turn. Times are of
`td.compile_step` for the CPU, import not counted: the stages of the compiler, summed, which is what
the ratio is of; and all of it, with parameters drawn and the optimizer's state made, as processor
time of the process and as wall-clock time. The least of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY, HEADS = 65, 6


def compile_once(layers: int, width: int, context: int, batch: int) -> dict[str, Any]:
    """Compile here and now, and say what it took."""
    import treadle as td
    from models import GPT, loss
    from treadle import optim

    model = GPT(VOCABULARY, context, width, HEADS, layers)
    specs = {k: td.Spec((batch, context), td.int32) for k in "xy"}
    start = time.perf_counter(), time.process_time()
    step = td.compile_step(model, loss, optim.adamw(1e-3), specs, clip_norm=1.0, device="cpu")
    wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    return {
        "layers": layers,
        "wall": wall,
        "processor": processor,
        "stages": step.report.seconds,
        "nodes": len(step.graph.nodes),
        "calls": sum(k.calls for k in step.kernels),
        "kernels": len(step.kernels),
    }


def in_a_fresh_process(arguments: list[str]) -> dict[str, Any]:
    environment = os.environ | {"TREADLE_CACHE": "0"}
    command = [sys.executable, __file__, "--once", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(best: list[dict[str, Any]]) -> str:
    heads = ("layers", "nodes", "calls", "kernels", "processor s", "wall s", "stages s", "ratio")
    lines = ["".join(f"{h:>13}" for h in heads)]
    for row in best:
        total = sum(row["stages"].values())
        ratio = total / sum(best[0]["stages"].values())
        counts = "".join(f"{row[k]:>13,}" for k in ("layers", "nodes", "calls", "kernels"))
        times = f"{row['processor']:>13.2f}{row['wall']:>13.2f}{total:>13.2f}{ratio:>13.2f}"
        lines.append(f"{counts}{times}")
    stages = sorted(best[0]["stages"], key=lambda s: -best[-1]["stages"].get(s, 0.0))
    for stage in stages:
        times = "  ".join(f"{row['layers']}: {row['stages'].get(stage, 0.0):.3f} s" for row in best)
        lines.append(f"{stage:<18}{times}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = ["--width", given.width, "--context", given.context, "--batch", given.batch]
    if given.once:
        found = compile_once(given.layers[0], given.width, given.context, given.batch)
        print(json.dumps(found))
        return
    runs = [
        in_a_fresh_process(["--layers", str(n), *map(str, sizes)])
        for _ in range(given.repeats)
        for n in given.layers
    ]
    best = [
        min((r for r in runs if r["layers"] == n), key=lambda r: sum(r["stages"].values()))
        for n in given.layers
    ]
    print(table(best))
    if given.json:
        given.json.write_text(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()
