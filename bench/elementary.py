"""Elements a second of the elementary functions of float32 vectors, on one core, in the cache.

usage: python bench/elementary.py [--size 4096] [--repeats 100]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from treadle.codegen.llvm import mathematics
from vector_functions import REFERENCES, Compiled

TURNS = 400  # calls between two looks at the clock
WAYS = {"called, 8": (8, False), "called, 16": (16, False), "inline, 8": (8, True)}


def rate(run: Callable[[], object], size: int, repeats: int) -> float:
    """The best of some repeats, in 10⁹ elements a second."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(TURNS):
            run()
        best = min(best, time.perf_counter() - start)
    return size * TURNS / best / 1e9


def numpy_run(name: str, operands: list[np.ndarray], out: np.ndarray) -> Callable[[], object]:
    if name == "rsqrt":
        return lambda: np.divide(1, np.sqrt(*operands, out=out), out=out)
    return lambda: REFERENCES[name](*operands, out=out)


def rates(name: str, size: int, repeats: int) -> list[float]:
    rng = np.random.default_rng(0)
    x = (np.abs(rng.normal(0, 2, size)) + 0.1).astype(np.float32)
    y = rng.normal(0, 2, size).astype(np.float32)
    operands, out = [x, y][: mathematics.arity(name)], np.empty_like(x)
    addresses = [a.ctypes.data for a in (*operands, out)]
    found = []
    for width, inline in WAYS.values():
        function = Compiled(name, width, inline=inline)
        found.append(rate(partial(function.run, *addresses, size), size, repeats))
    return [*found, rate(numpy_run(name, operands, out), size, repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    heads = ["10⁹/s", *WAYS, "NumPy"]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for name in mathematics.NAMES:
        cells = [f"{r:.2f}" for r in rates(name, arguments.size, arguments.repeats)]
        print(f"| `{name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
