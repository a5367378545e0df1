"""Gradients of single functions beside PyTorch's, by processor time of one thread.

    python bench/operations.py                         # all
    python bench/operations.py softmax logsumexp       # those whose names contain a word
    TREADLE_TARGET=x86-64-v3 python bench/operations.py --ours   # without PyTorch

A model's step hides a slow function behind fast ones; here each stands alone. Times are the least
of some rounds of each in turn. Processor time leaves out what others take of the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TREADLE_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F

import treadle as td

SAMPLE = 0.004  # seconds of a sample, at least


@dataclass(frozen=True)
class Case:
    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]


def rows_and_columns() -> Iterator[Case]:
    """Sums along rows of few and many columns, and down columns."""
    for shape, axis in [
        *(((20_000, n), 1) for n in (2, 3, 5, 7, 10, 16, 24, 32, 65, 100)),
        ((64, 100, 33), 1),
        ((1000, 7), 0),
        ((7, 100_000), 1),
    ]:
        for name, ours, theirs in [
            ("softmax", td.softmax, torch.softmax),
            ("logsumexp", td.logsumexp, torch.logsumexp),
            ("max", td.max, torch.amax),
            ("cumsum", td.cumsum, torch.cumsum),
            ("deviation", deviation, deviation),
        ]:
            yield Case(
                f"{name} {shape} along {axis}",
                (shape,),
                lambda x, f=ours, a=axis: f(x, a),
                lambda x, f=theirs, a=axis: f(x, a),
            )


def deviation(x: Any, axis: int) -> Any:
    gap = x - x.mean(axis, keepdim=True)
    return gap / ((gap * gap).mean(axis, keepdim=True) + 1e-5) ** 0.5


def contractions() -> Iterator[Case]:
    for spec, left, right in [
        ("ij,jk->ik", (512, 512), (512, 512)),
        ("bqhd,bkhd->bhqk", (4, 128, 8, 32), (4, 128, 8, 32)),
        ("ibj,jbk->ibk", (128, 16, 128), (128, 16, 128)),
        ("ijb,jkb->ikb", (64, 64, 16), (64, 64, 16)),
        ("ijb,jkb->ikb", (8, 8, 256), (8, 8, 256)),
        ("btd,de->bte", (8, 100, 129), (129, 257)),
        ("bhid,bhjd->bhij", (5, 3, 50, 17), (5, 3, 50, 17)),
    ]:
        yield Case(
            f"einsum {spec} {left}",
            (left, right),
            lambda x, y, s=spec: td.einsum(s, x, y),
            lambda x, y, s=spec: torch.einsum(s, x, y),
        )


def convolutions() -> Iterator[Case]:
    for x, w, how in [
        ((4, 32, 28, 28), (64, 32, 3, 3), {"padding": 1}),
        ((4, 32, 28, 28), (64, 32, 3, 3), {"padding": 1, "stride": 2}),
        ((2, 3, 112, 300), (32, 3, 7, 7), {"padding": 3, "stride": 2}),
        ((4, 96, 28, 28), (96, 1, 3, 3), {"padding": 1, "groups": 96}),
        ((4, 96, 28, 28), (96, 1, 5, 5), {"padding": 2, "groups": 96, "stride": 2}),
        ((4, 64, 28, 28), (128, 8, 3, 3), {"padding": 1, "groups": 8}),
        ((8, 64, 200), (64, 64, 9), {"padding": 4}),
        ((4, 65, 149), (65, 65, 3), {"padding": 1}),
        ((2, 16, 12, 16, 16), (24, 16, 3, 3, 3), {"padding": 1}),
    ]:
        theirs = getattr(F, f"conv{len(x) - 2}d")
        yield Case(
            f"conv {x} {w} {how}",
            (x, w),
            lambda x, w, h=how: td.conv(x, w, **h),
            lambda x, w, h=how, f=theirs: f(x, w, **h),
        )


def others() -> Iterator[Case]:
    image = (8, 64, 28, 28)
    yield Case(
        "max_pool 3 2 1",
        (image,),
        lambda x: td.max_pool(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 3, 2, 1),
    )
    yield Case(
        "avg_pool 3 1", (image,), lambda x: td.avg_pool(x, 3, 1), lambda x: F.avg_pool2d(x, 3, 1)
    )
    yield Case("sort", ((64, 1000),), lambda x: td.sort(x)[0], lambda x: torch.sort(x)[0])
    yield Case("topk 5", ((64, 1000),), lambda x: td.topk(x, 5)[0], lambda x: torch.topk(x, 5)[0])
    for shape, causal in [
        ((2, 4, 197, 64), False),
        ((2, 4, 256, 32), True),
        ((30, 3, 13, 17), False),
    ]:
        yield Case(
            f"attention {shape} causal={causal}",
            (shape,) * 3,
            lambda q, k, v, c=causal: td.attention(q, k, v, causal=c),
            lambda q, k, v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
        )


def calls(case: Case, is_alone: bool) -> tuple[list[Callable[[], object]], float]:
    """Ours, PyTorch's if it is wanted, and processor seconds until ours had run once."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype(np.float32) for s in case.shapes]
    every = tuple(range(len(arrays)))
    start = time.process_time()
    loss = td.grad(lambda *xs: (case.ours(*xs) ** 2).mean(), argnums=every)
    run = td.compile(loss, *(td.Spec(a.shape) for a in arrays), device="cpu")
    run(*arrays)
    first = time.process_time() - start
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]

    def backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        (case.theirs(*leaves) ** 2).mean().backward()

    return [lambda: run(*arrays), *([] if is_alone else [backward])], first


def least(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds of each, in turns."""
    repeats = []
    for f in functions:
        f()
        start = time.process_time()
        f()
        repeats.append(max(1, int(SAMPLE / max(time.process_time() - start, 1e-5))))
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, (f, n) in enumerate(zip(functions, repeats, strict=True)):
            start = time.process_time()
            for _ in range(n):
                f()
            best[i] = min(best[i], (time.process_time() - start) / n * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ours", action="store_true", help="without PyTorch")
    given = parser.parse_args()
    torch.set_num_threads(1)
    families = (rows_and_columns, contractions, convolutions, others)
    for case in (case for family in families for case in family()):
        if given.words and not any(word in case.name for word in given.words):
            continue
        functions, first = calls(case, given.ours)
        ours, *theirs = least(functions, given.rounds)
        beside = f"{theirs[0]:9.3f} {ours / theirs[0]:6.2f}" if theirs else ""
        print(f"{case.name:72} {ours:9.3f} {beside}   first {first:.2f} s", flush=True)


if __name__ == "__main__":
    main()
