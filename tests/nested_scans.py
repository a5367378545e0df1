"""Random functions of scans inside scans: carries that stay, change places or start alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import treadle as td
from treadle.ir.graph import Graph

WIDTH = 4
UNARY: tuple[Callable[..., Any], ...] = (
    td.tanh,
    lambda a: a * 0.5 + 1.0,
    lambda a: a * a,
    lambda a: -a,
)
BINARY: tuple[Callable[..., Any], ...] = (
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: td.where(a < b, a, b),
)


def graph_of(seed: int) -> Graph:
    """A function of scans in scans; of every second seed its gradients."""
    types = [td.Spec(shape) for shape in ((3, WIDTH), (3, 3, WIDTH), (WIDTH, WIDTH))]

    def function(h, x, w):
        rng, values = random.Random(seed), [h]
        for _ in range(rng.choice([1, 1, 2])):
            depth = rng.choice([2, 2, 3])
            values += _scanned(rng.randrange(10**9), depth, list(values), x, w)
        reached = h.sum() + x.sum() + w.sum()  # a gradient for each
        return sum(((v * v).sum() for v in values[1:]), reached)

    if seed % 2:
        return td.trace(lambda *given: td.grad(function, (0, 1, 2))(*given), *types)
    return td.trace(function, *types)


def _value(rng: random.Random, values: list[Any], w: Any, depth: int = 2) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice(values)
    first = _value(rng, values, w, depth - 1)
    if kind < 0.5:
        return rng.choice(UNARY)(first)
    if kind < 0.85:
        return rng.choice(BINARY)(first, _value(rng, values, w, depth - 1))
    return first @ w


def _scanned(seed: int, depth: int, values: list[Any], x: Any, w: Any) -> list[Any]:
    """What a scan gives; its body may have scans of its own."""
    rng = random.Random(seed)
    carries, stacked, length = (
        rng.choice([1, 2, 2, 3]),
        rng.choice([0, 1, 2]),
        rng.choice([1, 2, 3]),
    )
    first = [
        rng.choice(values) if rng.random() < 0.7 else td.zeros((3, WIDTH)) for _ in range(carries)
    ]
    inner_seed = rng.randrange(10**9)

    def body(carried, row):
        choose = random.Random(inner_seed)
        inside = [*carried, row, choose.choice(values)]
        if depth > 1:
            for _ in range(choose.choice([1, 1, 2])):
                inside += _scanned(choose.randrange(10**9), depth - 1, inside, x, w)
        kinds = [lambda: choose.choice(carried), lambda: choose.choice(inside)]
        kinds += [lambda: _value(choose, inside, w)] * 4
        following = tuple(choose.choice(kinds)() for _ in carried)
        return following, tuple(choose.choice(kinds)() for _ in range(stacked))

    given = tuple(first), x[:length]
    carried, rows = td.scan(body, *given, reverse=rng.random() < 0.3)
    return [*carried, *(y.sum(0) if rng.random() < 0.7 else y[0] for y in rows)]
