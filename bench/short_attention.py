"""Attention of few scores on a GPU: by cuDNN and by its definition, forward and backward.

usage: python bench/short_attention.py [--sizes BATCH HEADS QUERIES KEYS WIDTH BIAS ...]

Microseconds of all kernels of a step whose parameters are the queries, keys, values and, where BIAS
is 1, a bias for each head and query (`step.profile`, so that nothing else is timed). What is beside
attention is the same on both sides. `short_scores` and `short_biased_scores` of
`kernel/target_matmuls.py` are where the two cross.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

os.environ["TREADLE_CACHE"] = "0"  # whose keys know nothing of a target that is changed here

import numpy as np

import treadle as td
from treadle import nn, optim
from treadle.kernel import target as targets

SIZES = (
    (1024, 3, 49, 49, 32, 1), (1024, 3, 49, 49, 32, 0), (512, 12, 16, 16, 64, 0),
    (512, 12, 32, 32, 64, 0), (256, 12, 64, 64, 64, 0), (256, 12, 64, 64, 64, 1),
    (128, 12, 128, 128, 64, 0), (128, 12, 128, 128, 64, 1), (64, 8, 256, 256, 64, 1),
)  # fmt: skip
GPU = targets.GPU
NARROW = td.bfloat16


class Attention(nn.Module):
    def __init__(self, batch: int, heads: int, queries: int, keys: int, width: int, bias: int):
        self.q = nn.Parameter((batch, heads, queries, width), nn.init.normal())
        self.k = nn.Parameter((batch, heads, keys, width), nn.init.normal())
        self.v = nn.Parameter((batch, heads, keys, width), nn.init.normal())
        self.bias = nn.Parameter((1, heads, queries, keys), nn.init.normal()) if bias else None

    def forward(self, weights: Any) -> Any:
        q, k, v = (x.astype(NARROW) for x in (self.q, self.k, self.v))
        bias = None if self.bias is None else self.bias.astype(NARROW)
        return (td.attention(q, k, v, bias).astype(td.float32) * weights).sum()


def microseconds(sizes: tuple[int, ...], most: int) -> float:
    """With the definition up to so many scores of a head."""
    matmuls = replace(GPU.matmuls, short_scores=most, short_biased_scores=most)
    targets.GPU = replace(GPU, matmuls=matmuls)
    shape = sizes[0], sizes[1], sizes[2], sizes[4]
    step = td.compile_step(
        Attention(*sizes), lambda m, w: m(w), optim.sgd(0.0), td.Spec(shape), device="cuda"
    )
    weights = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return 1e6 * step.profile(weights).seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs=6, action="append")
    for sizes in map(tuple, parser.parse_args().sizes or SIZES):
        library, definition = (microseconds(sizes, most) for most in (1, 1 << 40))
        print(f"{sizes}: cuDNN {library:.0f} µs, definition {definition:.0f} µs", flush=True)


if __name__ == "__main__":
    main()
