"""Programs on a GPU against the oracle, for `tools/device_tests.py`: for some seconds, a part.

python tools/device_cases.py ops 0/2 100       # every op, as its samples are
python tools/device_cases.py random 0/2 100    # random training programs
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from hypothesis.errors import UnsatisfiedAssumption

from backend import assert_within
from cuda_backend import on_gpu
from test_backend_ops import CASES, agreement, prepared
from test_backend_programs import prepared as random_program

STRIDE = 7919  # seeds that are near each other give programs that are not


def ops(part: int, parts: int, end: float) -> tuple[int, int]:
    """How many cases were run, of how many."""
    mine = CASES[part::parts]
    for done, case in enumerate(mine):
        if time.monotonic() > end:
            return done, len(mine)
        graph, arrays = prepared(*case.values, seed=4)
        assert_within(graph, arrays, on_gpu(graph).run(arrays), agreement(case.values[0]))
    return len(mine), len(mine)


def random(part: int, parts: int, end: float) -> tuple[int, int]:
    """How many programs were run, of how many that were drawn."""
    done = 0
    for i in itertools.count(part, parts):
        if time.monotonic() > end:
            return done, i // parts
        seed, steps = i * STRIDE + 13, 1 + i % 6
        try:
            training, values, bounds = random_program(seed, steps)
        except UnsatisfiedAssumption:  # nothing can be said about its rounding
            continue
        found = on_gpu(training.graph, in_place=True).run(values)
        try:
            assert_within(training.graph, values, found, bounds=bounds)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {steps} steps") from error
        done += 1
    raise AssertionError


def main() -> None:
    what, part, seconds = sys.argv[1:]
    index, count = map(int, part.split("/"))
    run = {"ops": ops, "random": random}[what]
    done, of = run(index, count, time.monotonic() + float(seconds))
    print(f"{what} {part}: {done} of {of} within their contracts", flush=True)


if __name__ == "__main__":
    main()
