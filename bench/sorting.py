"""Sorting on the CPU beside NumPy: values and places of rows, and the five greatest.

    python bench/sorting.py

Calls of both in turns, the least time of each; a compiled call gives new arrays, as NumPy's does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import treadle as td

SHAPES = [(64, 64), (64, 256), (64, 1024), (8, 16_384), (2, 65_536), (1, 1 << 20)]
TURNS = 9
FIRST = 5


def least(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The least milliseconds of each, in turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], 1e3 * (time.perf_counter() - start))
    return found


def measured(shape: tuple[int, int]) -> dict[str, float]:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    spec = td.Spec(shape)
    sort = td.compile(lambda x: td.sort(x), spec, device="cpu")
    first = td.compile(lambda x: td.topk(x, FIRST), spec, device="cpu")
    places = np.argsort(x, -1, kind="stable")
    assert np.array_equal(np.asarray(sort(x)[1]), places), "not the stable order"
    calls = {"sort": lambda: sort(x), "topk": lambda: first(x)}
    return least(calls | {"numpy": lambda: np.argsort(x, -1, kind="stable")})


def main() -> None:
    table = Table("rows × elements", "sort ms", f"topk {FIRST} ms", "NumPy's stable argsort ms")
    for shape in SHAPES:
        found = measured(shape)
        times = (f"{found[name]:.3f}" for name in ("sort", "topk", "numpy"))
        table.add_row(" × ".join(f"{n:,}" for n in shape), *times)
    Console().print(table)


if __name__ == "__main__":
    main()
