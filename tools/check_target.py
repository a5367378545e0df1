"""The op table, four trajectories and the demo on this machine's CPU, against the oracle.

    PYTHONPATH=src python tools/check_target.py                        # some samples of every op
    PYTHONPATH=src python tools/check_target.py --full                 # all, in every dtype
    PYTHONPATH=src python tools/check_target.py --target x86-64-v2 ops

It needs Treadle and what that needs, no test runner and no PyTorch: `tools/arm64.sh` runs it on
ARM64. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from backend import assert_within, build  # noqa: E402
from op_samples import COMPUTED, agreement, prepared, samples_in  # noqa: E402
from trajectories import TRAJECTORIES  # noqa: E402
from treadle.base import dtypes  # noqa: E402
from treadle.kernel.machine import NATIVE, target_name  # noqa: E402
from treadle.runtime.cpu.native import chosen_target  # noqa: E402

FEW_SAMPLES = 3  # of an op
LIMIT = 1e-3  # between losses in float32 and in float64, in parts of the loss
Check = Callable[[], None]


def ops(options: argparse.Namespace) -> Iterator[tuple[str, Check]]:
    """Every op: in float32 some samples, or in every dtype all of them."""
    every = [d for d in dtypes.ALL if d is not dtypes.int32] if options.full else [dtypes.float32]
    for op in COMPUTED:
        for dtype in every:
            if samples_in(op, dtype):

                def check(op=op, dtype=dtype) -> None:
                    most = 1 << 20 if options.full else FEW_SAMPLES
                    graph, arrays = prepared(op, dtype, seed=4, most=most)
                    found = build(graph, target=options.target).on(1).run(arrays)
                    assert_within(graph, arrays, found, agreement(op))

                yield f"{op.name} {dtype}", check


def trajectories(options: argparse.Namespace) -> Iterator[tuple[str, Check]]:
    """Training steps on the CPU beside the same steps of the oracle."""
    for name, trajectory in TRAJECTORIES.items():

        def check(trajectory=trajectory) -> None:
            ours = trajectory.compiled("cpu", target=options.target)
            exact = trajectory.compiled("oracle")
            exact.load_params(ours.params)
            for i, batch in enumerate(trajectory.batches(50 if options.full else 10)):
                a, b = ours(batch).loss, exact(batch).loss
                assert abs(a - b) <= LIMIT * max(abs(b), 1e-2), f"step {i}: {a} against {b}"

        yield name, check


def demo(options: argparse.Namespace) -> Iterator[tuple[str, Check]]:
    """`treadle demo`, as a user runs it."""

    def check() -> None:
        command = [*shlex.split(options.python), "-m", "treadle", "demo"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        shown = [line for line in done.stdout.splitlines() if "wanted" in line]
        print("\n".join(shown), flush=True)
        assert done.returncode == 0, done.stderr or "a check failed"

    yield "demo", check


PARTS = {"ops": ops, "trajectories": trajectories, "demo": demo}


def run(name: str, checks: Iterator[tuple[str, Check]]) -> list[str]:
    """The names of what is wrong in one part; a line for each, and one for all."""
    wrong, count, start = [], 0, time.monotonic()
    for case, check in checks:
        count += 1
        try:
            check()
        except Exception as error:  # whatever it is, the others are looked at too
            wrong.append(f"{name}: {case}")
            first = (str(error).strip().splitlines() or [""])[0]
            print(f"wrong: {case}: {type(error).__name__}: {first[:200]}", flush=True)
    seconds = time.monotonic() - start
    print(f"{name}: {count - len(wrong)} of {count} right, {seconds:.0f} s", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if none")
    parser.add_argument("--full", action="store_true", help="every dtype and sample, longer runs")
    parser.add_argument("--target", default=NATIVE, help="as CompileOptions takes it")
    parser.add_argument("--python", default=sys.executable, help="what runs the demo")
    options = parser.parse_args()
    unknown = [p for p in options.parts if p not in PARTS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    options.target = target_name(options.target)
    target = chosen_target(options.target)
    print(f"{target.name}: {target.cpu}, {target.width} lanes of float32, NumPy {np.__version__}")
    wrong = [w for part in options.parts or PARTS for w in run(part, PARTS[part](options))]
    print(f"wrong: {len(wrong)}" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
