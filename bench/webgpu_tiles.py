"""Every tile of products by cooperative matrices, timed by the adapter's timestamps: TFLOP/s.

    python bench/webgpu_tiles.py
    python bench/webgpu_tiles.py --sizes 8192 576 1536 --kinds forward

A product of `--sizes` rows, depth and columns as a layer has it: forward x·wᵀ, the gradient of its
input y·w, and that of its weights yᵀ·x. The tile that the mapping chooses by its own count of
cycles is marked: where another is faster, the count is wrong (schedule/mapping/matrices.py).
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import numpy as np

import treadle as td
from treadle.backends.stages import build
from treadle.backends.webgpu.backend import WebGpuToolchain
from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Tiled
from treadle.kernel.mapped import geometry_of
from treadle.kernel.target_webgpu import WebGpuLimits, asked_of
from treadle.runtime.webgpu.device import device
from treadle.schedule.mapping import matrices

SIZES = [(8192, 576, 1536), (8192, 1536, 576), (8192, 576, 960)]
COUNT, ROUNDS = 4, 3  # products of one program, which have a launch; runs, of which the best counts
# Seconds that a device is kept busy before it is timed, and products that do so: while programs are
# compiled it may slow down, and rates of a sweep fell to a fifth from one tile to the next.
BUSY, CHAIN = 0.3, (4096, 40)
OPTIONS = CompileOptions(target="native+cooperative-matrix")
EVERY = matrices.TILES


def product(kind: str, sizes: tuple[int, int, int]) -> Graph:
    m, k, n = sizes
    x, w, y = ((m, k), (n, k), (m, n))
    shapes = {"forward": (x, w), "input": (y, w), "weight": (y, x)}[kind]

    def products(*values: Any) -> list[Any]:
        a, others = values[0], values[1:]
        left = a.T if kind == "weight" else a
        return [left @ (b.T if kind == "forward" else b) for b in others]

    types = [TensorType(s, td.float16) for s in (shapes[0], *[shapes[1]] * COUNT)]
    return td.trace(products, *types)


def chain() -> Graph:
    """Products one after the other, of one matrix."""
    size, count = CHAIN

    def products(x: Any, w: Any) -> Any:
        for _ in range(count):
            x = x @ w
        return x

    return td.trace(products, *[TensorType((size, size), td.float16)] * 2)


@functools.cache
def heater(limits: WebGpuLimits) -> Any:
    matrices.TILES = EVERY
    toolchain, graph = WebGpuToolchain(limits), chain()
    built = build(toolchain, graph, CompileReport("webgpu", "float16"), OPTIONS)
    zeros = {name: np.zeros((CHAIN[0], CHAIN[0]), np.float16) for name in graph.leaves}
    loaded = toolchain.load(graph, built)
    return lambda: loaded.run(zeros)


def seconds(graph: Graph, limits: WebGpuLimits) -> tuple[float, tuple[int, int, int, int]]:
    """Of one product, and the tile that it has, with a warp's part."""
    tried, heat = matrices.TILES, heater(limits)
    matrices.TILES, toolchain = tried, WebGpuToolchain(limits)
    program = toolchain.schedule(graph, OPTIONS)
    templates = [geometry_of(k).template for k in program.distinct()]
    tiled = [t for t in templates if isinstance(t, Tiled)]
    tiles = {(t.left.length, t.right.length, t.down, t.across) for t in tiled}
    built = build(toolchain, graph, CompileReport("webgpu", "float16"), OPTIONS)
    leaves = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    arrays = {n: np.full(t.shape, 0.01, np.float16) for n, t in leaves.items()}
    loaded = toolchain.load(graph, built)
    start = time.perf_counter()
    while time.perf_counter() - start < BUSY:
        heat()
    runs = [sum(t.seconds for t in loaded.profile(arrays)) for _ in range(ROUNDS)]
    return min(runs) / COUNT, tiles.pop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs=3, type=int, action="append")
    parser.add_argument("--kinds", nargs="*", default=["forward", "input", "weight"])
    given = parser.parse_args()
    limits = asked_of(device().limits, OPTIONS.target)
    for sizes in map(tuple, given.sizes or SIZES):
        for kind in given.kinds:
            graph, found = product(kind, sizes), []
            matrices.TILES = EVERY
            _, chosen = seconds(graph, limits)
            for tile in EVERY:
                matrices.TILES = (tile,)
                taken, own = seconds(graph, limits)
                rate = 2 * sizes[0] * sizes[1] * sizes[2] / taken / 1e12
                shape = "{}x{} ({}x{} a warp)".format(*own)
                found.append(f"{shape} {rate:.0f}{'*' if own == chosen else ''}")
            print(f"{sizes} {kind}: {', '.join(found)} TFLOP/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
