"""Seconds from `compile_step` to the first loss, in a process that has done nothing else.

    TREADLE_CACHE=/some/empty/folder python bench/first_step.py gpt2_b32 --device cuda   # cold
    TREADLE_CACHE=/some/empty/folder python bench/first_step.py gpt2_b32 --device cuda   # from it
    python bench/first_step.py --zoo --device cuda --seconds 300 --json first.json

AdamW; bfloat16 on a GPU, but for the small MLP. Imports of Treadle are not counted, what is
imported on the way is. `--zoo` takes the entries of the zoo (all, or those that are named) one at
a time, each in a fresh process with an empty plan cache, and adds to the file what it finds, so
that a run may be cut in parts; entries that the file has are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from families import ZOO
from zoo_peers import treadle_step

import treadle as td
from models import WORKLOADS, loss
from treadle import optim


def of_workload(name: str, device: str) -> str:
    work = WORKLOADS[name]
    is_narrow = device == "cuda" and name != "mlp"
    model, batch = work.make(), work.batch()
    start = time.perf_counter()
    step = td.compile_step(
        model, loss, optim.adamw(1e-3), work.specs(), clip_norm=work.clip,
        device=device, precision="bfloat16" if is_narrow else "float32",
    )  # fmt: skip
    first = float(step(batch).loss)
    seconds, hits = time.perf_counter() - start, step.report.cache_hits
    return f"{work.title}: {seconds:.2f} s, loss {first:.4f}, plans from the cache: {hits}"


def of_entry(name: str, device: str) -> float:
    """The child's part: seconds of one entry of the zoo."""
    batch = ZOO[name].arrays(device)
    start = time.perf_counter()
    step = treadle_step(ZOO[name], device)
    float(step(batch).loss)
    return time.perf_counter() - start


def alone(name: str, device: str) -> float:
    """Seconds of an entry in a process of its own, nothing in its cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, "--device", device, "--child"]
        environment = os.environ | {"TREADLE_CACHE": folder}
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(made.stdout.split()[-1])


def zoo(names: list[str], device: str, seconds: float, file: Path | None) -> None:
    found = json.loads(file.read_text()) if file and file.exists() else {}
    start = time.perf_counter()
    for name in names:
        if f"{name} {device}" in found or time.perf_counter() - start > seconds:
            continue
        found[f"{name} {device}"] = alone(name, device)
        print(f"{name:<16}{found[f'{name} {device}']:7.2f} s", flush=True)
        if file:
            file.write_text(json.dumps(found, indent=1))
    here = {k: v for k, v in found.items() if k.endswith(f" {device}")}
    mean = math.exp(sum(math.log(v) for v in here.values()) / len(here))
    worst = max(here, key=lambda k: here[k])
    print(
        f"{len(here)} entries: geometric mean {mean:.2f} s, at most {here[worst]:.2f} s ({worst})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="a workload, or with --zoo entries of the zoo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no more entries then")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(of_entry(given.names[0], given.device))
    elif given.zoo:
        zoo(given.names or list(ZOO), given.device, given.seconds, given.json)
    else:
        for name in given.names:
            print(of_workload(name, given.device))


if __name__ == "__main__":
    main()
