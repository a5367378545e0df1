"""Seconds from `compile_step` to the first loss, in a process that has done nothing else.

    TREADLE_CACHE=/some/empty/folder python bench/first_step.py gpt2_b32 --device cuda   # cold
    TREADLE_CACHE=/some/empty/folder python bench/first_step.py gpt2_b32 --device cuda   # from it
    python bench/first_step.py --zoo --device cuda --seconds 300 --json first.json

AdamW; bfloat16 on a GPU, but for the small MLP. Imports of Treadle are not counted, what is
imported on the way is. `--zoo` takes the entries of the zoo (all, or those that are named) one at
a time, each in a fresh process with an empty plan cache, and adds to the file what it finds, so
that a run may be cut in parts; entries that the file has are left out. A line has the parts of an
entry in the order in which they began: seconds of the thread that compiles, "waits" for others, and
after a bar what other threads did, from when to when, in how many seconds of all of them together.
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
from collections import Counter
from pathlib import Path
from typing import Any

from families import ZOO
from parts import shown, watched
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


def of_entry(name: str, device: str) -> dict[str, Any]:
    """The child's part: seconds of one entry of the zoo, in all and by part."""
    batch = ZOO[name].arrays(device)
    parts = watched(device)
    step = treadle_step(ZOO[name], device)
    with parts.part("first run"):
        float(step(batch).loss)
    return parts.finished()


def own_environment() -> dict[str, str]:
    """A process reads and writes Python's compiled files, as one of an installed package does."""
    return {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}


def alone(name: str, device: str, limit: float) -> dict[str, Any]:
    """An entry in a process of its own, nothing in its cache; what went wrong, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, "--device", device, "--child"]
        environment = own_environment() | {"TREADLE_CACHE": folder}
        pipes = {"capture_output": True, "text": True, "timeout": limit}
        try:
            made = subprocess.run(command, env=environment, check=True, **pipes)
        except subprocess.TimeoutExpired:
            return {"failed": f"nothing after {limit:g} s"}
        except subprocess.CalledProcessError as error:
            return {"failed": (error.stderr.strip().splitlines() or ["?"])[-1]}
        found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
        return found


def zoo(names: list[str], device: str, seconds: float, limit: float, file: Path | None) -> None:
    found = json.loads(file.read_text()) if file and file.exists() else {}
    source = Path(td.__file__).parents[1]
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(source)]
    subprocess.run(command, env=own_environment(), check=False)  # as installing does
    start = time.perf_counter()
    for name in names:
        if "all" in found.get(f"{name} {device}", {}) or time.perf_counter() - start > seconds:
            continue
        one = found[f"{name} {device}"] = alone(name, device, limit)
        told = f"{one['all']:7.2f} s  {shown(one)}" if "all" in one else f"   {one['failed']}"
        print(f"{name:<16}{told}", flush=True)
        if file:
            file.write_text(json.dumps(found, indent=1))
    summary({k: v for k, v in found.items() if k.endswith(f" {device}") and "all" in v})


def summary(found: dict[str, dict[str, Any]]) -> None:
    """The mean and the worst, and what the parts of all entries take together."""
    if not found:
        return
    times = {k: v["all"] for k, v in found.items()}
    mean = math.exp(sum(math.log(t) for t in times.values()) / len(times))
    worst = max(times, key=lambda k: times[k])
    parts = Counter[str]()
    for one in found.values():
        parts.update(one["parts"])
    shares = ", ".join(f"{name} {s / sum(parts.values()):.0%}" for name, s in parts.most_common(16))
    print(f"{len(times)} entries: geometric mean {mean:.2f} s, most {times[worst]:.2f} s ({worst})")
    print(f"of {sum(parts.values()):.0f} s: {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="a workload, or with --zoo entries of the zoo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no more entries then")
    parser.add_argument("--limit", type=float, default=60, help="seconds of one entry")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(of_entry(given.names[0], given.device)))
    elif given.zoo:
        zoo(given.names or list(ZOO), given.device, given.seconds, given.limit, given.json)
    else:
        for name in given.names:
            print(of_workload(name, given.device))


if __name__ == "__main__":
    main()
