"""Rotations by position in their usual spellings cost the same; what is only like them stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treadle as td
from test_recognition import found_in
from treadle.autodiff.backward import differentiate
from treadle.domains.domain import evaluate
from treadle.domains.float64 import Float64
from treadle.ir.types import TensorType
from treadle.kernel import cost
from treadle.kernel.target import CPU, GPU, Target
from treadle.pipeline import optimize, recognise
from treadle.schedule.schedule import schedule

X, WAVE = TensorType((32, 64, 32)), TensorType((64, 16))
Function = Callable[..., Any]


def halves(x, c, s):
    a, b = td.chunk(x, 2, -1)
    return td.concat([a * c - b * s, b * c + a * s], -1)


def halves_rotated(x, c, s):
    a, b = td.chunk(x, 2, -1)
    return x * td.concat([c, c], -1) + td.concat([-b, a], -1) * td.concat([s, s], -1)


def halves_stacked(x, c, s):
    pair = x.reshape(*x.shape[:-1], 2, -1)
    a, b = pair[..., 0, :], pair[..., 1, :]
    return td.stack([a * c - b * s, a * s + b * c], -2).reshape(*x.shape)


def neighbours(x, c, s):
    a, b = x[..., ::2], x[..., 1::2]
    return td.stack([a * c - b * s, a * s + b * c], -1).reshape(*x.shape)


def neighbours_apart(x, c, s):
    pair = x.reshape(*x.shape[:-1], -1, 2)
    re, im = pair[..., 0], pair[..., 1]
    turned = re * c - im * s, re * s + im * c
    return td.concat([t.unsqueeze(-1) for t in turned], -1).reshape(*x.shape)


SPELLINGS: dict[str, tuple[Function, Function]] = {
    "x · cos + rotated · sin": (halves_rotated, halves),
    "stacked halves": (halves_stacked, halves),
    "real and imaginary parts": (neighbours_apart, neighbours),
}


def figures(function: Function, target: Target) -> tuple[int, int]:
    """Calls of a gradient's program, and bytes that they move."""

    def loss(x, c, s):
        y = function(td.tanh(x), c, s)
        return (y * y).sum()

    graph = recognise(td.trace(loss, X, WAVE, WAVE), target)
    graph = optimize(differentiate(graph, ["x"]).graph, target)
    calls = list(schedule(graph, target=target).counted_calls())
    return sum(n for _, n in calls), sum(n * cost.traffic(c.kernel) for c, n in calls)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_cost_the_same(name: str) -> None:
    written, usual = SPELLINGS[name]
    for target in (CPU, GPU):
        (calls, moved), (usual_calls, usual_moved) = (figures(f, target) for f in (written, usual))
        assert calls <= usual_calls + 2  # cosines and sines of the whole width are two tables
        assert moved <= 1.1 * usual_moved  # here they are a fifteenth of it all


NEAR: dict[str, tuple[Function, Function]] = {
    "sine turned round": (lambda x, c, s: halves_stacked(x, c, -s), halves),
    "halves exchanged": (lambda x, c, s: halves_stacked(td.roll(x, 16, -1), c, s), halves),
    "results exchanged": (lambda x, c, s: td.roll(halves_stacked(x, c, s), 16, -1), halves),
    "cosine for sine": (lambda x, c, s: halves_stacked(x, s, c), halves),
    "neighbours for halves": (neighbours_apart, halves),
    "real parts twice": (lambda x, c, s: neighbours_apart(x, c, s * 0), neighbours),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_another_rotation_stays_one(name: str) -> None:
    """Its values are its own after all rules, and not those of the rotation that it is like."""
    written, like = NEAR[name]
    _, after = found_in(written, X, WAVE, WAVE)
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=t.shape) for n, t in zip("xcs", (X, WAVE, WAVE), strict=True)}
    other = td.trace(like, X, WAVE, WAVE)
    ours, theirs = (evaluate(g, arrays, Float64())[0] for g in (after, other))
    assert not np.allclose(ours, theirs)
