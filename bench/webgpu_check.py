"""Attention and products by cooperative matrices on this machine's adapter, against float64.

    python bench/webgpu_check.py
    python bench/webgpu_check.py --only products

Prints for each the greatest difference and the greatest number, and fails where they are far apart.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import treadle as td
from treadle.autodiff.backward import differentiate
from treadle.backends.stages import build
from treadle.backends.webgpu.backend import WebGpuToolchain
from treadle.compile_report import CompileOptions, CompileReport
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.target_webgpu import asked_of
from treadle.runtime.webgpu.device import device

MOST = 5e-3  # of the greatest number: some roundings to float16
# Batch, heads of queries and of keys, positions of both, elements of a head, and whether causal.
ATTENTION = [
    (2, 6, 2, 128, 128, 64, True),
    (1, 9, 3, 200, 200, 64, True),
    (1, 8, 8, 100, 150, 32, False),
    (1, 9, 3, 1024, 1024, 64, True),
]

GROWING = (1, 2, 1, 200, 200, 64, False)


def attention(sizes: tuple[int, int, int, int, int, int, bool]) -> Graph:
    batch, heads, groups, length, count, depth, causal = sizes
    q = TensorType((batch, heads, length, depth), td.float16)
    k = TensorType((batch, groups, count, depth), td.float16)

    def squares(q, k, v):
        return (td.attention(q, k, v, causal=causal).astype(td.float32) ** 2).sum()

    return differentiate(td.trace(squares, q, k, k), ["q", "k", "v"]).graph


def check(name: str, graph: Graph, scale: float = 1.0) -> bool:
    options = CompileOptions(target="native+cooperative-matrix")
    toolchain = WebGpuToolchain(asked_of(device().limits, options.target))
    built = build(toolchain, graph, CompileReport("webgpu", "float32"), options)
    rng, types = (
        np.random.default_rng(0),
        {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()},
    )
    arrays = {n: (scale * rng.normal(size=t.shape)).astype(np.float16) for n, t in types.items()}
    found = toolchain.load(graph, built).run(arrays)
    uses = any("coop_mat" in s.text for s in built.code)
    good = uses
    for ours, theirs in zip(found, evaluate_float64(graph, arrays), strict=True):
        expected = np.asarray(theirs, np.float64)
        apart, most = np.abs(np.asarray(ours, np.float64) - expected).max(), np.abs(expected).max()
        good = good and bool(apart <= MOST * most)
        print(f"{name}: {apart:.3g} of {most:.3g}{'' if good else '  WRONG'}", flush=True)
    if not uses:
        print(f"{name}: no matrices were used", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["attention", "products"])
    only = parser.parse_args().only
    found = [] if only == "products" else [check(f"attention {s}", attention(s)) for s in ATTENTION]
    if only != "products":  # scores that differ by more than what a row is shifted by at first
        found.append(check(f"attention {GROWING}, large", attention(GROWING), 3.0))
    found += [] if only == "attention" else products()
    return 0 if all(found) else 1


def products() -> list[bool]:
    types = TensorType((512, 96), td.float16), TensorType((384, 96), td.float16)
    found = [check("products", td.trace(lambda x, y: [x @ y.T, x.T @ x], *types))]
    # Rows, columns and depths of which the last tile, or part, is not whole.
    types = TensorType((600, 200), td.float16), TensorType((500, 200), td.float16)
    odd = td.trace(lambda x, y: [x @ y.T, x.T @ x, (x @ y.T) @ y], *types)
    found.append(check("products with uneven sizes", odd))
    for columns in (576, 1536):
        types = TensorType((8192, 576), td.float16), TensorType((columns, 576), td.float16)
        every = td.trace(lambda x, y: [x @ y.T, (x @ y.T).T @ x], *types)
        found.append(check(f"products with {columns} columns", every))
    return found


if __name__ == "__main__":
    sys.exit(main())
