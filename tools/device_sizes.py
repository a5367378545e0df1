"""Functions and gradients at the sizes that people have, on a device against float64 PyTorch.

    python tools/device_sizes.py cuda --seconds 120 --processes 8

The cases of `tests/test_medium_sizes.py`, other ones for each seed, in float32 and bfloat16. Those
that are wrong are printed with family and seed; exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
import time
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

Found = tuple[int, list[str]]


def run(device: str, part: int, parts: int, first: int, end: float) -> Found:
    """How many cases were run until some time, and what is wrong."""
    import torch

    import treadle as td
    from test_medium_sizes import FAMILIES, check, drawn

    torch.set_num_threads(1)
    count, wrong = 0, list[str]()
    for seed in range(first + part, 1 << 40, parts):
        for family in FAMILIES:
            for dtype in (td.float32, td.bfloat16):
                if time.time() > end:
                    return count, wrong
                try:
                    check(drawn(family, seed), seed, device, dtype)
                except Exception as error:  # the rest of the cases is worth as much
                    told = (str(error) or repr(error)).partition("\n")[0]
                    wrong.append(f"{family} {seed} {dtype.name}: {told[:300]}")
                    print(wrong[-1], flush=True)
                count += 1
    return count, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("device")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1000, help="the first")
    given = parser.parse_args()
    end, parts = time.time() + given.seconds, given.processes
    tasks = [(given.device, i, parts, given.seed, end) for i in range(parts)]
    with get_context("spawn").Pool(parts) as pool:
        found = pool.starmap(run, tasks)
    wrong = [told for _, some in found for told in some]
    print(f"{given.device}: {sum(n for n, _ in found)} cases, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
