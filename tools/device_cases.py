"""Every op on a GPU against the oracle, for `tools/device_tests.py`: for some seconds, a part.

python tools/device_cases.py 0/2 100
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from backend import assert_within
from cuda_backend import on_gpu
from test_backend_ops import CASES, agreement, prepared


def ops(part: int, parts: int, end: float) -> tuple[int, int]:
    """How many cases were run, of how many."""
    mine = CASES[part::parts]
    for done, case in enumerate(mine):
        if time.monotonic() > end:
            return done, len(mine)
        graph, arrays = prepared(*case.values, seed=4)
        assert_within(graph, arrays, on_gpu(graph).run(arrays), agreement(case.values[0]))
    return len(mine), len(mine)


def main() -> None:
    part, seconds = sys.argv[1:]
    index, count = map(int, part.split("/"))
    done, of = ops(index, count, time.monotonic() + float(seconds))
    print(f"ops {part}: {done} of {of} within their contracts", flush=True)


if __name__ == "__main__":
    main()
