"""Treadle as it is beside another copy of its source, on a GPU, in turns: what a change costs.

usage: python bench/gpu_against.py OTHER/src [workload ...] [--rounds 9]

Each copy has a process of its own, without a plan cache. A turn is about a quarter of a second of
steps that ends when the loss was read. Printed are the median of the rounds' ratios, this source
over the other, with the third smallest and the third largest; milliseconds of a step; seconds from
the model to the first step's result; and the first losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TURN = 0.25  # seconds


def serve(name: str) -> None:
    """Compile a workload, then run as many steps as each line of the input says."""
    import treadle as td
    from models import FOR_GPUS, WORKLOADS, loss

    given = WORKLOADS[name]
    precision = "bfloat16" if name in FOR_GPUS else "float32"
    start = time.perf_counter()
    step = td.compile_step(
        given.make(), loss, td.optim.adamw(1e-3), given.specs(), clip_norm=given.clip,
        precision=precision, device="cuda",
    )  # fmt: skip
    batch = given.batch()
    first = float(step(batch).loss)
    print(json.dumps({"first": first, "first_s": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        start, count = time.perf_counter(), int(line)
        for _ in range(count):
            result = step(batch)
        float(result.loss)
        print((time.perf_counter() - start) / count, flush=True)


class Copy:
    """A process that serves a workload with one copy of the source."""

    def __init__(self, source: Path, name: str):
        environment = {**os.environ, "PYTHONPATH": str(source), "TREADLE_CACHE": "off"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.about: dict[str, Any] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        if not found:
            sys.exit("a process ended: what it wrote is above")
        return found

    def seconds(self, steps: int) -> float:
        """Of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(name: str, other: Path, rounds: int) -> str:
    copies = {"other": Copy(other, name), "this": Copy(ROOT / "src", name)}
    try:
        steps = max(3, int(TURN / copies["other"].seconds(20)))
        taken: dict[str, list[float]] = {key: [] for key in copies}
        for i in range(rounds):
            for key in sorted(copies, reverse=bool(i % 2)):
                taken[key].append(copies[key].seconds(steps))
    finally:
        for copy in copies.values():
            copy.close()
    ratios = sorted(a / b for a, b in zip(taken["this"], taken["other"], strict=True))
    ms = {key: 1e3 * statistics.median(found) for key, found in taken.items()}
    about = {key: copy.about for key, copy in copies.items()}
    return (
        f"{name:<12}{statistics.median(ratios):.3f} ({ratios[2]:.3f}–{ratios[-3]:.3f})  "
        f"{ms['this']:.3f} over {ms['other']:.3f} ms, first "
        f"{about['this']['first_s']:.1f} over {about['other']['first_s']:.1f} s, losses "
        f"{about['this']['first']:.6f} and {about['other']['first']:.6f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    names = ["mlp", "cnn", "gpt_nano", "lstm", "gpt_6x384", "gpt2_b4", "resnet50"]
    for name in given.workloads or names:
        print(compare(name, given.other.resolve(), max(5, given.rounds)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
