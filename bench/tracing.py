"""How long tracing and differentiating GPT-2-sized programs takes, and how it grows with depth.

usage: python bench/tracing.py [--layers 12 48] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import treadle as td
from treadle.autodiff.backward import differentiate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from models import gpt_loss, gpt_specs

WIDTH, CONTEXT, BATCH, VOCABULARY, HEADS = 768, 1024, 4, 50257, 12


def once(layers: int) -> tuple[float, float, int]:
    """Seconds to trace, seconds to differentiate, nodes of the result."""
    specs = gpt_specs(layers, WIDTH, CONTEXT, BATCH, VOCABULARY)
    start = time.perf_counter()
    graph = td.trace(partial(gpt_loss, heads=HEADS), *specs, name="gpt")
    traced = time.perf_counter()
    wrt = [n for n, i in graph.leaves.items() if graph.nodes[i].types[0].is_float]
    result = differentiate(graph, wrt)
    done = time.perf_counter()
    assert not result.unreached
    return traced - start, done - traced, len(result.graph.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    medians = {}
    print(f"{'layers':>6} {'first s':>8} {'trace s':>8} {'grad s':>8} {'both s':>8} {'nodes':>7}")
    for layers in arguments.layers:
        first = once(layers)
        runs = [once(layers) for _ in range(arguments.repeats)]
        trace, grad, both = (
            statistics.median(r) for r in zip(*((a, b, a + b) for a, b, _ in runs), strict=True)
        )
        medians[layers] = both
        print(
            f"{layers:>6} {sum(first[:2]):>8.3f} {trace:>8.3f} {grad:>8.3f} {both:>8.3f}"
            f" {first[2]:>7}"
        )
    low, high = min(medians), max(medians)
    if low != high:
        print(f"{high} layers take {medians[high] / medians[low]:.2f} x the time of {low}")


if __name__ == "__main__":
    main()
