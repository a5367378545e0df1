"""Random programs of products, views and sums through the e-graph: equal, well typed, provable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treadle as td
from proof_replay import replay
from treadle.domains.field import equal_graphs
from treadle.egraph.language import own_rules
from treadle.egraph.optimize import optimise
from treadle.ir.graph import Graph
from treadle.ir.verify import verify
from treadle.kernel.costs import Costs
from treadle.kernel.target import CPU, Target
from treadle.rules.canonical import canonicalise

RULES = {rule.name: rule for rule in own_rules()}
SIZES = (1, 2, 3)


def eager(**costs: float) -> Target:
    """Whatever saves anything at all is taken."""
    found = Costs(narrow_flop=0, least_move=0.0, least_gain=0.0, **costs)
    return replace(CPU, costs=found)


# What is dear in each: arithmetic of products, kernels, elementwise arithmetic.
TARGETS = (
    eager(flop=1, byte=0, element=0.01, launch=0),
    eager(flop=0, byte=0, element=0.01, launch=1),
    eager(flop=0.01, byte=0.0, element=1, launch=0.1),
)
Rng = np.random.Generator
Pool = list[td.Tensor]


def product(rng: Rng, pool: Pool) -> td.Tensor | None:
    a, b = pick(rng, pool), pick(rng, pool)
    return a @ b if a.shape[1] == b.shape[0] else a @ b.T if a.shape[1] == b.shape[1] else None


def total(rng: Rng, pool: Pool) -> td.Tensor | None:
    a = pick(rng, pool)
    same = [b for b in pool if b.shape == a.shape]
    other = same[rng.integers(len(same))]
    return a + other if rng.random() < 0.6 else a * other


def scaled(rng: Rng, pool: Pool) -> td.Tensor:
    a = pick(rng, pool)
    factor = [3.0, a.sum(), td.exp(a)[:1, :1].reshape(()), a[:1]][rng.integers(4)]
    return a * factor


def view(rng: Rng, pool: Pool) -> td.Tensor:
    a = pick(rng, pool)
    kind = rng.integers(4)
    if kind == 0:
        return a.T
    if kind == 1 and a.shape[0] > 1:
        return a[1:] if rng.random() < 0.5 else a[:-1]
    if kind == 2:
        return a.reshape(a.shape[1], a.shape[0])
    return td.concat([a, a * 2], 0)[: a.shape[0]]


def padded(rng: Rng, pool: Pool) -> td.Tensor | None:
    a = pick(rng, pool)
    n = a.shape[0]
    if n < 2:
        return None
    return td.pad(td.exp(a[:1]), [(0, n - 1), (0, 0)]) + td.pad(a[1:] * 2, [(1, 0), (0, 0)])


def summed(rng: Rng, pool: Pool) -> td.Tensor:
    a = pick(rng, pool)
    columns = a.sum(0) if rng.random() < 0.5 else (a * a[:, :1]).sum(0)
    return td.expand(columns.sum() if rng.random() < 0.5 else columns, a.shape)


KINDS: tuple[Callable[[Rng, Pool], td.Tensor | None], ...] = (
    product, product, product, total, total, scaled, view, padded, summed,
)  # fmt: skip


def pick(rng: Rng, pool: Pool) -> td.Tensor:
    return pool[rng.integers(len(pool))]


def program(seed: int, length: int = 14) -> Graph:
    rng = np.random.default_rng(seed)
    shapes = [tuple(int(n) for n in rng.choice(SIZES, 2)) for _ in range(4)]

    def function(*inputs: td.Tensor) -> list[td.Tensor]:
        pool = list(inputs)
        for _ in range(length):
            made = KINDS[rng.integers(len(KINDS))](rng, pool)
            if made is not None and max(made.shape) <= 4:
                pool.append(made)
        return pool[-3:]

    return canonicalise(td.trace(function, *[td.Spec(s) for s in shapes]))


def check(seeds: range) -> Counter[str]:
    fired: Counter[str] = Counter()
    for seed in seeds:
        graph = program(seed)
        for target in TARGETS:
            result: Any = optimise(graph, target)
            if result.graph is graph:
                continue
            verify(result.graph)
            assert equal_graphs(graph, result.graph), (seed, dict(result.fired))
            replay(graph, result, RULES)
            fired += result.fired
    return fired


def test_random_programs_stay_equal() -> None:
    assert len(check(range(12))) >= 8


@pytest.mark.parametrize("seed", [212, 402])
def test_a_replacement_that_was_there_is_proved(seed: int) -> None:
    """It stands on operands that are equal to those asked for, by steps that the proof must have."""
    check(range(seed, seed + 1))


@pytest.mark.slow
def test_many_random_programs_stay_equal() -> None:
    assert len(check(range(100, 500))) >= 15
